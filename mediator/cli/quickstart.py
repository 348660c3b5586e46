"""The command quickstart: a folder with settings, users and systemd units with few rights, and what to do next."""

import json
import os
import pwd
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mediator.cli.client import NAME, write_private
from mediator.cli.options import CommandError, CommandGroup, OutputOptions
from mediator.endpoint import Endpoint
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.system.private_files import make_folder

_UNIT = """\
[Unit]
Description={description}
After=network-online.target time-sync.target
Wants=network-online.target time-sync.target

[Service]
{user}{run}
UMask=0077

# It writes to its data directory, talks over the network, and needs nothing else of the machine.
{rights}"""
_DAEMON = """\
ExecStart={command}
Restart=on-failure
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=65536"""
_INSTALL = """\

[Install]
WantedBy={target}
"""
_TIMER = """\
[Unit]
Description=Mediator: the pipeline, each night

[Timer]
OnCalendar=*-*-* 03:00
RandomizedDelaySec=30min
Persistent=yes

[Install]
WantedBy=timers.target
"""
_STEPS = ("ingest", "archive", "report")
_ANY_USER = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""
_SYSTEM = """\
CapabilityBoundingSet=
PrivateDevices=yes
PrivateMounts=yes
PrivateTmp=yes
PrivateUsers=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=read-only
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProtectSystem=strict
ReadWritePaths={folder}
RemoveIPC=yes
SystemCallFilter=~@privileged
"""
PASSWORD_BYTES = 24
MEDIATOR = (sys.executable, "-m", "mediator")
SERVICE_USER = "mediator"
"""Who runs a system's service that root has set up."""

app = CommandGroup()


def unit_text(
    command: Sequence[str],
    folder: Path,
    user: str | None,
    description: str = "Mediator: mailboxes for software agents and wallets",
) -> str:
    """Return a unit that runs ``command`` and may write to ``folder``.

    ``user`` runs it from the system's manager; None makes a unit for a user's own manager, which cannot take away what
    only root may.
    """
    run = _DAEMON.format(command=_written(command))
    target = "default.target" if user is None else "multi-user.target"
    return _unit(run, folder, user, description) + _INSTALL.format(target=target)


def pipeline_units(mediator: Sequence[str], options: Sequence[str], folder: Path, user: str | None) -> tuple[str, str]:
    """Return a unit that runs the pipeline's steps one after the other, and a timer that starts it each night."""
    steps = [f"ExecStart={_written([*mediator, 'pipeline', step, *options])}" for step in _STEPS]
    run = "\n".join(["Type=oneshot", *steps, "Nice=19", "CPUWeight=idle"])
    return _unit(run, folder, user, "Mediator: what passed through it goes to the lake and into a report"), _TIMER


def _unit(run: str, folder: Path, user: str | None, description: str) -> str:
    system = "" if user is None else _SYSTEM.format(folder=_quote(str(folder)))
    name = "" if user is None else f"User={user}\n"
    return _UNIT.format(description=description, user=name, run=run, rights=_ANY_USER + system)


def _written(command: Sequence[str]) -> str:
    return " ".join(map(_quote, command))


def _quote(word: str) -> str:
    """Quote a word as systemd.syntax(7) asks; %, $ and \\ have a meaning there."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'


@app.command(epilog="Example: mediator quickstart /srv/mediator --user ann --user bob --system")
def quickstart(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where everything goes.")] = Path("mediator"),
    user: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A user, with a password of its own; give several.", show_default="agent"),
    ] = None,
    nats: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where NATS clients connect.")] = "127.0.0.1:4222",
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where HTTP is served.")] = "127.0.0.1:8080",
    system: Annotated[
        bool, typer.Option("--system", help="Write a unit for the system's systemd, not for that of this user.")
    ] = False,
    *,
    options: OutputOptions,
) -> None:
    """Set up a service: data directory, settings, users with passwords, a systemd unit; prints what to do next.

    It starts nothing, and never overwrites a file.
    """
    names = user or ["agent"]
    for name in names:
        if not NAME.fullmatch(name) or names.count(name) > 1:
            raise typer.BadParameter(
                f'expected different names of letters, digits, -, _ and ., got "{name[:80]}"', param_hint="--user"
            )
    plan = _Plan(
        folder.absolute(),
        {name: secrets.token_urlsafe(PASSWORD_BYTES) for name in names},
        nats=_endpoint(nats, "--nats"),
        http=_endpoint(http, "--http"),
        system_user=_service_user() if system else None,
        operator_token=secrets.token_urlsafe(PASSWORD_BYTES),
    )
    plan.write()
    fields = {
        "config": str(plan.config),
        "data_dir": str(plan.data_dir),
        "unit": str(plan.unit),
        "optional_units": [str(path) for path in plan.optional_units()],
        "contexts": {name: str(plan.context(name)) for name in names},
        "start": plan.start_commands(),
        "next": plan.first_commands(),
    }
    options.print(fields, plan.summary())


def _endpoint(text: str, option: str) -> Endpoint:
    try:
        endpoint = Endpoint.parse(text)
        if endpoint.port == 0:
            raise ValueError("expected a port that clients can know, not 0")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return endpoint


def _service_user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name if os.geteuid() else SERVICE_USER


@dataclass(frozen=True)
class _Plan:
    """What is made, and where."""

    folder: Path
    passwords: dict[str, str]
    nats: Endpoint
    http: Endpoint
    system_user: str | None
    """Who runs the service; None: the user who runs this, from a manager of its own."""
    operator_token: str

    @property
    def config(self) -> Path:
        return self.folder / "mediator.toml"

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def unit(self) -> Path:
        return self.folder / "mediator.service"

    def context(self, name: str) -> Path:
        return self.folder / "contexts" / f"{name}.json"

    @property
    def server(self) -> str:
        everywhere = self.nats.host in {"0.0.0.0", "::"}
        return f"nats://{Endpoint(socket.gethostname(), self.nats.port) if everywhere else self.nats}"

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield each file with its text."""
        # Passwords, keys and mail end in no commit of a repository around the folder.
        yield self.folder / ".gitignore", "*\n"
        yield self.config, self.settings()
        for name, password in self.passwords.items():
            login = {"server": self.server, "user": name, "password": password}
            yield self.context(name), json.dumps(login, indent=2) + "\n"
        yield self.unit, unit_text([*MEDIATOR, "serve", *self._options], self.data_dir, self.system_user)
        yield from self.optional_units().items()

    def optional_units(self) -> dict[Path, str]:
        """Return the units of what the service can do itself, for those who want it beside the service."""
        folder = self.folder / "optional-units"
        daemon = [*MEDIATOR, "cleanup", "--daemon", *self._options]
        pipeline, timer = pipeline_units(MEDIATOR, self._options, self.data_dir, self.system_user)
        return {
            folder / "mediator-cleanup.service": unit_text(
                daemon, self.data_dir, self.system_user, "Mediator: the clean-up of expired mail"
            ),
            folder / "mediator-pipeline.service": pipeline,
            folder / "mediator-pipeline.timer": timer,
        }

    @property
    def _options(self) -> list[str]:
        return ["--config", str(self.config)]

    def settings(self) -> str:
        """Return the settings file."""
        users = [
            f"    {{ name = {_toml(name)}, password = {_toml(password)} }},\n"
            for name, password in self.passwords.items()
        ]
        return (
            "# Settings of the mediator. `mediator init` writes a file with all options and what they are for.\n"
            f"data_dir = {_toml(str(self.data_dir))}\n"
            f"nats = {_toml(str(self.nats))}\n"
            f"http = {_toml(str(self.http))}\n\n"
            "# Who may connect. A tenant of another name has mailboxes of its own.\n"
            f"[tenants.{DEFAULT_TENANT}]\nusers = [\n{''.join(users)}]\n\n"
            "# Who may use the console and the admin API: the token signs in.\n"
            f'[[operators.tokens]]\nname = "admin"\ntoken = {_toml(self.operator_token)}\nroles = ["admin"]\n'
        )

    def write(self) -> None:
        """Write everything; raises :class:`CommandError` where a file is there already, before anything is written."""
        files = list(self.files())
        if taken := [str(path) for path in (*(path for path, _ in files), self.data_dir) if path.exists()]:
            raise CommandError(f"{taken[0]} is there already; nothing was written, choose another folder")
        for path in dict.fromkeys((self.folder, self.data_dir, *(path.parent for path, _ in files))):
            make_folder(path)
        for path, text in files:
            write_private(path, text)

    def start_commands(self) -> list[str]:
        """Return the commands that make it a service of systemd."""
        unit, folder = shlex.quote(str(self.unit)), shlex.quote(str(self.folder))
        if self.system_user is None:
            return [f"systemctl --user enable --now {unit}", "loginctl enable-linger"]
        own = [f"useradd --system --no-create-home {SERVICE_USER}", f"chown -R {SERVICE_USER}: {folder}"]
        enable = f"systemctl enable --now {unit}"
        return [*own, enable] if self.system_user == SERVICE_USER else [f"sudo {enable}"]

    def first_commands(self) -> list[str]:
        """Return the commands that show that it works."""
        config, first = self.config, self.context(next(iter(self.passwords)))
        login = f"--context {shlex.quote(str(first))}"
        return [
            f"mediator doctor --config {shlex.quote(str(config))}",
            f"mediator mailbox create my.inbox {login}",
            f"mediator send my.inbox hello {login}",
            f"mediator fetch my.inbox --deliver earliest {login}",
        ]

    def summary(self) -> str:
        """Return what was made and what to do next."""
        made = [
            (self.config, "settings, with the passwords and the console's token"),
            (self.data_dir, "the mail: back it up"),
            *((self.context(name), f"server and login of {name}, for --context") for name in self.passwords),
            (self.unit, "systemd unit"),
            (next(iter(self.optional_units())).parent, "units of the clean-up and the pipeline beside the service"),
        ]
        width = max(len(str(path)) for path, _ in made)
        return "\n".join(
            [
                "Made, readable by you alone:",
                *(f"  {path!s:<{width}}  {what}" for path, what in made),
                "\nStart it in this terminal:",
                f"  mediator serve --config {shlex.quote(str(self.config))}",
                "or leave that to systemd:",
                *(f"  {command}" for command in self.start_commands()),
                "\nThen try it in another terminal:",
                *(f"  {command}" for command in self.first_commands()),
                f"\nThe console is at http://{self.http}/console: sign in with the token in the settings.",
                "Hand each user its file: `--context FILE` uses it; in ~/.config/mediator/contexts it has a name.",
                *([_LOOPBACK] if self.nats.loopback else []),
            ]
        )


_LOOPBACK = """\
Only this machine can connect. For others set nats = "0.0.0.0:4222" in the settings, and gateway.tls_cert and
gateway.tls_key, since passwords would cross the network; `mediator check --config FILE` explains what is set."""


def _toml(text: str) -> str:
    # A basic string of TOML is written as one of JSON.
    return json.dumps(text, ensure_ascii=False)
