"""An S3 server of the tests: moto's, as a process of its own, with buckets that do not outlive it."""

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, sleep

from pipeline.lake import ObjectPlace

PATIENCE = 240.0
SECRET = "moto takes any secret"
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """A server."""

    url: str

    @property
    def options(self) -> dict[str, str]:
        """What opens it."""
        return {
            "aws_endpoint_url": self.url,
            "aws_access_key_id": "tests",
            "aws_secret_access_key": SECRET,
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
            "max_retries": "2",
            "retry_timeout": "60s",
        }

    def new_place(self) -> ObjectPlace:
        """Return an empty place in a bucket of its own."""
        bucket = f"bucket-{next(_NUMBERS)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{bucket}", method="PUT")).close()
        return ObjectPlace(f"s3://{bucket}/lake", tuple(self.options.items()))


@contextmanager
def object_store(log: Path) -> Iterator[ObjectStore]:
    """Run a server; what it says goes to ``log``."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=output,
        )
    try:
        until = monotonic() + PATIENCE
        while not _listens(port):
            assert server.poll() is None, log.read_text("utf-8")
            assert monotonic() < until, log.read_text("utf-8")
            sleep(0.05)
        yield ObjectStore(f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
