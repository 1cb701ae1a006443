"""The transports: one module or folder per broker, without imports from each other.

A file name means the same in each folder. ``transport`` is kombu's transport with our channels.
``delays`` publishes, and ``outbox`` publishes in bulk. ``worker_part`` does a worker's duties,
``admin_part`` carries out commands, ``waiting`` lists and cancels waiting tasks.
"""
