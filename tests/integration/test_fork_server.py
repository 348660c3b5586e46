"""A fork of tests/harness/fork_server.py behaves as the program `mediator` does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.fork_server import ForkedProcess, can_fork, fork
from tests.harness.waiting import block_until

WITHIN = 60.0
DIES = """
import os, signal, sys
from pathlib import Path
from tests.harness.fork_server import fork
with open(sys.argv[1], "wb") as log:
    arguments = ["serve", "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0"]
    process = fork(arguments, log, Path(sys.argv[2]), dict(os.environ))
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(folder: Path, *arguments: str, **environment: str) -> ForkedProcess:
    with (folder / "log").open("ab") as log:
        return fork(list(arguments), log, folder, {**os.environ, **environment})


def test_a_fork_has_its_arguments_environment_and_folder(tmp_path: Path):
    assert start(tmp_path, "init", "here.toml").wait(WITHIN) == 0
    assert (tmp_path / "here.toml").exists()
    assert start(tmp_path, "check", MEDIATOR_MAX_WAITING="some").wait(WITHIN) == 2
    assert "max_waiting" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["no-such-command"], 2), (["status"], 1)])
def test_the_exit_code_of_a_fork_is_the_programs(tmp_path: Path, arguments: list[str], code: int):
    forked = start(tmp_path, *arguments)
    assert forked.wait(WITHIN) == code
    ran = subprocess.run(
        [sys.executable, "-m", "mediator", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (code, (tmp_path / "log").read_text())


def test_a_killed_fork_says_by_which_signal(tmp_path: Path):
    process = start(tmp_path, "serve")
    assert process.poll() is None
    process.kill()
    assert process.wait(WITHIN) == process.poll() == -signal.SIGKILL
    process.kill()


def test_a_fork_ends_with_the_process_that_asked_for_it(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", DIES, tmp_path / "log", tmp_path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    pid = int(ran.stdout)
    block_until(lambda: not Path(f"/proc/{pid}").exists(), WITHIN, "the fork is gone")


def test_variables_that_libraries_read_exclude_a_fork():
    given = dict(os.environ)
    assert can_fork(given | {"MEDIATOR_MAX_WAITING": "7", "PYSPARK_PYTHON": sys.executable})
    assert not can_fork(given | {"SSL_CERT_FILE": "ca.pem"})
