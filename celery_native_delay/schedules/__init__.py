"""Periodic tasks whose next occurrence waits in the broker: pure functions without I/O."""
