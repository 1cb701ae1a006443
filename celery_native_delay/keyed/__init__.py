"""Debounce, throttle and unique: of all calls with the same key, one task runs.

The Redis or database stores the state of each key, with the id of the key's task. Pure functions in
``rules.py`` decide how a call changes the state. State and message change in one step.
"""
