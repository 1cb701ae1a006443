"""Computes the due times of periodic tasks: pure functions without I/O."""
