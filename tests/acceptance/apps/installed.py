"""The app of a worker or producer with the package installed."""

from celery_native_delay import install
from tests.acceptance.apps.tasks import app_of_environment

app = install(app_of_environment())
if "tests_hop_seconds" in app.conf:
    from celery_native_delay.transports.sqs import hops

    hops.HOP_SECONDS = app.conf.tests_hop_seconds
if "tests_lease_seconds" in app.conf:
    from celery_native_delay.keyed import rules
    from celery_native_delay.worker import leases

    rules.LEASE_US = round(app.conf.tests_lease_seconds * 1_000_000)
    leases.RENEWED_EVERY_SECONDS = app.conf.tests_lease_seconds / 4
if "tests_overdue_seconds" in app.conf:
    from celery_native_delay.schedules import state

    state.OVERDUE_US = round(app.conf.tests_overdue_seconds * 1_000_000)
