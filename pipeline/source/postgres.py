"""Reads a PostgreSQL database beside the services that share it: a read-only snapshot, streamed as Arrow."""

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import adbc_driver_manager.dbapi
import adbc_driver_postgresql.dbapi

from mediator.errors import BadRequestError, UnavailableError
from pipeline.source.mailboxes import SLICES, Slice, select
from pipeline.source.options import Options

BATCH_BYTES = 16 << 20
"""Bytes after which the driver ends a batch."""

_BODY = "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END"
_COLUMNS = {"payload": f"{_BODY} AS payload"}
_DEFAULTS = {
    "application_name": "mediator-pipeline",
    "connect_timeout": "10",
    # A server that went without a word is noticed within minutes.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
# Literals are read as they are written here.
_SNAPSHOT = (
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
    "SET LOCAL standard_conforming_strings = on",
)


class PostgresMail:
    """One snapshot of the database; see :class:`pipeline.source.mailboxes.Database`."""

    find = "strpos"

    def __init__(self, options: Options) -> None:
        """Connect; :class:`BadRequestError` names ``database.url`` if that fails, or it is no such database."""
        assert options.database_url is not None
        self._password = urlsplit(options.database_url).password
        try:
            self._connection = adbc_driver_postgresql.dbapi.connect(_url(options.database_url))
            try:
                for statement in _SNAPSHOT:
                    self._asked(statement).close()
                self.table("SELECT no FROM mailbox LIMIT 1")
            except BaseException:
                self._connection.close()
                raise
        except (adbc_driver_manager.dbapi.Error, UnavailableError) as error:
            raise BadRequestError("database.url", f"cannot read it: {self._reason(error)}") from None

    def table(self, sql: str) -> Any:
        """Return the few rows of a question."""
        with self._asked(sql) as cursor:
            return cursor.fetch_arrow_table()

    def messages(self, columns: Sequence[str], slices: Sequence[Slice], where: str) -> Iterator[Any]:
        """Yield batches of about ``BATCH_BYTES``."""
        shown = ", ".join(_COLUMNS.get(column, column) for column in columns)
        for at in range(0, len(slices), SLICES):
            with self._asked(select(shown, slices[at : at + SLICES], where)) as cursor:
                try:
                    yield from cursor.fetch_record_batch()
                except (adbc_driver_manager.dbapi.Error, OSError) as error:
                    raise UnavailableError(f"database.url: {self._reason(error)}") from None

    def close(self) -> None:
        """Let go of the database."""
        self._connection.close()

    def _asked(self, sql: str) -> Any:
        cursor = self._connection.cursor()
        try:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
            cursor.execute(sql)
        except adbc_driver_manager.dbapi.Error as error:
            cursor.close()
            raise UnavailableError(f"database.url: {self._reason(error)}") from None
        return cursor

    def _reason(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        return text.replace(self._password, "…") if self._password else text


def _url(given: str) -> str:
    parts = urlsplit(given)
    return urlunsplit(parts._replace(query=urlencode(_DEFAULTS | dict(parse_qsl(parts.query)))))
