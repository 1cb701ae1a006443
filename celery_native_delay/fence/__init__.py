"""Fenced Spark runs: if Spark repeats a partition, the Celery tasks of one attempt run."""
