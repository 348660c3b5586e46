"""The commands ``mediator conformance …``: which checks to run, and where the results go."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from conformance import report
from conformance.checks import CannotTryError, Check, Level, Suite, Transcript
from conformance.running import Outcome, Result, run_checks
from mediator.cli import output
from mediator.cli.client import DEFAULT_SERVER, CredentialOptions, TlsOptions
from mediator.cli.options import CommandGroup, OutputOptions, one_word
from mediator.errors import SetupError
from mediator.login import Login

S = TypeVar("S")

app = CommandGroup(
    help="Check a mediator or a broker against the specifications, knowing only its address.", no_args_is_help=True
)

MARKS = {Outcome.PASSED: "ok", Outcome.FAILED: "FAILED", Outcome.NOT_OFFERED: "-", Outcome.SKIPPED: "skipped"}


@dataclass(frozen=True)
class RunOptions:
    """Which checks of a suite are run, and where the results go."""

    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFIX", help="Only checks whose ids begin so; may be given several times."),
    ] = None
    level: Annotated[
        Level,
        one_word(Level, "Check sentences with MUST, those with SHOULD too, or this project's own rules as well."),
    ] = Level.SHOULD
    listed: Annotated[bool, typer.Option("--list", help="List the checks, and run none.")] = False
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JUnit XML.")] = None

    def select(self, suite: Suite[S]) -> list[Check[S]]:
        """Return the checks that are wanted, in the order of the suite; raises :class:`SetupError` without any."""
        wanted = {check.id for prefix in self.only or [""] for check in suite.select(prefix, self.level)}
        if not wanted:
            raise SetupError(f"no check of level {self.level} begins with {', '.join(self.only or [])}; see --list")
        return [check for check in suite if check.id in wanted]


@dataclass(frozen=True)
class MediatorOptions(OutputOptions, RunOptions):
    """The same, and how the results are printed."""


@dataclass(frozen=True)
class BrokerOptions(OutputOptions, TlsOptions, CredentialOptions, RunOptions):
    """The same, and as whom the checks connect."""

    def login(self, server: str) -> Login:
        """Return how to connect to a server."""
        names = (field.name for group in (TlsOptions, CredentialOptions) for field in fields(group))
        return Login(server, **{name: getattr(self, name) for name in names})


def list_checks(checks: Sequence[Check[Any]], options: OutputOptions) -> None:
    """Print checks with their sentences."""
    columns = ("id", "level", "source", "sentence")
    rows = [(check.id, check.level.value, check.source, check.sentence) for check in checks]
    options.print_rows({"checks": [dict(zip(columns, row, strict=True)) for row in rows]}, columns, rows, "no checks")


def run_suite(
    checks: Sequence[Check[S]],
    target: str,
    open_session: Callable[[Transcript], AbstractAsyncContextManager[S]],
    options: MediatorOptions | BrokerOptions,
) -> None:
    """Run checks, print a line for each as it ends, write the file, and leave the program with the exit code."""
    width = max(len(check.id) for check in checks)

    def show(result: Result) -> None:
        if not options.as_json:
            line = f"{MARKS[result.outcome]:<8}{result.check.id:<{width}}  {result.check.level:<6}"
            output.print_line(f"{line}{result.milliseconds:>6} ms  {result.detail}".rstrip())

    at = datetime.now(UTC).isoformat(timespec="seconds")
    results = asyncio.run(run_checks(checks, open_session, show))
    if options.as_json:
        output.print_json(report.as_json(results, target, at))
    else:
        _explain(results)
    if options.junit is not None:
        options.junit.write_bytes(report.as_junit(results, target))
    raise typer.Exit(report.exit_code(results))


def _explain(results: Sequence[Result]) -> None:
    """Print the sentence of each check that failed, and the counts."""
    for result in results:
        if result.outcome is Outcome.FAILED:
            output.print_line(f"\n{result.check.id} ({result.check.level})")
            output.print_line(f"  {result.check.source}: {result.check.sentence}")
            output.print_line(f"  {result.detail}")
    output.print_line(f"\n{report.summary(results)}")


@app.command(
    "didcomm", epilog="Example: mediator conformance didcomm 'https://mediator.example/invite?oob=eyJAdHlwZSI6…'"
)
def didcomm(
    mediator: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INVITATION|DID|URL",
            help="Invitations, v1 and v2: their links, or files with them; the mediator's DID; or a URL at which one "
            "is published.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to wait for each answer.")] = 10.0,
    *,
    options: MediatorOptions,
) -> None:
    """Check a DIDComm mediator, v1 and v2, as a wallet and those who write to it.

    The exit code is 0 if all checks passed that the mediator offers, 1 if one failed, 2 if one could not be tried. Keys
    and mail are removed afterwards; the mediator keeps the empty connections.
    """
    from conformance.didcomm import SUITE, DidcommSession, Target

    checks = options.select(SUITE)
    if options.listed:
        list_checks(checks, options)
        return
    if not mediator:
        raise typer.BadParameter("give an invitation, a DID or a URL of the mediator")
    try:
        target = asyncio.run(Target.find(mediator, seconds))
    except CannotTryError as error:
        raise SetupError(str(error)) from error
    run_suite(checks, " ".join(mediator), partial(DidcommSession.open, target, seconds=seconds), options)


@app.command("mq9", epilog="Example: mediator conformance mq9 nats://broker.example:4222 --only mq9.fetch")
def mq9(
    broker: Annotated[str, typer.Argument(metavar="URL", help="The broker's NATS port.")] = DEFAULT_SERVER,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to wait for what has to come.")] = 10.0,
    *,
    options: BrokerOptions,
) -> None:
    """Check a broker of the mq9 protocol, all its editions, as its clients: with a NATS library and nothing else.

    The exit code is 0 if all checks passed that the broker offers, 1 if one failed, 2 if one could not be tried. The
    mailboxes end by their time to live, 10 minutes after they were made; agents are unregistered.
    """
    from conformance.mq9 import SUITE, BrokerSession

    checks = options.select(SUITE)
    if options.listed:
        list_checks(checks, options)
        return
    login = options.login(broker)
    opened = partial(BrokerSession.open, broker, seconds=seconds, options=login.nats_options)

    async def connect() -> None:
        async with opened(Transcript()):
            pass

    try:
        asyncio.run(connect())
    except CannotTryError as error:
        raise SetupError(str(error)) from error
    run_suite(checks, login.shown, opened, options)
