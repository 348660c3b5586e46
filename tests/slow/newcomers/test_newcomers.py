"""Each newcomer gets to their first success by the commands that README prints for them, on a clean machine."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.harness.pages import ROOT
from tests.harness.service import listening
from tests.slow.newcomers import network

WITHIN = 900


@pytest.mark.timeout(WITHIN)
def test_newcomers_get_to_their_first_success(record_property: Callable[[str, object], None]) -> None:
    if not network.available() and any(map(listening, (4222, 8080))):
        pytest.skip("somebody listens on 4222 or 8080, and there may be no network namespace")
    command = [sys.executable, "-m", "tests.slow.newcomers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    record_property("printed", done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
