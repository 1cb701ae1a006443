"""Rate limits: how often the tasks of one key may start, and how other tasks wait."""
