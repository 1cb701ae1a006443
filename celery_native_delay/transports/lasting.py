"""Errors of a connection that last: no waiting mends them, so nothing is tried again.

A wrong password, a database that is not there, a certificate that is not trusted: an answer, not
an outage. What has no answer (no listener, a peer that hangs or hangs up) may heal.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator

_TLS_REASONS = frozenset(
    ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "UNKNOWN_PROTOCOL", "NO_PROTOCOLS_AVAILABLE",
     "HTTP_REQUEST", "CERTIFICATE_VERIFY_FAILED", "NO_SHARED_CIPHER")
)  # fmt: skip

#: SQLSTATE, by its beginning: no such user or password, no such database, no such right.
_SQL_STATES = ("28", "3D", "42501")

#: What PostgreSQL says to a connection that it refuses, for which its drivers know no SQLSTATE.
_SQL_TEXTS = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied for database",
)

#: MySQL's numbers for the same.
_MYSQL = frozenset((1044, 1045, 1049, 1142, 1698))

#: SQLite's: not permitted, read-only, cannot be opened, not authorized, no database.
_SQLITE = frozenset((3, 8, 14, 23, 26))


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """*error* and what it was raised from, outermost first; redis-py does not say that of TLS."""
    while error is not None:
        yield error
        context = error.__context__
        error = error.__cause__ or (context if isinstance(context, ssl.SSLError) else None)


def is_lasting_tls(error: BaseException) -> bool:
    """True if one end does not want the other's TLS, or has none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = (isinstance(error, ssl.SSLError) and error.reason) or ""
    refused = "_ALERT_" in reason and "INTERNAL_ERROR" not in reason
    return refused or reason in _TLS_REASONS


def is_lasting_sql(error: BaseException) -> bool:
    """True if a driver of a database says that it will never let us in; also SQLAlchemy's."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(state, str) and state.startswith(_SQL_STATES):
        return True
    if getattr(error, "sqlite_errorcode", None) in _SQLITE:
        return True
    module = type(error).__module__.partition(".")[0]
    if module in ("pymysql", "MySQLdb", "mysql"):
        return bool(error.args) and error.args[0] in _MYSQL
    text = str(error)
    unknown = "FATAL:" in text and " does not exist" in text
    return module.startswith("psycopg") and (unknown or any(said in text for said in _SQL_TEXTS))
