"""Prometheus metrics of delayed tasks.

``celery -A PROJ delay exporter`` serves them. :func:`expose` adds them to the registry of a program
that serves its own. Needs the extra ``metrics``; Flower has it.
"""

from ..errors import brought_by

with brought_by("metrics", whose=__name__):
    from .collector import Exposed, expose

__all__ = ("Exposed", "expose")
