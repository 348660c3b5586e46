"""What the pipeline's commands share: their options, the session they get, and how they fail."""

import sys

import pytest
import typer

from mediator.cli import main
from mediator.cli.options import CommandError, CommandGroup
from mediator.errors import BadRequestError
from mediator.system.extras import install_command
from pipeline.jobs import MAX_CONF, SMALL_BYTES, SparkOptions, is_small, job


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command that does ``work`` with its job; returns its exit code, and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(work, *arguments):
        app = CommandGroup(pretty_exceptions_enable=False)

        @app.command()
        def count(options: SparkOptions):
            with job("count", options, creates=True) as given:
                typer.echo(work(given))

        monkeypatch.setattr("mediator.cli.build_app", lambda word: app)
        # Without any word the program prints where to begin.
        monkeypatch.setattr(sys, "argv", ["mediator", *map(str, arguments or ("--data-dir", tmp_path / "data"))])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


def nothing(_):
    raise AssertionError("it was begun")


def test_commands_use_the_lake_in_the_data_directory(run, spark, tmp_path):
    code, out, _ = run(lambda given: (given.spark.range(7).count(), str(given.lake)), "--data-dir", tmp_path / "data")
    assert (code, out) == (0, f"(7, '{tmp_path / 'data' / 'lake'}')\n")


def test_the_lake_may_be_elsewhere(run, spark, tmp_path):
    assert run(lambda given: given.lake, "--lake", "mine")[:2] == (0, f"{tmp_path / 'mine'}\n")


def test_settings_of_spark_are_passed_on(run, spark):
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    code, out, _ = run(
        lambda given: (given.spark.conf.get("spark.sql.shuffle.partitions"), given.spark.conf.get("spark.mine")),
        *("--conf", "spark.sql.shuffle.partitions=5", "--conf", "spark.mine=a=b"),
    )
    spark.conf.set("spark.sql.shuffle.partitions", partitions)
    spark.conf.unset("spark.mine")
    assert (code, out) == (0, "('5', 'a=b')\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--conf", "spark.sql.shuffle.partitions"), "expected spark.SOMETHING=VALUE"),
        (("--conf", "shuffle=5"), 'got "shuffle=5"'),
        (("--conf", "spark.=5"), 'got "spark.=5"'),
        (("--conf", "spark.a=b") * (MAX_CONF + 1), f"expected at most {MAX_CONF}, got {MAX_CONF + 1}"),
        (("--conf", "spark.sql.session.timeZone=Asia/Tokyo"), "expected spark.sql.session.timeZone to be UTC"),
        (("--master", "cluster"), "expected local[N]"),
        (("--master", "local[1]", "--remote", "sc://localhost"), "expected no master beside it"),
        (("--remote", "localhost"), "expected sc://HOST:PORT"),
    ],
)
def test_wrong_options_are_wrong_usage(run, arguments, said):
    code, out, err = run(nothing, *arguments)
    assert (code, out) == (2, "")
    assert said in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("lake", "said"),
    [
        ("hdfs://namenode/lake", "expected a folder or s3://…, s3a://…, gs://…, az://…, abfs://…, abfss://…, got"),
        ("others", "not a lake, and not empty"),
        ("others/file", "expected a folder"),
        ("others/file/lake", "expected a folder"),
        ("100%25/lake", "Delta tables cannot be kept under a path with '%25'"),
        ("back\\slash", "Delta tables cannot be kept under a path with"),
    ],
)
def test_unusable_lake_is_refused_before_spark_starts(run, tmp_path, lake, said):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(nothing, "--lake", lake)
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())
    assert "starting Spark" not in err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_the_extra_it_is_said_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert run(nothing) == (2, "", f"mediator: Spark is not installed: {install_command('pipeline')}\n")


def test_old_pyspark_is_named_with_the_remedy(run, monkeypatch):
    monkeypatch.setattr("pipeline.requirements.version", lambda _: "4.1.2")
    code, out, err = run(nothing)
    assert (code, out) == (2, "")
    assert err.startswith("mediator: pyspark is 4.1.2, the pipeline needs 4.2 or newer: pip install --upgrade")


def test_what_spark_cannot_do_is_one_line(run, spark):
    code, out, err = run(lambda given: given.spark.read.parquet("/no/such/folder").count())
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(
        "mediator: count: [PATH_NOT_FOUND] Path does not exist: file:/no/such/folder"
    )


def test_a_task_that_fails_is_one_line_with_its_reason(run, spark):
    def fail(given):
        return given.spark.sql("SELECT raise_error('this and no other')").collect()

    code, _, err = run(fail)
    assert code == 1
    assert "this and no other" in err.splitlines()[-1]


@pytest.mark.parametrize("error", [BadRequestError("lake", "is no lake"), CommandError("lake: is no lake")])
def test_what_the_work_itself_refuses_is_a_failure(run, spark, error):
    def fail(_):
        raise error

    code, _, err = run(fail)
    assert (code, err.splitlines()[-1]) == (1, "mediator: lake: is no lake")


def test_how_far_it_has_come_is_shown_on_a_terminal(run, spark, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")

    def work(given):
        given.on_progress("segments", 1_200, 4_000)
        return "done"

    code, out, err = run(work)
    assert (code, out) == (0, "done\n")
    assert "count: segments" in err
    assert "1,200 of 4,000" in err


def test_little_is_what_all_files_are_together(tmp_path):
    half, more, gone = (tmp_path / name for name in ("half", "more", "gone"))
    for path, size in ((half, SMALL_BYTES // 2), (more, SMALL_BYTES // 2 + 1)):
        with path.open("wb") as file:
            file.truncate(size)
    assert is_small([half, gone, half])
    assert not is_small([half, more])
