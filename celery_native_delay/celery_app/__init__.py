"""The Celery side: the only importers of celery beneath the command line."""
