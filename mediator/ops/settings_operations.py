"""Operations on the settings: those in force, and the operators' tokens read again while the service runs."""

import asyncio
from collections.abc import Callable

import structlog

from mediator.errors import BadRequestError, SetupError
from mediator.ops.operations import Answer, OperationRequest, Right, operation
from mediator.ops.schemas import ANY, TEXT, TEXTS, about, many, obj
from mediator.settings.settings import TOKENS, Settings

_log = structlog.get_logger("operators")


class SettingsOperations:
    """The operations ``settings`` and ``operators-reload``."""

    def __init__(self, settings: Settings, take: Callable[[Settings], None]) -> None:
        """``take`` is called with the settings whose operators hold from then on."""
        self._settings = settings
        self._take = take
        self._turn = asyncio.Lock()
        """Held while the settings are read: no older ones take the place of newer ones."""

    @operation(
        "settings",
        Right.READ,
        "The settings in force, where each came from, and what it means; secrets are masked",
        obj(
            options=many(
                obj(
                    option=TEXT,
                    value=ANY,
                    source=about(TEXT, "`default`, `the command line`, a file, or the variable of the environment."),
                    description=about(TEXT, "What it protects, and when to change it."),
                    variable=about(TEXT, "The variable of the environment that sets it."),
                )
            )
        ),
        path="/settings",
    )
    async def _list(self, _request: OperationRequest) -> Answer:
        return {"options": self._settings.in_force()}

    @operation(
        "operators-reload",
        Right.ADMIN,
        "Read the operators' tokens of the settings again, which hold from then on",
        obj(
            source=about(TEXT, "Where the tokens are from: a file, a variable, `default` if nowhere."),
            added=about(TEXTS, "Names of operators that are new."),
            removed=about(TEXTS, "Those that have no token any more, whose sessions are over."),
            changed=about(TEXTS, "Those with another token or other roles."),
            waiting=about(TEXTS, "Other options that differ from those in force; a restart takes them over."),
        ),
        method="POST",
        path="/operators/reload",
    )
    async def _reload(self, _request: OperationRequest) -> Answer:
        async with self._turn:
            return await self._read_again()

    async def _read_again(self) -> Answer:
        try:
            newer = await asyncio.to_thread(self._settings.read_again)
        except SetupError as error:
            raise BadRequestError("settings", f"nothing was changed: {error}") from None
        before, now = _tokens(self._settings), _tokens(newer)
        taken, waiting = self._settings.with_operators_of(newer)
        if self._settings.has_operators and not taken.has_operators:
            why = "without a token local.token would make an operator; restart the service for that"
            raise BadRequestError("operators.tokens", f"nothing was changed: {why}")
        self._settings = taken
        self._take(taken)
        changes = {
            "added": sorted(now.keys() - before.keys()),
            "removed": sorted(before.keys() - now.keys()),
            "changed": sorted(name for name in now.keys() & before.keys() if now[name] != before[name]),
        }
        _log.info("operators reloaded", **changes)
        return {"source": newer.source_of(TOKENS), **changes, "waiting": waiting}


def _tokens(settings: Settings) -> dict[str, set[tuple[str, tuple[str, ...]]]]:
    """Return what each operator may sign in with, and with which roles."""
    found: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for token in settings.operators.tokens:
        found.setdefault(token.name, set()).add((token.token.get_secret_value(), tuple(sorted(token.roles))))
    return found
