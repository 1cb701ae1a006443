"""Records: what this package knows about waiting tasks, in a Redis or a database."""
