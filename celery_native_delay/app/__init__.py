"""The parts of this package that live in a Celery app: ``install()`` and ``Delay(app)``."""
