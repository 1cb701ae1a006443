"""What delayed delivery costs, side by side with what Celery does without it: ``make bench``."""
