"""Errors as Celery's own commands show them: a sentence, and exit status 1."""

from __future__ import annotations

from click import ClickException

from .. import errors


class UnsupportedBroker(errors.UnsupportedBroker, ClickException):
    """Raised while click runs a command, which then tells it instead of a traceback."""
