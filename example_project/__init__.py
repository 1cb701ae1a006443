"""A small shop whose delayed tasks wait in the broker. Start with the modules `app` and `tasks`."""
