"""Prometheus metrics of delayed tasks.

``celery -A PROJ delay exporter`` serves the metrics over HTTP. :func:`expose` adds the metrics to a
program's own Prometheus registry. Both need ``prometheus_client`` (the extra ``metrics``).
"""

from ..errors import brought_by

with brought_by("metrics", module=__name__):
    from .collector import Exposed, expose

__all__ = ("Exposed", "expose")
