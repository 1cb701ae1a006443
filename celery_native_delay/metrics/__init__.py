"""Prometheus metrics of what waits and of what came of it.

``celery -A PROJ delay exporter`` serves them; whoever serves prometheus_client's registry already
gets them with :func:`expose`. Needs the extra ``metrics`` (Flower brings it).
"""

from ..errors import brought_by

with brought_by("metrics", whose=__name__):
    from .exposing import Exposed, expose

__all__ = ("Exposed", "expose")
