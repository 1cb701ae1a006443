"""The transports: one module or folder per broker. Transports do not import each other.

A file name means the same in each folder. ``transport`` extends kombu's transport. ``delays``
publishes single delayed messages, and ``outbox`` publishes in bulk. ``worker_part`` is for workers,
``admin_part`` for commands. ``waiting`` lists and cancels waiting tasks.
"""
