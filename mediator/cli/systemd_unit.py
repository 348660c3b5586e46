"""The text of a systemd unit that runs the service with few rights."""

import re
from collections.abc import Sequence
from pathlib import Path

_UNIT = """\
[Unit]
Description=Mediator: mailboxes for software agents and wallets
After=network-online.target
Wants=network-online.target

[Service]
{user}ExecStart={command}
Restart=on-failure
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=65536
UMask=0077

# It writes to its data directory, talks over the network, and needs nothing else of the machine.
{rights}
[Install]
WantedBy={target}
"""
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
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=read-only
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectSystem=strict
ReadWritePaths={folder}
"""


def unit_text(command: Sequence[str], folder: Path, user: str | None) -> str:
    """Return a unit that runs ``command`` and may write to ``folder``.

    ``user`` runs it from the system's manager; None makes a unit for a user's own manager, which cannot take away what
    only root may.
    """
    system = "" if user is None else _SYSTEM.format(folder=_quote(str(folder)))
    return _UNIT.format(
        user="" if user is None else f"User={user}\n",
        command=" ".join(map(_quote, command)),
        rights=_ANY_USER + system,
        target="default.target" if user is None else "multi-user.target",
    )


def _quote(word: str) -> str:
    """Quote a word as systemd.syntax(7) asks; %, $ and \\ have a meaning there."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'
