"""The app of a worker or producer that has the package installed."""

from celery_native_delay import install
from tests.acceptance.apps.tasks import app_of_environment

app = install(app_of_environment())
