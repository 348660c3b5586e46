"""Problems of one instance as alarms: since when each is there, and those of the last week that ended.

They are kept in memory, so that they can be read while the database is lost, and in the database, so that they survive
a restart.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import orjson

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.mailboxes.bounds import SECOND
from mediator.mailboxes.session import Table
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.operations import Answer, OperationRequest, Right, limit, many, object_schema, operation
from mediator.operate.records import AlarmView
from mediator.store.base import Transaction

LOOK_SECONDS: Final = 30
"""Between two checks for problems."""
KEPT_MS: Final = 7 * 86_400 * SECOND
SAME_MS: Final = 300 * SECOND
"""A problem that is back within so long is the same alarm, so that one that comes and goes does not fill the list."""
GONE_MS: Final = 10 * KEPT_MS
"""After which present alarms of another instance are forgotten, which may be gone for good."""
MAX_PRESENT: Final = 200
MAX_ENDED: Final = 1000
_MAX_CODE: Final = 200
_STORE: Final = "check_store"
"""The code of the problem that the store cannot be reached."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem, and when it was seen. Times are milliseconds since the epoch."""

    code: str
    """Its code, or the finding's text where it has none."""
    began_at: int
    ended_at: int | None
    finding: Finding

    def to_json(self) -> Answer:
        """Return the alarm as in answers."""
        found = self.finding
        return AlarmView(found.code, self.began_at, self.ended_at, found.text, found.advice, found.link).to_json()


class AlarmTable(Table):
    """The rows in SQL, of all instances."""

    def put(self, instance: str, alarms: Iterable[Alarm]) -> None:
        """Add alarms, or replace them as they were."""
        for alarm in alarms:
            self._execute(
                "INSERT INTO alarm (instance, code, began_at, ended_at, finding) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (instance, code, began_at)"
                " DO UPDATE SET ended_at = excluded.ended_at, finding = excluded.finding",
                (instance, alarm.code, alarm.began_at, alarm.ended_at, orjson.dumps(alarm.finding.to_json()).decode()),
            )

    def forget(self, instance: str, before: int, gone_before: int) -> None:
        """Remove alarms that ended before, and those of other instances that began long ago and may be gone."""
        self._execute(
            "DELETE FROM alarm WHERE ended_at < ? OR (ended_at IS NULL AND began_at < ? AND instance <> ?)",
            (before, gone_before, instance),
        )

    def read(self, instance: str) -> list[Alarm]:
        """Return the alarms of an instance, those first that ended first; present ones are last."""
        rows = self._execute(
            "SELECT code, began_at, ended_at, finding FROM alarm WHERE instance = ?"
            " ORDER BY CASE WHEN ended_at IS NULL THEN 1 ELSE 0 END, ended_at, began_at",
            (instance,),
        )
        return [Alarm(code, began, ended, _read_finding(text)) for code, began, ended, text in rows]


def _read_finding(text: str) -> Finding:
    found = orjson.loads(text)
    return Finding(Level(found.pop("level")), **found)


class Alarms:
    """Follows the problems of one instance. Used on the event loop."""

    def __init__(self, broker: Broker, instance: str, find: Callable[[], Awaitable[Iterable[Finding]]]) -> None:
        """``find`` returns what the doctor finds now."""
        self._broker = broker
        self._instance = instance
        self._find_problems = find
        self._present: dict[str, Alarm] = {}
        self._ended: deque[Alarm] = deque(maxlen=MAX_ENDED)
        """In the order in which they ended."""
        self._unsaved: dict[tuple[str, int], Alarm] = {}

    async def open(self) -> None:
        """Read the alarms from before a restart; those whose problem is gone end at the first check."""
        for alarm in await self._broker.read(lambda tx, _now: tx.table(AlarmTable).read(self._instance)):
            if alarm.ended_at is None:
                self._present[alarm.code] = alarm
            else:
                self._ended.append(alarm)

    async def tick(self) -> None:
        """Look for problems; to be called each :data:`LOOK_SECONDS`."""
        now = self._broker.clock()
        found: dict[str, Finding] = {}
        for finding in await self._find_problems():
            if finding.level is Level.PROBLEM and len(found) < MAX_PRESENT:
                found.setdefault((finding.code or finding.text)[:_MAX_CODE], finding)
        # While the store is lost, what is found in it is unknown, and so not known to be gone.
        ended_codes = () if _STORE in found else self._present.keys() - found.keys()
        for code in ended_codes:
            ended = replace(self._present.pop(code), ended_at=now)
            self._ended.append(ended)
            self._mark_unsaved(ended)
        for code, finding in found.items():
            before = self._present.get(code) or self._take_back(code, now)
            self._present[code] = Alarm(code, now if before is None else before.began_at, None, finding)
            if before is None or before.ended_at is not None:
                self._mark_unsaved(self._present[code])
        while self._ended and (self._ended[0].ended_at or 0) < now - KEPT_MS:
            self._ended.popleft()
        await self._save(now)

    def _take_back(self, code: str, now: int) -> Alarm | None:
        """Remove and return the alarm of a problem that ended a moment ago."""
        for alarm in self._ended:
            if alarm.code == code and now - (alarm.ended_at or 0) < SAME_MS:
                self._ended.remove(alarm)
                return alarm
        return None

    def _mark_unsaved(self, alarm: Alarm) -> None:
        self._unsaved[alarm.code, alarm.began_at] = alarm
        while len(self._unsaved) > MAX_ENDED:
            del self._unsaved[next(iter(self._unsaved))]

    async def _save(self, now: int) -> None:
        """Keep what has changed; while the store cannot, it is tried again at the next check."""
        if not self._unsaved:
            return
        saved = dict(self._unsaved)
        full = len(self._ended) == MAX_ENDED
        before = max(now - KEPT_MS, (self._ended[0].ended_at or 0) if full else 0)

        def keep(tx: Transaction, _now: int) -> None:
            alarms = tx.table(AlarmTable)
            alarms.put(self._instance, saved.values())
            alarms.forget(self._instance, before, now - GONE_MS)

        with suppress(MediatorError):
            await self._broker.write_background(keep)
            for key, alarm in saved.items():
                if self._unsaved.get(key) is alarm:
                    del self._unsaved[key]

    @operation(
        "alarm-list",
        Right.READ,
        "The problems of this instance with when each began, and those of the last week that ended",
        object_schema(present=many(AlarmView.schema()), ended=many(AlarmView.schema())),
        fields={"limit": limit(MAX_ENDED)},
        path="/alarms",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        """Return those that began or ended last first."""
        present = sorted(self._present.values(), key=lambda alarm: -alarm.began_at)
        ended = list(self._ended)[::-1][: request["limit"]]
        return {"present": [each.to_json() for each in present], "ended": [each.to_json() for each in ended]}
