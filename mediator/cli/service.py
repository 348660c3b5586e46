"""The commands around the service itself: serve, init, check, migrate, cleanup."""

import asyncio
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mediator.cli import show
from mediator.cli.failing import CommandError
from mediator.cli.options import AsJson, Config, DataDir, Password, User, load
from mediator.private_files import open_file

if TYPE_CHECKING:
    from mediator.service import Running
    from mediator.settings import Settings

DatabaseUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="postgresql://…; without it an SQLite file in the data directory.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog="Example: mediator serve --data-dir /var/lib/mediator --nats 127.0.0.1:4222")(serve)
    app.command(epilog="Example: mediator init /etc/mediator.toml")(init)
    app.command(epilog="Example: mediator check --config /etc/mediator.toml")(check)
    app.command(epilog="Example: mediator migrate --data-dir /var/lib/mediator")(migrate)
    app.command(epilog="Example: mediator cleanup --dry-run")(cleanup)


def serve(
    config: Config = None,
    data_dir: DataDir = None,
    nats: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the managed NATS server listens.", show_default="127.0.0.1:4222"),
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Serve this NATS server or cluster instead of starting one.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where health and metrics are served.", show_default="127.0.0.1:8080"),
    ] = None,
    database_url: DatabaseUrl = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")] = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    settings = load(
        config,
        data_dir=data_dir,
        nats=nats,
        nats_url=nats_url,
        http=http,
        database_url=database_url,
        log_level=log_level,
    )
    import uvloop

    from mediator import logs
    from mediator.service import serve as run

    logs.setup(settings.log_level, settings.log_format)
    uvloop.run(run(settings, lambda running: _greet(settings, running)))


def _greet(settings: "Settings", running: "Running") -> None:
    if not sys.stdout.isatty():
        return
    where = (
        ""
        if settings.data_dir == Path("mediator-data").absolute()
        else f" --data-dir {shlex.quote(str(settings.data_dir))}"
    )
    login = "" if settings.anonymous or settings.nats_url is not None else " --user NAME --password …"
    host = "127.0.0.1" if settings.http.host in ("0.0.0.0", "::") else settings.http.host
    host = f"[{host}]" if ":" in host else host
    show.say(
        "\n"
        "The mediator is ready.\n"
        f"  NATS   {running.nats_url}\n"
        f"  HTTP   http://{host}:{running.http_port}  (/readyz, /metrics)\n"
        f"  data   {settings.data_dir}\n\n"
        "Try, in another terminal:\n"
        f"  mediator mailbox create my.inbox{where}{login}\n"
        f"  mediator send my.inbox 'hello'{where}{login}\n"
        f"  mediator fetch my.inbox --deliver earliest{where}{login}\n"
    )
    sys.stdout.flush()


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")] = Path("mediator.toml"),
) -> None:
    """Write a configuration file to start from: every option, its default and what it protects, as comments."""
    from mediator.cli.template import template

    try:
        # Passwords will be written into it.
        with os.fdopen(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as new:
            new.write(template())
    except FileExistsError:
        raise CommandError(f"{file} is there already; nothing was written") from None
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from None
    show.say(f"wrote {file}; edit it, then: mediator check --config {file} && mediator serve --config {file}")


def check(
    config: Config = None,
    snippet: Annotated[
        bool, typer.Option("--snippet", help="Print the accounts to paste into your own NATS server, nothing else.")
    ] = False,
    user: User = None,
    password: Password = None,
    as_json: AsJson = False,
) -> None:
    """Say what the settings mean; with a NATS server of your own, verify that requests arrive there.

    With accounts, give the login of one of a tenant's users: its requests are followed to the service, and it must not
    be able to list what others subscribe to.
    """
    settings = load(config)
    from mediator.cli import checking

    if snippet:
        text = checking.accounts_snippet(settings)
        show.as_json({"snippet": text}) if as_json else typer.echo(text, nl=False)
        return
    lines = [*checking.explain(settings)]
    if not as_json:
        for line in lines:
            show.say(line)
    found = [] if settings.nats_url is None else asyncio.run(checking.verify(settings, user, password))
    if as_json:
        server = [{"result": result, "text": text} for result, text in map(checking.parts, found)]
        show.as_json({"settings": dict(map(checking.parts, lines)), "server": server})
        return
    for line in found:
        show.say(line)


def migrate(
    config: Config = None, data_dir: DataDir = None, database_url: DatabaseUrl = None, as_json: AsJson = False
) -> None:
    """Bring the database's schema up to this program's; prints what was applied. Serve does it by itself."""
    settings = load(config, data_dir=data_dir, database_url=database_url)
    from mediator.cli.migrating import applied
    from mediator.store.opening import open_store

    before = set(applied(settings))
    open_store(settings).close()
    names = [name for name in applied(settings) if name not in before]
    if as_json:
        show.as_json({"applied": names})
        return
    for name in names:
        show.say(f"applied {name}")
    if not names:
        show.say("the schema is up to date")


def cleanup(
    config: Config = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    daemon: Annotated[bool, typer.Option("--daemon", help="Go on until SIGTERM, as a service of its own.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would go, and why.")] = False,
    confirm_clock: Annotated[
        bool, typer.Option("--confirm-clock", help="The clock is right: let expiry, paused by its jump, go on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what has expired, through the running service or, where none runs, by itself."""
    if daemon and as_json:
        raise typer.BadParameter("--daemon goes on, and has nothing to print in the end", param_hint="--json")
    settings = load(config, data_dir=data_dir, database_url=database_url)
    from mediator import logs
    from mediator.housekeeping.cleanup import run

    # What was done is said below; the log is for what goes wrong.
    logs.setup(settings.log_level if daemon else "warning", settings.log_format)
    give = show.as_json if as_json else None
    work = run(settings, daemon=daemon, dry_run=dry_run, confirm_clock=confirm_clock, say=show.say, give=give)
    code = asyncio.run(work)
    if code:
        raise typer.Exit(code)
