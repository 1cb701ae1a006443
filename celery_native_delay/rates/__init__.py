"""Rates: how often the tasks of one key may start, and how the others wait for their turn."""
