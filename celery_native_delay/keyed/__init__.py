"""Debounce, throttle and unique: many calls with the same key send one task.

The store keeps the state of each key, such as the id of the key's task.
Pure functions in ``rules.py`` decide how a call changes the state.
"""
