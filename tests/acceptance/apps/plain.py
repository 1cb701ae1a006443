"""The app of a worker or producer without the package."""

from tests.acceptance.apps.tasks import app_of_environment

app = app_of_environment()
