"""What waits in RabbitMQ's levels, kept by RabbitMQ itself: in streams, which anybody can read.

The broker writes each delayed message into a level and into a stream (``core/topology.py``). What
is cancelled or moved is noted in streams of *decisions*, which workers follow: they answer from
memory whether a message that waited counts. There is no store that decides a race, so a decision
must come a while before the message is due: :data:`~.ledger.MARGIN_SECONDS`.
"""
