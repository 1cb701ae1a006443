"""A small shop whose delayed tasks wait in the broker. Start reading at `app` and `tasks`."""
