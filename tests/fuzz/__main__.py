"""Fuzzes the parsers with atheris: ``python -m tests.fuzz --seconds 60``, for so long each, or ``--target body``."""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 4096
SLOW_SECONDS = 5
"""An input that takes longer is a finding."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one target, or all of them one after the other, each in a process of its own."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--seconds", type=int, default=60, help="how long each target runs")
    options.add_argument("--target", help="run this one only, in this process")
    chosen = options.parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed, so nothing is fuzzed: pip install -e '.[fuzz]', or run make fuzz")
        return 0
    if chosen.target is not None:
        _run(chosen.target, chosen.seconds)
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        print(f"{name}: {chosen.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(chosen.seconds)]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "nothing found")
    return 1 if failed else 0


def _run(name: str, seconds: int) -> None:
    """Fuzz one target; ends the process, with a status other than 0 when something was found."""
    import atheris

    with atheris.instrument_imports(include=["mediator", "pickup", "registry", "tests.fuzz"]):
        from tests.fuzz.targets import TARGETS

    target, seeds = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        flags = [f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-timeout={SLOW_SECONDS}"]
        atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={name}-", corpus], target)
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
