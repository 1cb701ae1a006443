"""Functions for a Celery app, such as ``install(app)``, and the class ``Delay``."""
