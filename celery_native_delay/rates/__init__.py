"""Rate limits: how often the tasks with the same key may start, and how long other tasks wait."""
