"""The child process of a long task: ``python -m mediator.long_task`` with a request on standard input.

It writes lines of JSON: ``{"step": …, "part": …}`` while it works, then ``{"result": …}`` or ``{"error": …}``.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from mediator.backup import backup
from mediator.errors import MediatorError
from mediator.parts import backup_scope, installed_settings, verify_checks
from mediator.settings.settings import Settings
from mediator.verify.report import verify

TELL_SECONDS = 0.2
"""Between two lines of progress."""
Tell = Callable[[str, float], None]
"""Is told the step, and which part of it is done, from 0 to 1."""


def _back_up(settings: Settings, arguments: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    file = Path(arguments["file"])
    manifest = backup(
        settings,
        backup_scope(settings),
        file,
        with_keys=arguments["with_keys"],
        on_progress=lambda what, done, total: tell(what, done / total if total else 1.0),
    )
    shown = manifest.model_dump(include={"version", "instance", "database", "rows", "left_out"})
    more = {"taken_at": manifest.taken_at / 1000, "keys": manifest.keys, "bytes": file.stat().st_size}
    return {"name": file.name, **shown, **more}


def _verify(settings: Settings, _arguments: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    return verify(settings, verify_checks(settings), tell).as_dict()


TASKS: Mapping[str, Callable[[Settings, Mapping[str, Any], Tell], dict[str, Any]]] = {
    "backup": _back_up,
    "verify": _verify,
}


def main() -> None:
    """Do what standard input asks for."""
    # So that what a task has begun to write is removed.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(os.EX_TEMPFAIL))
    request = orjson.loads(sys.stdin.buffer.read())
    told_at = 0.0

    def tell(step: str, part: float) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at >= TELL_SECONDS:
            told_at = now
            _write({"step": step, "part": part})

    try:
        result = TASKS[request["task"]](installed_settings()(**request["settings"]), request["arguments"], tell)
    except MediatorError as error:
        _write({"error": str(error)})
        sys.exit(1)
    _write({"result": result})


def _write(line: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
