"""pgbouncer between a test and its PostgreSQL; without the program a test is skipped, but fails where CI is set."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.harness.postgres import answers, missing
from tests.harness.service import free_port

STARTS_WITHIN = 30


@contextmanager
def pooled(url: str, mode: str, **options: object) -> Iterator[str]:
    """Start pgbouncer with a ``pool_mode`` and further options, and yield a URL of the same database through it."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing("pgbouncer is not installed")
    server, port = urlsplit(url), free_port()
    database = server.path[1:]
    settings = {"listen_addr": "127.0.0.1", "listen_port": port, "auth_type": "any", "pool_mode": mode, **options}
    lines = [
        "[databases]",
        f"{database} = host={server.hostname} port={server.port} user={server.username} password={server.password}",
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in settings.items()),
    ]
    # It does not run as root; its configuration has a password in it.
    with tempfile.TemporaryDirectory(prefix="mediator-pgbouncer-") as folder:
        config = Path(folder) / "pgbouncer.ini"
        config.write_text("\n".join(lines))
        user: dict[str, str] = {}
        if os.geteuid() == 0:
            user["user"] = "postgres"
            for path in (Path(folder), config):
                shutil.chown(path, "postgres")
        log = subprocess.DEVNULL
        process = subprocess.Popen([program, "--quiet", config], stdout=log, stderr=log, cwd=folder, **user)
        try:
            through = f"postgresql://{server.username}@127.0.0.1:{port}/{database}"
            deadline = time.monotonic() + STARTS_WITHIN
            while not answers(through):
                assert process.poll() is None, "pgbouncer ended"
                assert time.monotonic() < deadline, "pgbouncer does not answer"
                time.sleep(0.02)
            yield through
        finally:
            process.terminate()
            process.wait(STARTS_WITHIN)
