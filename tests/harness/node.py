"""What tests run in Node; didcomm-rust, which v2 envelopes are held against, is the fixture ``rust``.

The packages are installed on first use. Where there is no npm the tests are skipped, but fail where CI is set.
"""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.harness.people import Person

FOLDER = Path(__file__).parents[1] / "slow" / "peers" / "node"
LOCK = "package-lock.json"


class Rust:
    """Packs and unpacks, one request after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["node", str(FOLDER / "oracle.js")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=FOLDER
        )

    def pack(
        self,
        message: dict[str, Any],
        to: str,
        sender: Person | None,
        others: Sequence[Person],
        *,
        sign: bool = False,
        signer: Person | None = None,
        **options: Any,
    ) -> bytes:
        """Pack for a DID or key id."""
        author = sender or signer
        people = [*others, *([author] if author else [])]
        text: str = self._ask(
            op="pack",
            message={"typ": "application/didcomm-plain+json", **message},
            to=to,
            **{"from": sender.did if sender else None},
            sign_by=author.did if author and (sign or signer) else None,
            options=options,
            documents=[person.document.raw for person in people],
            secrets=_secrets(author),
        )
        return text.encode()

    def unpack(self, envelope: bytes, receiver: Person, others: Sequence[Person] = ()) -> dict[str, Any]:
        """Return ``message`` and ``metadata``."""
        value: dict[str, Any] = self._ask(
            op="unpack",
            message=envelope.decode(),
            documents=[person.document.raw for person in (receiver, *others)],
            secrets=_secrets(receiver),
        )
        return value

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(request) + b"\n")
        self._process.stdin.flush()
        answer = orjson.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def _secrets(person: Person | None) -> list[dict[str, Any]]:
    return [
        {"id": secret.kid, "type": "JsonWebKey2020", "privateKeyJwk": dict(secret.jwk)}
        for secret in (person.secrets if person else ())
    ]


def install(folder: Path = FOLDER) -> None:
    """Install what the folder's lock file names unless it is there, one process at a time.

    Without npm the test is skipped.
    """
    if shutil.which("npm") is None:
        reason = "needs node and npm"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    done = folder / "node_modules" / ".installed"
    lock = folder / LOCK
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        wanted = file.read()
        if done.exists() and done.read_text() == wanted:
            return
        ran = subprocess.run(["npm", "ci"], cwd=folder, check=False, capture_output=True, text=True, timeout=110)
        if ran.returncode != 0:
            raise RuntimeError(f"npm ci failed: {ran.stderr[-2000:]}")
        done.write_text(wanted)


@pytest.fixture(scope="session")
def rust() -> Iterator[Rust]:
    """didcomm-rust."""
    install()
    process = Rust()
    yield process
    process.stop()
