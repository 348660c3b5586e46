"""What a check is: an id, a level, the sentence that it holds, and a function that tries it in a session of its own."""

import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

S = TypeVar("S")
SECONDS = 60.0
"""What a check may take unless it says otherwise."""
MAX_ENTRIES = 200
MAX_TEXT = 2000
"""Of a transcript: entries, and characters of each."""


class Level(StrEnum):
    """How binding a sentence is; each level comes with those before it."""

    MUST = "must"
    SHOULD = "should"
    OWN = "own"
    """A rule of this project (docs/protocol.md) where the specifications are silent."""

    def includes(self, other: "Level") -> bool:
        """Whether a run at this level has checks of the other one."""
        order = list(Level)
        return order.index(other) <= order.index(self)


class CheckFailedError(Exception):
    """The mediator does not do what the sentence says."""


class CannotTryError(Exception):
    """Something that the check needs first failed, so nothing is known about its sentence."""


class NotOfferedError(Exception):
    """The mediator does not claim to speak this protocol."""


def expect(condition: object, otherwise: str) -> None:
    """Fail the check unless ``condition``; ``otherwise`` says what the mediator did."""
    if not condition:
        raise CheckFailedError(otherwise)


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """One sentence, and how it is tried."""

    id: str
    """``protocol.family.what``, such as ``didcomm.pickup2.empty-queue``; ``--only`` takes a beginning of it."""
    level: Level
    source: str
    """Where the sentence is from, such as ``RFC 0685 §Delivery Request``, or ``docs/protocol.md D9``."""
    sentence: str
    run: Callable[[S], Awaitable[None]]
    seconds: float = SECONDS


class Suite(Generic[S]):
    """The checks of one protocol, in the order in which they are run."""

    def __init__(self, name: str) -> None:
        """``name`` begins the ids of all checks."""
        self.name = name
        self._checks: dict[str, Check[S]] = {}

    def check(
        self, id: str, level: Level, source: str, sentence: str, *, seconds: float = SECONDS
    ) -> Callable[[Callable[[S], Awaitable[None]]], Callable[[S], Awaitable[None]]]:
        """Add the decorated function as a check."""

        def decorate(run: Callable[[S], Awaitable[None]]) -> Callable[[S], Awaitable[None]]:
            self.add(Check(id, level, source, sentence, run, seconds))
            return run

        return decorate

    def add(self, check: Check[S]) -> None:
        """Add a check; its id is new, and begins with the suite's name."""
        if check.id in self._checks or not check.id.startswith(f"{self.name}."):
            raise ValueError(f"check {check.id}: taken, or not of the suite {self.name}")
        self._checks[check.id] = check

    def select(self, only: str = "", level: Level = Level.OWN) -> list[Check[S]]:
        """Return the checks whose ids begin with ``only``, with or without the suite's name, up to a level."""
        starts = (only, f"{self.name}.{only}")
        return [check for check in self if check.id.startswith(starts) and level.includes(check.level)]

    def __iter__(self) -> Iterator[Check[S]]:
        """Return the checks, each family as a block."""
        families = list(dict.fromkeys(map(family_of, self._checks)))
        return iter(sorted(self._checks.values(), key=lambda check: families.index(family_of(check.id))))

    def __len__(self) -> int:
        return len(self._checks)


def family_of(id: str) -> str:
    """Return the protocol and the family of a check's id."""
    return ".".join(id.split(".")[:2])


@dataclass(slots=True)
class Transcript:
    """What a check sent and what came, in order; long texts are cut."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def sent(self, what: str, content: Any = None) -> None:
        """Record what was sent; ``content`` is text, bytes, or anything that JSON can hold."""
        self._add("sent", what, content)

    def came(self, what: str, content: Any = None) -> None:
        """Record what came."""
        self._add("came", what, content)

    def _add(self, direction: str, what: str, content: Any) -> None:
        if len(self.entries) >= MAX_ENTRIES:
            return
        if isinstance(content, bytes):
            content = content.decode(errors="replace")
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
        shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"
        milliseconds = round((time.monotonic() - self._began) * 1000)
        self.entries.append({"direction": direction, "ms": milliseconds, "what": what, "content": shown})
