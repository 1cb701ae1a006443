"""The records: the state about waiting tasks, kept in a Redis or a database."""
