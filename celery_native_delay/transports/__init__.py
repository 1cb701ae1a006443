"""One module or folder for each broker; siblings never see each other.

A folder's files have the same names in all of them, for each is its broker's part of one interface:
``transport`` (kombu's, with our channels), ``delays`` (publishing), ``outbox`` (many messages),
``worker_part`` and ``admin_part`` (:mod:`.interface`), ``waiting`` (:mod:`..records.waiting`).
"""
