"""How operator commands ask the service of this machine: through the control socket in its data directory."""

import asyncio
from pathlib import Path
from typing import Any

from mediator.cli.failing import CommandError
from mediator.cli.options import load, serve_command


def ask_service(config: Path | None, data_dir: Path | None, command: str, **fields: Any) -> dict[str, Any]:
    """Return the service's answer; :class:`CommandError` with its words when it refused, or when none runs."""
    from mediator.errors import SetupError
    from mediator.operators.control import ask

    try:
        answer = asyncio.run(ask(load(config, data_dir=data_dir).data_dir, command, **fields))
    except SetupError as error:
        start = serve_command(config, data_dir)
        raise CommandError(f"{error}; start `{start}`, or name its directory with --data-dir") from None
    if answer["error"]:
        raise CommandError(str(answer["error"]))
    return answer
