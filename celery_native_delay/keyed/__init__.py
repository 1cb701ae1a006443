"""Debounce, throttle and unique: of all calls with the same key, one task runs.

One record (a stored text) per key holds the id of its task. Pure functions in ``rules.py`` decide
how a call changes the record. Record and message change in one step, if the record is unchanged.
"""
