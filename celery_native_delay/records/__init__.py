"""Stores state about waiting tasks in a Redis or a database."""
