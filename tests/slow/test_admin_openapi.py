"""schemathesis sends the admin API of a running service what its document allows, and what it does not."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.app import app

TOKEN = "token-of-the-operator"
OPERATORS = {"tokens": [{"name": "ada", "token": TOKEN, "roles": ["admin"]}]}


@pytest.mark.timeout(300)
async def test_no_request_ends_in_a_server_error(tmp_path: Path) -> None:
    async with app(tmp_path / "data", operators=OPERATORS, didcomm={}, journal={}) as service:
        await service.done("MAILBOX.CREATE", {"name": "box"})
        described = (await service.call("GET", "/api/v1/openapi.json", token=TOKEN)).json
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(described))
        command = [
            Path(sys.executable).with_name("schemathesis"),
            "run",
            file,
            "--url",
            f"http://127.0.0.1:{service.service.http_port}/api/v1",
            "--phases=coverage,fuzzing",
            "--max-examples=5",
            "--seed=7",
            "--generation-database=none",
            # A health check would measure the machine.
            "--suppress-health-check=too_slow",
            # What an operation refuses within its types, and who is let in, have tests of their own.
            "--exclude-checks=positive_data_acceptance,ignored_auth",
            f"--header=Authorization: Bearer {TOKEN}",
            "--no-color",
        ]
        process = await asyncio.create_subprocess_exec(
            *map(str, command), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
