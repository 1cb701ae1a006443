"""Prometheus metrics of delayed tasks.

``celery -A PROJ delay exporter`` serves the metrics over HTTP. :func:`expose` adds the metrics to
the registry of a program that serves its own metrics. Both need ``prometheus_client``, which the
extras ``metrics`` and ``flower`` install.
"""

from ..errors import brought_by

with brought_by("metrics", whose=__name__):
    from .collector import Exposed, expose

__all__ = ("Exposed", "expose")
