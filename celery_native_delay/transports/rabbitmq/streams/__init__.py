"""The ledger in streams: a copy of what waits in the levels, kept by RabbitMQ and read by all.

The broker writes each delayed message into a level and into a stream (``topology.py``). What
is cancelled or moved is noted in streams of *decisions*, which workers follow: they answer from
memory whether a message that waited counts. There is no store that decides a race, so a decision
must come a while before the message is due: :data:`~.ledger.MARGIN_SECONDS`.
"""
