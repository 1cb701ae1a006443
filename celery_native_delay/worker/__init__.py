"""Code that runs in a Celery worker: a bootstep, and checks of each task before the task runs."""
