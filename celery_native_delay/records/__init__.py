"""Stores state about waiting tasks in Redis or a database."""
