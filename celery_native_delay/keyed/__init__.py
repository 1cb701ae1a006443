"""Debounce, throttle and unique: one task stands for a key.

A record tells which. What becomes of it is decided by pure functions (``rules.py``) of the record
as it is read, and written only if it still is as it was, together with the message: one script on
Redis, one transaction in SQL.
"""
