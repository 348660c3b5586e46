"""nginx in front of a service on this machine; without the program a test is skipped, but fails where CI is set."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.postgres import missing
from tests.harness.service import free_port, listening

STARTS_WITHIN = 30


@contextmanager
def proxied(folder: Path, port: int, *directives: str) -> Iterator[str]:
    """Pass everything on to a port, with nothing but ``proxy_pass`` unless directives say more; yield the origin."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing("nginx is not installed")
    own = free_port()
    paths = "".join(
        f"{name}_temp_path {folder}/nginx-{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; events {{}}\n"
        f"http {{ access_log off; {paths}\n"
        f"server {{ listen 127.0.0.1:{own}; location / {{ proxy_pass http://127.0.0.1:{port}; "
        f"{' '.join(directives)} }} }} }}\n"
    )
    process = subprocess.Popen([program, "-c", config, "-p", folder, "-e", folder / "nginx.log"])
    try:
        deadline = time.monotonic() + STARTS_WITHIN
        while not listening(own):
            assert process.poll() is None, (folder / "nginx.log").read_text()
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{own}"
    finally:
        process.terminate()
        process.wait(STARTS_WITHIN)
