"""The app of a worker or producer that has the package installed."""

from celery_native_delay import install
from tests.acceptance.apps.tasks import app_of_environment

app = install(app_of_environment())
if "tests_hop_seconds" in app.conf:
    from celery_native_delay.transports.sqs import hops

    hops.HOP_SECONDS = app.conf.tests_hop_seconds
