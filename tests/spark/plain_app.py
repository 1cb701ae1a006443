"""A Celery app without the package."""

from celery import Celery

app = Celery("plain", broker="amqp://127.0.0.1:1", set_as_current=False)
