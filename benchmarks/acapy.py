"""ACA-Py as a mediator, the peer of the DIDComm claim: its own queue holds mail in memory.

Its pickup protocol is a plugin from a separate repository, which is not installed here, so only forwards are compared.
"""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.servers import READY_SECONDS, ServerProcess, free_port

PROGRAM = Path(__file__).parents[1] / ".venv-acapy" / "bin" / "aca-py"
"""Made by `make peers`."""


class AcaPyMediator(ServerProcess):
    """An ACA-Py agent that grants mediation to everybody."""

    def __init__(self, folder: Path) -> None:
        """Start it and return when its admin API answers."""
        folder.mkdir(parents=True)
        http, ws, admin = free_port(), free_port(), free_port()
        self._admin = f"http://127.0.0.1:{admin}"
        self._log = folder / "log"
        command = [
            str(PROGRAM), "start", "--no-ledger", "--label", "mediator", "--auto-provision",
            "--wallet-type", "askar", "--wallet-name", "mediator", "--wallet-key", "key",
            "--inbound-transport", "http", "127.0.0.1", str(http),
            "--inbound-transport", "ws", "127.0.0.1", str(ws),
            "--outbound-transport", "http", "--outbound-transport", "ws",
            "--endpoint", f"http://127.0.0.1:{http}", f"ws://127.0.0.1:{ws}",
            "--admin", "127.0.0.1", str(admin), "--admin-insecure-mode",
            "--open-mediation", "--enable-undelivered-queue",
            "--auto-accept-invites", "--auto-accept-requests", "--log-level", "error",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
        super().__init__(process, f"http://127.0.0.1:{http}")
        end = time.monotonic() + READY_SECONDS
        while True:
            try:
                self._ask("GET", "/status/ready")
                return
            except OSError as error:
                if process.poll() is not None or time.monotonic() > end:
                    process.kill()
                    process.wait()
                    raise RuntimeError(f"ACA-Py did not start: {self._log.read_text()[-2000:]}") from error
                time.sleep(0.05)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._admin + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def invitation(self) -> str:
        """Create a multi-use invitation."""
        body = {"handshake_protocols": ["https://didcomm.org/connections/1.0"]}
        made = self._ask("POST", "/out-of-band/create-invitation?auto_accept=true&multi_use=true", body)
        return str(made["invitation_url"])
