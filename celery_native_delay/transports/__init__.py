"""One module or folder for each broker; siblings never see each other.

Files of the same name do the same in each folder: ``transport`` (kombu's transport with our
channels), ``delays`` (publishing), ``outbox`` (bulk publishing), ``worker_part`` and ``admin_part``
(:mod:`.interface`), ``waiting`` (:mod:`..records.waiting`).
"""
