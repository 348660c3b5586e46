"""Runs the programs of examples/ by the commands that their first lines print, beside a service of a test."""

import ast
import asyncio
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.harness.parsing import parse
from tests.harness.service import Service

FOLDER = Path(__file__).parents[2] / "examples"
WITHIN = 240.0
COMMAND = re.compile(r"^    ((?:python|mediator) .+)$", re.MULTILINE)


def docstring(name: str) -> str:
    """Return what a program says about itself."""
    return ast.get_docstring(parse((FOLDER / f"{name}.py").read_text())) or ""


async def run_printed(name: str, service: Service, given: Mapping[str, str] | None = None) -> list[str]:
    """Run all commands that a program prints, in their order, and return what each wrote.

    What is in brackets is optional, and given here; ``given`` has what else a reader would replace.
    """
    filled = {
        "[nats://HOST:PORT]": service.nats_url,
        "[http://HOST:PORT]": f"http://127.0.0.1:{service.http_port}",
        **(given or {}),
    }
    commands = COMMAND.findall(docstring(name))
    assert commands, f"{name} does not say how to run it"
    return [await _run(command, service, filled) for command in commands]


async def _run(command: str, service: Service, filled: Mapping[str, str]) -> str:
    for written, value in filled.items():
        command = command.replace(written, value)
    program, *words = shlex.split(command)
    if program == "mediator":
        words = ["-m", "mediator", *words, "--data-dir", str(service.data_dir)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=FOLDER.parent, env=os.environ | service.environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), WITHIN)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{command}\n{err.decode()}"
    return out.decode()
