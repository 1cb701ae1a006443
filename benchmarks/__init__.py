"""Measure delayed delivery beside Celery without it: ``make bench``."""
