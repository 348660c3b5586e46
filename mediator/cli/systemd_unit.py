"""The texts of systemd units that run the service, its clean-up daemon and its pipeline with few rights."""

import re
from collections.abc import Sequence
from pathlib import Path

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
