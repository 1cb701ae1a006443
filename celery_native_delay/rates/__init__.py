"""Rate limits: how many tasks with the same key may start in a period."""
