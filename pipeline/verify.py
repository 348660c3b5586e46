"""What ``mediator verify`` checks of the pipeline: that the lake has the files which its tables name."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from mediator.system.extras import install_command
from mediator.verify.checks import Damage, DamageKind, Installation, Progress, SkippedError, VerifyCheck
from pipeline.lake import TABLES

LAKE = DamageKind(
    "lake_files",
    "Files of the lake are missing or were cut, or a table cannot be read.",
    "Restore the lake from a backup. Without one, move the lake away: the next `mediator pipeline ingest` makes a new "
    "one of what the journal still has.",
)


class LakeFiles(VerifyCheck):
    """Compares the files of each table in ``lake`` with those that its log names."""

    title = LAKE.code
    kinds: Sequence[DamageKind] = (LAKE,)

    def run(self, installation: Installation, progress: Progress) -> Iterator[Damage]:
        """See :class:`VerifyCheck`."""
        lake = installation.data_dir / "lake"
        tables = [path for name in TABLES if (path := lake / name).joinpath("_delta_log").is_dir()]
        if not tables:
            return
        if not find_spec("deltalake"):
            raise SkippedError(f"reading the lake needs {install_command('pipeline')}")
        for number, path in enumerate(tables):
            progress(number / len(tables))
            wrong = list(_wrong_files(path))
            if wrong:
                found = Damage(LAKE)
                found.add(len(wrong), wrong)
                yield found


def _wrong_files(table: Path) -> Iterator[str]:
    from urllib.parse import unquote

    import pyarrow as pa
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        files = pa.table(DeltaTable(table).get_add_actions())
    except (DeltaError, OSError) as error:
        yield f"{table.name}: {str(error).splitlines()[0][:200]}"
        return
    for name, size in zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True):
        path = table / unquote(name)
        if not path.is_file():
            yield f"{table.name}: {name} is missing"
        elif path.stat().st_size != size:
            yield f"{table.name}: {name} has {path.stat().st_size} bytes instead of {size}"
