"""A store of waiting tasks outside the broker: a Redis or a database, with one row per task."""
