"""Rates: how often the tasks of one key may start, and the line in which the others wait."""
