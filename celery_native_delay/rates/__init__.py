"""Rate limits: the number of tasks with the same key that may start per period."""
