"""The history of the pipeline's runs in SQL."""

import orjson

from mediator.ops.runs.records import KEPT, Ending, NewRun, Outcome, Run
from mediator.store.rows import Row
from mediator.store.session import Table

_RUN = "no, command, arguments, instance, process, started_at, ended_at, outcome, numbers, error"


class Runs(Table):
    """The runs of the pipeline, the newest :data:`~mediator.ops.runs.records.KEPT` of them."""

    def add(self, new: NewRun, now: int) -> Run:
        """Keep a run that begins now, and forget the oldest beyond the bound. Numbers grow and never come again."""
        arguments = orjson.dumps(new.arguments).decode()
        row = self._session.one(
            "INSERT INTO pipeline_run (command, arguments, instance, process, started_at, outcome, numbers, error)"
            f" VALUES (?, ?, ?, ?, ?, ?, '{{}}', '') RETURNING {_RUN}",
            (new.command, arguments, new.instance, new.process, now, Outcome.RUNNING.value),
        )
        self._execute(
            "DELETE FROM pipeline_run WHERE no <= (SELECT no FROM pipeline_run ORDER BY no DESC LIMIT 1 OFFSET ?)",
            (KEPT,),
        )
        return _run(row)

    def end(self, no: int, ending: Ending, now: int) -> Run | None:
        """Keep how a run ended; None when it has ended already, or is not there any more."""
        row = self._session.first(
            "UPDATE pipeline_run SET ended_at = ?, outcome = ?, numbers = ?, error = ?"
            f" WHERE no = ? AND ended_at IS NULL RETURNING {_RUN}",
            (now, ending.outcome.value, orjson.dumps(dict(ending.numbers)).decode(), ending.error, no),
        )
        return None if row is None else _run(row)

    def keep_log(self, no: int, log: str) -> None:
        """Keep the end of the output of a run, unless it succeeded."""
        self._execute(
            "UPDATE pipeline_run SET log = ? WHERE no = ? AND outcome <> ?", (log, no, Outcome.SUCCEEDED.value)
        )

    def get(self, no: int) -> tuple[Run, str] | None:
        """Return a run with the end of its output; None if it is not there any more."""
        row = self._session.first(f"SELECT {_RUN}, log FROM pipeline_run WHERE no = ?", (no,))
        return None if row is None else (_run(row[:-1]), row[-1])

    def newest(self, limit: int) -> list[Run]:
        """Return the newest runs, the newest first."""
        sql = f"SELECT {_RUN} FROM pipeline_run ORDER BY no DESC LIMIT ?"
        return [_run(row) for row in self._execute(sql, (limit,))]


def _run(row: Row) -> Run:
    no, command, arguments, instance, process, started_at, ended_at, outcome, numbers, error = row
    return Run(
        no,
        command,
        tuple(orjson.loads(arguments)),
        instance,
        process,
        started_at,
        ended_at,
        Outcome(outcome),
        orjson.loads(numbers),
        error,
    )
