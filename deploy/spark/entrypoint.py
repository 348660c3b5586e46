"""Starts what a container of the pipeline's image is for.

Spark on Kubernetes starts its pods with ``driver ARGUMENTS`` and ``executor``, and environment variables say what an
executor is to do (as with the image that Spark's own Dockerfile makes). All else are commands of ``mediator``.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pipeline.requirements import find_java

EXECUTOR = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def main(arguments: list[str]) -> None:
    """Replace this process by the program."""
    if arguments[:1] not in (["driver"], ["executor"]):
        os.execvp("mediator", ["mediator", *arguments])
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    environment = {**os.environ, **find_java().environment, "SPARK_HOME": str(home)}
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    program = driver(home, arguments[1:]) if arguments[0] == "driver" else executor(home, environment)
    os.execvpe(program[0], program, environment)


def driver(home: Path, arguments: list[str]) -> list[str]:
    """Return the command of a driver, whose arguments are those of spark-submit."""
    address = os.environ["SPARK_DRIVER_BIND_ADDRESS"]
    conf = (f"spark.driver.bindAddress={address}", f"spark.executorEnv.SPARK_DRIVER_POD_IP={address}")
    options = [word for each in conf for word in ("--conf", each)]
    return [str(home / "bin" / "spark-submit"), *options, "--deploy-mode", "client", *arguments]


def executor(home: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the command of an executor."""
    java_options = [environment[name] for name in sorted(environment) if name.startswith("SPARK_JAVA_OPT_")]
    classes = [environment.get("SPARK_CONF_DIR", ""), environment.get("SPARK_CLASSPATH", ""), f"{home}/jars/*"]
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    told = {
        "--driver-url": "SPARK_DRIVER_URL",
        "--executor-id": "SPARK_EXECUTOR_ID",
        "--cores": "SPARK_EXECUTOR_CORES",
        "--app-id": "SPARK_APPLICATION_ID",
        "--hostname": "SPARK_EXECUTOR_POD_IP",
        "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        "--podName": "SPARK_EXECUTOR_POD_NAME",
    }
    return [
        str(Path(environment["JAVA_HOME"]) / "bin" / "java"),
        *java_options,
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        ":".join(filter(None, classes)),
        EXECUTOR,
        *(word for option, name in told.items() for word in (option, environment[name])),
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
