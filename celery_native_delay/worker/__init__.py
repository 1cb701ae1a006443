"""The parts of this package that run in a Celery worker: a bootstep and checks of tasks."""
