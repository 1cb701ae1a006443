"""A small shop whose delayed tasks wait in RabbitMQ. Start reading at `app` and `tasks`."""
