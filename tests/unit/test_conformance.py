"""The frame of ``mediator conformance``: what comes of a check, how a run is told of, and which checks are chosen."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
from typer.testing import CliRunner

from conformance import report
from conformance.checks import (
    CannotTryError,
    CheckFailedError,
    Level,
    NotOfferedError,
    Suite,
    Transcript,
    expect,
)
from conformance.didcomm import SUITE
from conformance.running import Outcome, Result, run_checks
from mediator.cli import build_app

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN


class Session:
    """Notes when it is closed."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript
        self.closed = 0

    @asynccontextmanager
    async def open(self, transcript: Transcript) -> AsyncIterator["Session"]:
        self.transcript = transcript
        try:
            yield self
        finally:
            self.closed += 1


def suite(*errors: Exception | None, level: Level = MUST) -> Suite[Session]:
    """Make a suite of one check for each error, which it raises; None: it passes."""
    made: Suite[Session] = Suite("test")
    for number, error in enumerate(errors):

        @made.check(f"test.{number}", level, "RFC 1", "It has to.")
        async def check(session: Session, error: Exception | None = error) -> None:
            session.transcript.sent("ping", {"n": 1})
            session.transcript.came("pong \x00", b"\xff")
            if error is not None:
                raise error

    return made


async def results(made: Suite[Session]) -> list[Result]:
    return await run_checks(made, Session(Transcript()).open)


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (None, Outcome.PASSED, ""),
        (CheckFailedError("said no"), Outcome.FAILED, "said no"),
        (KeyError("body"), Outcome.FAILED, "KeyError: 'body'"),
        (TimeoutError("their own"), Outcome.FAILED, "TimeoutError: their own"),
        (NotOfferedError("not spoken"), Outcome.NOT_OFFERED, "not spoken"),
        (CannotTryError("no grant"), Outcome.SKIPPED, "no grant"),
    ],
)
async def test_what_comes_of_a_check(error: Exception | None, outcome: Outcome, detail: str) -> None:
    (result,) = await results(suite(error))
    assert (result.outcome, result.detail) == (outcome, detail)
    assert [(entry["direction"], entry["what"]) for entry in result.transcript[:2]] == [
        ("sent", "ping"),
        ("came", "pong \x00"),
    ]


async def test_a_check_without_end_is_ended_and_cleaned_up() -> None:
    made: Suite[Session] = Suite("test")
    session = Session(Transcript())

    @made.check("test.hangs", MUST, "RFC 1", "It ends.", seconds=0.01)
    async def hangs(_session: Session) -> None:
        await asyncio.Event().wait()

    @made.check("test.next", MUST, "RFC 1", "It is run.")
    async def passes(_session: Session) -> None:
        pass

    hung, following = await run_checks(made, session.open)
    assert (hung.outcome, hung.detail) == (Outcome.FAILED, "did not end within 0.01 s")
    assert following.outcome is Outcome.PASSED
    assert session.closed == 2


async def test_a_failing_clean_up_is_told_and_changes_no_outcome() -> None:
    @asynccontextmanager
    async def opening(transcript: Transcript) -> AsyncIterator[Session]:
        yield Session(transcript)
        raise OSError("gone")

    (result,) = await run_checks(suite(None), opening)
    assert result.outcome is Outcome.PASSED
    assert result.transcript[-1]["content"] == "OSError: gone"


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ([None, NotOfferedError()], report.PASSED),
        ([None, CheckFailedError(), CannotTryError()], report.FAILED),
        ([None, CannotTryError()], report.NOT_RUN),
        ([NotOfferedError()], report.NOT_RUN),
        ([], report.NOT_RUN),
    ],
)
async def test_the_exit_code_says_whether_all_passed(errors: list[Exception | None], code: int) -> None:
    assert report.exit_code(await results(suite(*errors))) == code


async def test_junit_is_valid_xml_whatever_a_peer_sent() -> None:
    came = await results(suite(None, CheckFailedError("said \x00\ud800 <no>"), NotOfferedError("quiet")))
    root = ElementTree.fromstring(report.as_junit(came, "http://x/?a=\x01"))
    (of_level,) = root
    assert of_level.attrib == {"name": "must", "tests": "3", "failures": "1", "skipped": "1", "errors": "0"}
    (failure,) = root.iter("failure")
    assert failure.attrib["message"] == "said ?? <no>"
    assert "RFC 1: It has to." in (failure.text or "")
    assert orjson.dumps(report.as_json(came[:1], "x", "now"))


async def test_junit_holds_no_character_that_xml_cannot() -> None:
    # Of each run of characters that XML 1.0 forbids the first and the last, then what stands beside them.
    forbidden = "\0\b\v\f\r\x0e\x1f\ud800\udfff\ufffe\uffff"
    allowed = "\t\n\x20\x7f\x85\ud7ff\ue000\ufffd\U00010000\U0010ffff"
    came = await results(suite(CheckFailedError(forbidden + allowed)))
    (failure,) = ElementTree.fromstring(report.as_junit(came, forbidden)).iter("failure")
    assert failure.attrib["message"] == "?" * len(forbidden) + allowed


def test_a_transcript_is_bounded() -> None:
    transcript = Transcript()
    for _ in range(1000):
        transcript.sent("much", "x" * 1_000_000)
    assert len(orjson.dumps(transcript.entries)) < 1_000_000


def test_levels_include_those_before() -> None:
    made: Suite[Session] = Suite("test")
    for level in Level:
        made.check(f"test.{level}.it", level, "", "")(lambda _session: asyncio.sleep(0))
    chosen = {level: [check.id for check in made.select(level=level)] for level in Level}
    assert chosen[MUST] == ["test.must.it"]
    assert chosen[SHOULD] == ["test.must.it", "test.should.it"]
    assert chosen[OWN] == ["test.must.it", "test.should.it", "test.own.it"]
    assert [check.id for check in made.select("test.own")] == [check.id for check in made.select("own")]


def test_an_id_is_given_once_and_begins_with_its_suite() -> None:
    made = suite(None)
    for id in ("test.0", "other.1"):
        with pytest.raises(ValueError, match="taken, or not of the suite test"):
            made.check(id, MUST, "", "")(lambda _session: asyncio.sleep(0))


def test_expect_fails_with_what_was_done() -> None:
    expect(True, "never said")
    with pytest.raises(CheckFailedError, match="answered twice"):
        expect([], "answered twice")


@pytest.mark.parametrize("made", [SUITE], ids=["didcomm"])
def test_each_check_cites_a_sentence(made: Suite[object]) -> None:
    for check in made:
        assert check.source, check.id
        assert check.sentence.endswith("."), check.id
        assert check.level is not OWN or check.source.startswith("docs/protocol.md "), check.id
        assert check.level is OWN or not check.source.startswith("docs/"), check.id


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["conformance", *words])
    return result.exit_code, result.output + str(result.exception or "")


def test_list_shows_checks_and_needs_no_address() -> None:
    code, said = run("didcomm", "--list", "--only", "ping", "--level", "must")
    assert code == 0
    assert "didcomm.ping.v1" in said
    assert "didcomm.discover.v1" not in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["didcomm"], "give an invitation"),
        (["didcomm", "http://127.0.0.1:1/", "--seconds", "1"], "http://127.0.0.1:1"),
        (["didcomm", "no-such-file"], "no-such-file: neither a URL, nor a DID, nor a file with one"),
        (["didcomm", "https://x.example/?oob=zzzz"], "no invitation found in it"),
        (["didcomm", "did:key:z6Mk", "--only", "nothing"], "no check of level should begins with nothing"),
    ],
)
def test_what_cannot_be_run_says_why(words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    code, said = run(*words)
    assert code != 0
    assert reason in said
