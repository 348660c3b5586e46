"""One snapshot of a database, read as Arrow through ADBC: what SQLite and PostgreSQL have in common."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import adbc_driver_manager.dbapi

from mediator.errors import BadRequestError, UnavailableError


class Snapshot:
    """An open connection whose queries all see the same snapshot."""

    option: ClassVar[str]
    """The option that says where the database is: errors begin with it."""
    batches: ClassVar[Mapping[str, str]]
    """Options of a statement that bound its batches."""

    def __init__(self, connect: Callable[[], Any], name: str, first: Sequence[str] = ()) -> None:
        """Connect and execute the statements ``first``; ``name`` names the database in errors.

        Raises :class:`BadRequestError`, also if the database is not a mediator's.
        """
        try:
            self._connection = connect()
            try:
                for statement in first:
                    self._execute(statement).close()
                self.table("SELECT no FROM mailbox LIMIT 1")
            except BaseException:
                self._connection.close()
                raise
        except (adbc_driver_manager.dbapi.Error, UnavailableError) as error:
            raise BadRequestError(self.option, f"cannot read {name}: {self._reason(error)}") from None

    def table(self, sql: str) -> Any:
        """Return the rows of a query, which must be few."""
        with self._execute(sql) as cursor:
            return cursor.fetch_arrow_table()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _stream(self, sql: str) -> Iterator[Any]:
        """Yield the record batches of a query."""
        with self._execute(sql) as cursor:
            try:
                yield from cursor.fetch_record_batch()
            except (adbc_driver_manager.dbapi.Error, OSError) as error:
                raise UnavailableError(f"{self.option}: {self._reason(error)}") from None

    def _execute(self, sql: str) -> Any:
        cursor = self._connection.cursor()
        try:
            cursor.adbc_statement.set_options(**self.batches)
            cursor.execute(sql)
        except adbc_driver_manager.dbapi.Error as error:
            cursor.close()
            raise UnavailableError(f"{self.option}: {self._reason(error)}") from None
        return cursor

    def _reason(self, error: Exception) -> str:
        """Return an error's text in one line, without secrets."""
        return " ".join(str(error).split())
