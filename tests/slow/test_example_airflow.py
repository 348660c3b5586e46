"""examples/airflow_dag.py, run by the commands that it prints, in Airflow's own environment."""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="needs the extra pipeline")

from tests.harness.didcomm_service import missing
from tests.harness.examples import FOLDER, docstring
from tests.harness.service import Services
from tests.harness.spark import environment
from tests.slow.spark.journals import held
from tests.slow.spark.mail import mail_of

PROGRAM = Path(__file__).parents[2] / ".venv-airflow" / "bin" / "airflow"
"""Made by `make peers`."""
RUNS_WITHIN = 240.0


@pytest.mark.timeout(500)
async def test_the_dag_takes_the_journal_in_and_reports(services: Services, tmp_path: Path) -> None:
    if not PROGRAM.exists():
        missing("make peers installs Airflow")
    service = await services.running()
    async with mail_of(service) as mail:
        await mail.create("orders")
        await mail.client.send("orders", b"tea", storage="archive")
    home = tmp_path / "airflow"
    (home / "dags").mkdir(parents=True)
    shutil.copy(FOLDER / "airflow_dag.py", home / "dags")
    # The command of this checkout, and nothing else of its environment.
    programs = tmp_path / "bin"
    programs.mkdir()
    own = shlex.join([sys.executable, "-m", "mediator"])
    (programs / "mediator").write_text(f'#!/bin/sh\nPYTHONPATH={FOLDER.parent} exec {own} "$@"\n')
    (programs / "mediator").chmod(0o700)
    given = environment() | {"AIRFLOW_HOME": str(home), "MEDIATOR_DATA_DIR": str(service.data_dir)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MEDIATOR_"))}
    printed = re.findall("^    (airflow .+)$", docstring("airflow_dag"), re.MULTILINE)
    assert len(printed) == 2
    for command in ("airflow db migrate", *printed):
        done = await asyncio.to_thread(
            subprocess.run,
            [PROGRAM, *shlex.split(command)[1:]],
            capture_output=True,
            text=True,
            check=False,
            env=inherited | given | {"PATH": f"{programs}:{inherited['PATH']}"},
            timeout=RUNS_WITHIN,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lake = service.data_dir / "lake"
    assert held(lake)
    assert (lake / "archive").is_dir()
    assert (lake / "report.html").is_file()
