"""Prometheus metrics of what waits and of what came of it.

``celery -A PROJ delay exporter`` serves them; a program that serves prometheus_client's registry
gets them there with :func:`expose`. Needs the extra ``metrics`` (Flower brings it).
"""

from ..errors import brought_by

with brought_by("metrics", whose=__name__):
    from .collector import Exposed, expose

__all__ = ("Exposed", "expose")
