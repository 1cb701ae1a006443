"""Records: what is known about what waits, whichever the broker, in a Redis or a database."""
