"""The ledger in Redis: a copy of what waits in RabbitMQ's levels, which cannot be looked into."""
