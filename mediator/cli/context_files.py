"""Contexts: servers that the command line remembers, with login and TLS, a file each that only its owner may read."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mediator.cli.options import CommandError
from mediator.login import MAX_FILE, Login
from mediator.system.private_files import make_folder, open_file

LOGIN_FIELDS = frozenset({"user", "password", "token", "nkey", "creds"})
TLS_FIELDS = frozenset({"tls_ca", "tls_cert", "tls_key"})
FIELDS = ("server", *sorted(LOGIN_FIELDS), *sorted(TLS_FIELDS))
"""The keys of a context's file; all values are text."""
SECRETS = frozenset({"password", "token"})
"""What is never printed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a context may be called."""

_ENDING = ".json"


@dataclass(frozen=True, slots=True)
class Context:
    """A remembered server; ``fields`` are :data:`FIELDS` that are set, the server always."""

    name: str
    file: Path
    fields: Mapping[str, str]

    @classmethod
    def read(cls, name: str, file: Path) -> Self:
        """Read a file; raises :class:`CommandError` that names it, and no secret."""
        try:
            with file.open("rb") as opened:
                fields = json.loads(opened.read(MAX_FILE))
        except OSError as error:
            raise CommandError(f"context {name}: cannot read {file}: {error.strerror}") from None
        except ValueError:
            raise CommandError(f"context {name}: {file} is not JSON") from None
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise CommandError(f"context {name}: {file}: expected an object whose values are text")
        if unknown := fields.keys() - set(FIELDS):
            raise CommandError(f"context {name}: {file}: unknown {min(unknown)}, expected {', '.join(FIELDS)}")
        if not fields.get("server"):
            raise CommandError(f"context {name}: {file}: server is missing")
        return cls(name, file, fields)

    @property
    def login(self) -> Login:
        """Server and login."""
        return Login(**self.fields)

    def describe(self) -> dict[str, Any]:
        """Return what may be shown: everything but :data:`SECRETS`, and passwords in URLs."""
        login = self.login
        fields = {name: value for name, value in self.fields.items() if name not in SECRETS}
        return {"name": self.name, "selected": self.name == selected_name(), **fields, "server": login.shown} | {
            "login": login.kind or ("url" if login.shown != login.server else "none")
        }


def folder() -> Path:
    """Return where contexts are kept: below XDG_CONFIG_HOME, else ~/.config."""
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".config") / "mediator" / "contexts"


def context_names() -> list[str]:
    """Return the names of all contexts in order."""
    with suppress(OSError):
        return sorted(file.stem for file in folder().iterdir() if file.suffix == _ENDING)
    return []


def find_context(name: str) -> Context:
    """Return the context of this name, or in this file where it has a slash; raises :class:`CommandError`."""
    if "/" in name:
        return Context.read(Path(name).stem, Path(name))
    file = _file(name)
    if not file.is_file():
        known = ", ".join(context_names()) or "none"
        raise CommandError(f"there is no context {name}; known: {known}; `mediator context add` makes one")
    return Context.read(name, file)


def add_context(name: str, fields: Mapping[str, str]) -> Context:
    """Keep a new context; raises :class:`CommandError` where the name is taken or nothing can be written."""
    file = _file(name)
    for private in (file.parent.parent, file.parent):
        make_folder(private)
    try:
        write_private(file, json.dumps(dict(fields), indent=2) + "\n")
    except FileExistsError:
        raise CommandError(f"context {name} exists; remove it first: mediator context remove {name}") from None
    return Context(name, file, fields)


def remove_context(name: str) -> None:
    """Remove a context; where it is selected, none is any more. Raises :class:`CommandError` if there is none."""
    find_context(name).file.unlink()
    if selected_name() == name:
        select_context(None)


def select_context(name: str | None) -> None:
    """Use this context where nothing else names a server; None: none. Raises :class:`CommandError` if there is none."""
    if name is None:
        _selection().unlink(missing_ok=True)
        return
    find_context(name)
    new = _selection().with_suffix(".new")
    new.unlink(missing_ok=True)
    write_private(new, f"{name}\n")
    new.replace(_selection())


def selected_name() -> str | None:
    """Return the name of the selected context."""
    with suppress(OSError, UnicodeDecodeError):
        return _selection().read_text(encoding="utf-8-sig").strip() or None
    return None


def selected_context() -> Context | None:
    """Return the selected context; raises :class:`CommandError` when it is gone or cannot be used."""
    name = selected_name()
    return None if name is None else find_context(name)


def contexts() -> Iterator[Context]:
    """Read all contexts in the order of their names; raises :class:`CommandError` as :meth:`Context.read`."""
    return map(find_context, context_names())


def write_private(file: Path, text: str) -> None:
    """Write a new file that only its owner may read; raises FileExistsError where there is one."""
    with os.fdopen(open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as new:
        new.write(text)


def _selection() -> Path:
    return folder().with_name("selected-context")


def _file(name: str) -> Path:
    if not NAME.fullmatch(name):
        raise CommandError("expected a context's name of letters, digits, -, _ and ., at most 64")
    return folder() / f"{name}{_ENDING}"
