"""Debounce, throttle and unique: of all calls with the same key, one task runs.

The Redis or database stores one text per key, with the id of the key's task. Pure functions in
``rules.py`` decide how a call changes the text. Text and message change in one step.
"""
