"""A bootstep of Celery's worker, and checks of each task before the task runs."""
