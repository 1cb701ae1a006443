"""What waits in RabbitMQ's levels, which nobody can look into: kept beside them, in a Redis."""
