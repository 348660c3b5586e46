"""Publishes the tables of a lake in an Iceberg catalog: the same Parquet files, neither copied nor changed.

A table of the catalog gets one snapshot for each time that its table of the lake has changed. Delta stays what the lake
is written in; the catalog is behind it until the next time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from mediator.errors import MediatorError, SetupError, UnavailableError
from mediator.operate.units import format_count
from pipeline.lake import ARCHIVE, EVENTS, TABLES
from pipeline.lake.delta import check_lake
from pipeline.source.schema import PARTITION

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

OWNER = "mediator.lake"
"""The property of a published table that names its lake."""
_DAY = "day"
_TIMES = {EVENTS: "at", ARCHIVE: "created_at"}
"""The column whose day is the partition of a table; of usage tables it is the hour."""


@dataclass(slots=True)
class PublishResult:
    """What a run of ``publish`` did."""

    tables: int = 0
    """Tables of the lake that are in the catalog now."""
    added: int = 0
    """Files that the catalog did not have."""
    removed: int = 0
    """Files that the lake has no more, such as those that were merged."""

    def lines(self) -> Iterator[str]:
        """Yield the result as lines for people."""
        yield (
            f"{format_count(self.tables, 'table')} published, {format_count(self.added, 'file')} added, "
            f"{self.removed:,} removed"
        )


def publish(lake: Path, catalog_name: str, namespace: str) -> PublishResult:
    """Make the tables of a catalog's namespace those of the lake; pyiceberg's configuration says what the catalog is.

    Raises :class:`SetupError` for a folder that is not a lake, a catalog that is not configured, and a table of that
    name which is not of this lake; :class:`UnavailableError` if the catalog refuses, or somebody else changed a table
    meanwhile. A run that fails leaves each table as it was or as the lake is.
    """
    from pyiceberg.catalog import load_catalog

    check_lake(lake)
    result = PublishResult()
    with _translate_errors(catalog_name):
        try:
            catalog = load_catalog(catalog_name)
        except ValueError as error:
            raise SetupError(f"the catalog {catalog_name}: {error}") from None
        catalog.create_namespace_if_not_exists(namespace)
        for name in sorted(TABLES):
            try:
                table = DeltaTable(lake / name)
            except TableNotFoundError:
                continue
            _publish_table(catalog, f"{namespace}.{name}", table, lake, result)
            result.tables += 1
    return result


def _publish_table(catalog: "Catalog", name: str, table: DeltaTable, lake: Path, result: PublishResult) -> None:
    from pyiceberg.io.pyarrow import parquet_files_to_data_files

    published = _open(catalog, name, table, lake)
    files = {_url(uri) for uri in table.file_uris()}
    known = {task.file.file_path: task.file for task in published.scan().plan_files()}
    new, gone = sorted(files - known.keys()), sorted(known.keys() - files)
    if not new and not gone:
        return
    with published.transaction() as transaction:
        properties = {"mediator.version": str(table.version())}
        with transaction.update_snapshot(snapshot_properties=properties).overwrite() as snapshot:
            for path in gone:
                snapshot.delete_data_file(known[path])
            for file in parquet_files_to_data_files(published.io, published.metadata, iter(new)):
                snapshot.append_data_file(file)
    result.added += len(new)
    result.removed += len(gone)


def _open(catalog: "Catalog", name: str, table: DeltaTable, lake: Path) -> "Table":
    """Open the table of the catalog, or create it, with the columns that the files have."""
    from pyiceberg.table import TableProperties
    from pyiceberg.transforms import DayTransform

    schema = pa.schema([field for field in table.to_pyarrow_dataset().schema if field.name != PARTITION])
    # Whoever expires snapshots may not delete files that are the lake's.
    properties = {OWNER: str(lake), "gc.enabled": "false"}
    published = catalog.create_table_if_not_exists(name, schema, properties=properties)
    if published.properties.get(OWNER) != str(lake):
        raise SetupError(f"{name} is there already, and not a table of the lake {lake}: name another namespace")
    with published.update_schema() as update:
        update.union_by_name(schema)
    if PARTITION in table.metadata().partition_columns and not published.spec().fields:
        with published.update_spec() as spec:
            spec.add_field(_TIMES.get(name.rpartition(".")[2], "hour"), DayTransform(), _DAY)
    # Files know columns by name, where Iceberg knows them by number.
    mapping = published.schema().name_mapping.model_dump_json()
    if published.properties.get(TableProperties.DEFAULT_NAME_MAPPING) != mapping:
        with published.transaction() as transaction:
            transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
    return published


def _url(uri: str) -> str:
    # Delta's paths of this machine are encoded, Iceberg's URLs are not.
    return uri if "://" in uri else f"file://{unquote(uri)}"


@contextmanager
def _translate_errors(catalog: str) -> Iterator[None]:
    try:
        yield
    except MediatorError:
        raise
    except Exception as error:
        # Each kind of catalog has the errors of its own library.
        lines: list[Any] = str(error).splitlines() or [type(error).__name__]
        raise UnavailableError(f"the catalog {catalog}: {lines[0][:500]}") from error
