"""Reads a PostgreSQL database beside running services: a read-only snapshot, streamed as Arrow."""

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import adbc_driver_postgresql.dbapi

from pipeline.source.adbc import Snapshot
from pipeline.source.mailboxes import SLICES, MessageRange, RowRange, select_ranges
from pipeline.source.options import ReadOptions

BATCH_BYTES = 16 << 20
"""Bytes after which the driver ends a batch."""

_BODY = "CASE WHEN body_no IS NULL THEN payload ELSE (SELECT body.payload FROM body WHERE body.no = body_no) END"
_COLUMNS = {"payload": f"{_BODY} AS payload"}
_DEFAULTS = {
    "application_name": "mediator-pipeline",
    "connect_timeout": "10",
    # A dead server is noticed within minutes.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
# So that backslashes in literals are plain characters.
_SNAPSHOT = (
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
    "SET LOCAL standard_conforming_strings = on",
)


class PostgresDatabase(Snapshot):
    """One snapshot of the database; see :class:`pipeline.source.mailboxes.MailboxDatabase`."""

    find = "strpos"
    option = "database.url"
    batches = MappingProxyType({"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})

    def __init__(self, options: ReadOptions) -> None:
        """Connect; :class:`BadRequestError` names ``database.url`` if that fails, or it is no such database."""
        assert options.database_url is not None
        self._password = urlsplit(options.database_url).password
        url = _url(options.database_url)
        super().__init__(lambda: adbc_driver_postgresql.dbapi.connect(url), "it", _SNAPSHOT)

    def stretch(self) -> None:
        """Return None: its rows have no stable position."""

    def messages(
        self, columns: Sequence[str], slices: Sequence[MessageRange], stretch: RowRange | None, where: str
    ) -> Iterator[Any]:
        """Yield batches of about ``BATCH_BYTES``."""
        assert stretch is None
        shown = ", ".join(_COLUMNS.get(column, column) for column in columns)
        for at in range(0, len(slices), SLICES):
            yield from self._stream(select_ranges(shown, slices[at : at + SLICES], where))

    def _reason(self, error: Exception) -> str:
        text = super()._reason(error)
        return text.replace(self._password, "…") if self._password else text


def _url(given: str) -> str:
    parts = urlsplit(given)
    return urlunsplit(parts._replace(query=urlencode(_DEFAULTS | dict(parse_qsl(parts.query)))))
