"""Debounce, throttle and unique: of all calls with the same key, one task runs.

One record per key holds the id of that task. Pure functions (``rules.py``) decide what a call does
to the record. Record and message change in one step, and only if the record is still unchanged.
"""
