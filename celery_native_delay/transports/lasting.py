"""Recognise connection errors that a retry cannot fix, such as a wrong password."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

_TLS_REASONS = frozenset(
    ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "UNKNOWN_PROTOCOL", "NO_PROTOCOLS_AVAILABLE",
     "HTTP_REQUEST", "CERTIFICATE_VERIFY_FAILED", "NO_SHARED_CIPHER")
)  # fmt: skip

#: Beginnings of a SQLSTATE that mean: wrong user or password, no such database, no permission.
_SQL_STATES = ("28", "3D", "42501")

#: Texts of PostgreSQL when it refuses a connection. PostgreSQL's drivers give no SQLSTATE then.
_SQL_TEXTS = (
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "is not permitted to log in",
    "permission denied for database",
)

#: MySQL's error numbers for wrong user or password, no such database, no permission.
_MYSQL = frozenset((1044, 1045, 1049, 1142, 1698))

#: Error codes of SQLite: not permitted, read-only, cannot open, not authorized, no database.
_SQLITE = frozenset((3, 8, 14, 23, 26))


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield *error*, then each exception that caused this error."""
    while error is not None:
        yield error
        context = error.__context__
        error = error.__cause__ or (context if isinstance(context, ssl.SSLError) else None)


def is_lasting_tls(error: BaseException) -> bool:
    """Return True for TLS errors that a retry cannot fix, such as untrusted certificates."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = (isinstance(error, ssl.SSLError) and error.reason) or ""
    refused = "_ALERT_" in reason and "INTERNAL_ERROR" not in reason
    return refused or reason in _TLS_REASONS


def is_lasting_sql(error: BaseException) -> bool:
    """Return True for database errors that a retry cannot fix, such as wrong passwords."""
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
