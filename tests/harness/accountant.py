"""Keeps books on every message beside the service, from what clients asked and were answered, and finds what is wrong.

It knows the protocol's promises and nothing of the service: what may be seen when, and what is owed to which group.
All times are Unix seconds of the clock that the service uses too; ``_from`` is the earliest, ``_by`` the latest moment
at which something happened that nobody outside can see.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.harness.client import Answer, payload_of

LANES = ("critical", "urgent", "normal", "low")
SLACK = 0.005
"""Seconds: the service cuts its times to milliseconds."""
RELEASED_WITHIN = 2.0
NEVER = float("inf")
MANY = 25
HISTORY = 30


@dataclass(eq=False, slots=True)
class Sent:
    """One message as its sender knows it."""

    uid: int
    box: "Box"
    payload: bytes
    lane: str = "normal"
    key: str | None = None
    tags: tuple[str, ...] = ()
    ttl: int = 0
    delay: int = 0
    dedup_id: str | None = None
    reply_to: str | None = None
    repeats: "Sent | None" = None
    """The message whose dedup id this one has: it must never be stored (S3)."""
    first_at: float = 0.0
    answered_at: float = NEVER
    attempts: int = 0
    msg_id: int | None = None
    """The number it was answered, else one under which it was seen."""
    ids: set[int] = field(default_factory=set)

    @property
    def visible_from(self) -> float:
        return self.first_at + self.delay

    @property
    def visible_by(self) -> float:
        return self.answered_at + (self.delay + RELEASED_WITHIN if self.delay else 0)

    @property
    def ends_from(self) -> float:
        return self.first_at + self.ttl if self.ttl else NEVER

    @property
    def ends_by(self) -> float:
        return self.answered_at + self.ttl if self.ttl else NEVER

    @property
    def unseen(self) -> bool:
        """Whether its end comes before its due time (S5)."""
        return 0 < self.ttl <= self.delay

    @property
    def may_double(self) -> bool:
        """Whether it was sent again without a dedup id after an answer that never came, or may be by now."""
        return self.dedup_id is None and (self.attempts > 1 or self.answered_at == NEVER)

    @property
    def headers(self) -> dict[str, object]:
        """The headers of its SEND."""
        values: dict[str, object] = {
            "priority": self.lane if self.lane != "normal" else None,
            "key": self.key,
            "tags": ",".join(self.tags) or None,
            "ttl": self.ttl or None,
            "delay": self.delay or None,
            "dedup_id": self.dedup_id,
            "reply_to": self.reply_to,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(eq=False, slots=True)
class Group:
    """A consumer group as its workers know it."""

    box: "Box"
    name: str
    deliver: str = "earliest"
    start: int = 0
    """``from_id`` or ``from_time``."""
    lease: int = 0
    """Milliseconds; 0 is none."""
    ask_lease: bool = True
    """False: the mailbox leases by itself (F8)."""
    max_deliver: int | None = None
    opened_from: float = NEVER
    opened_by: float = NEVER
    delivered: Counter[int] = field(default_factory=Counter)
    """How often each msg_id came."""
    settled: dict[int, float] = field(default_factory=dict)
    """When the ACK of each msg_id was answered."""
    acking: set[int] = field(default_factory=set)
    """Every msg_id that an ACK ever covered, from the moment it is asked for."""
    perhaps_settled: set[int] = field(default_factory=set)
    """Delivered and acknowledged by an ACK that may have covered nothing (K4)."""
    dead: set[int] = field(default_factory=set)
    held: dict[int, float] = field(default_factory=dict)
    """Until when each msg_id is leased at the least."""
    firsts: defaultdict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Per lane: when a reply arrived, and the last msg_id in it that came for the first time."""
    sessions: int = 0
    lossless: bool = True
    """Whether every FETCH was answered at its first attempt, so that the service's counts must be ours."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """The last that happened, for a complaint."""

    def note(self, what: str, asked_at: float, answered_at: float, ids: Iterable[int]) -> None:
        """Remember a request and its answer."""
        self.history.append(f"    {asked_at % 1000:.3f}-{answered_at % 1000:.3f} {what} {list(ids)}")

    @property
    def fetch(self) -> dict[str, Any]:
        """The fields of its FETCH."""
        fields: dict[str, Any] = {"deliver": self.deliver}
        if self.deliver.startswith("from_"):
            fields[self.deliver] = self.start
        if self.lease and self.ask_lease:
            fields["ack_wait_ms"] = self.lease
        if self.max_deliver is not None:
            fields["max_deliver"] = self.max_deliver
        return fields

    def entitled(self, sent: Sent) -> bool:
        """Whether the message is owed to the group for certain (F1)."""
        match self.deliver:
            case "latest":
                return sent.visible_from > self.opened_by
            case "from_time":
                return sent.visible_from >= self.start
            case "from_id":
                return sent.msg_id is not None and sent.msg_id >= self.start
        return True


@dataclass(eq=False, slots=True)
class Box:
    """One mailbox, from its creation to its end; the next under the same address is another one (A3)."""

    address: str
    retention: str = "keep"
    ttl: int = 0
    ack_wait: int | None = None
    eager: bool = True
    """Whether its groups read while senders send."""
    created_from: float = 0.0
    created_by: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    by_id: dict[int, Sent] = field(default_factory=dict)
    by_key: defaultdict[str, list[Sent]] = field(default_factory=lambda: defaultdict(list))
    deleted: dict[int, float] = field(default_factory=dict)
    deleting: set[int] = field(default_factory=set)
    removed: dict[int, float] = field(default_factory=dict)
    """``until_ack``: when the first ACK of each msg_id was answered (A5)."""
    perhaps_removed: set[int] = field(default_factory=set)
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def ends_from(self) -> float:
        return self.created_from + self.ttl if self.ttl else NEVER

    @property
    def ends_by(self) -> float:
        return self.created_by + self.ttl if self.ttl else NEVER

    def newer(self, sent: Sent, now: float, surely: bool = True) -> Sent | None:
        """Return a message that has taken the place of this one by now (S2), or not ``surely``: may have."""
        for other in self.by_key[sent.key] if sent.key is not None else ():
            if other is sent or other.unseen or (other.visible_by if surely else other.visible_from) > now:
                continue
            if sent.msg_id is None or other.msg_id is None:
                # One of them was delayed and never seen: which came later, only the times say.
                if other.visible_by >= sent.visible_from:
                    return other
            elif other.msg_id > sent.msg_id:
                return other
        return None


class Accountant:
    """The books. What is wrong is noted and told by :meth:`close`."""

    def __init__(self, lossless: bool) -> None:
        """``lossless``: no answer is lost on its way, so the service's counts must be ours."""
        self.lossless = lossless
        self.sent: dict[int, Sent] = {}
        self.boxes: list[Box] = []
        self.wrong: list[str] = []
        self.count: Counter[str] = Counter()

    def complain(self, rule: str, box: Box, text: str) -> None:
        """Note what must not be, with what was done before."""
        before = [
            line
            for group in box.groups.values()
            for line in (f"  {group.name} of a {box.retention} mailbox, lease {group.lease}:", *group.history)
        ]
        self.wrong.append("\n".join([f"{rule}: {box.address}: {text}", *before]))
        assert len(self.wrong) < MANY, "\n".join(self.wrong)

    # Sending.

    def sending(self, sent: Sent) -> None:
        """Enter a message before its SEND."""
        self.sent[sent.uid] = sent
        if sent.key is not None:
            sent.box.by_key[sent.key].append(sent)

    def refused(self, sent: Sent) -> None:
        """Enter that a SEND was answered with an error."""
        self.count["refused"] += 1
        if sent.key is not None:
            sent.box.by_key[sent.key].remove(sent)

    def stored(self, sent: Sent, answer: Answer) -> None:
        """Enter the answer to a SEND that succeeded."""
        box, msg_id = sent.box, int(answer.body["msg_id"])
        sent.first_at, sent.answered_at, sent.attempts = answer.first_at, answer.answered_at, answer.attempts
        if answer.asked_at > box.ends_by + SLACK:
            self.complain("M1", box, f"took message {sent.uid} after its end")
        if sent.repeats is not None:
            self._repeated(sent, sent.repeats, msg_id)
            return
        self.count["sent"] += 1
        box.sent.append(sent)
        if msg_id >= 0:
            if sent.delay and sent.attempts == 1:
                self.complain("S4", box, f"delayed message {sent.uid} was answered {msg_id}")
            self._number(sent, msg_id)
            sent.msg_id = msg_id
        elif not sent.delay:
            self.complain("S1", box, f"message {sent.uid} was answered {msg_id}")

    def _repeated(self, repeat: Sent, first: Sent, msg_id: int) -> None:
        self.count["repeats"] += 1
        known = {-1} if repeat.answered_at < first.visible_from else first.ids | ({-1} if first.delay else set())
        if msg_id not in known and first.ids:
            self.complain("S3", first.box, f"a repeat of {first.uid} was answered {msg_id}, the first {first.ids}")
        elif msg_id >= 0:
            self._number(first, msg_id)

    def _number(self, sent: Sent, msg_id: int) -> None:
        other = sent.box.by_id.setdefault(msg_id, sent)
        if other is not sent:
            self.complain("A3", sent.box, f"msg_id {msg_id} is of {other.uid} and of {sent.uid}")
        sent.ids.add(msg_id)
        if len(sent.ids) > 1 and not sent.may_double:
            self.complain("S3" if sent.dedup_id else "A3", sent.box, f"message {sent.uid} has the numbers {sent.ids}")
        if sent.msg_id is None:
            sent.msg_id = msg_id

    # Seeing.

    def seen(self, box: Box, item: dict[str, Any], answer: Answer) -> Sent | None:
        """Enter a message of a list, whichever verb showed it; None when it should not be there at all."""
        msg_id, payload = int(item["msg_id"]), payload_of(item)
        sent = self.sent.get(int(payload[:8])) if payload[:8].isdigit() else None
        if sent is None or sent.payload != payload:
            self.complain("N6", box, f"msg_id {msg_id} has a payload that nobody sent")
            return None
        if sent.box is not box:
            self.complain("A3", box, f"message {sent.uid} of another mailbox, {sent.box.address}")
            return None
        if sent.repeats is not None:
            self.complain("S3", box, f"message {sent.uid} repeats {sent.repeats.uid} and was stored as {msg_id}")
            return None
        self._number(sent, msg_id)
        shown = {name: item.get(name) for name in ("priority", "key", "tags", "reply_to", "dedup_id")}
        expected = {
            "priority": "normal" if sent.lane == "low" else sent.lane,
            "key": sent.key,
            "tags": list(sent.tags) or None,
            "reply_to": sent.reply_to,
            "dedup_id": sent.dedup_id,
        }
        if shown != expected:
            self.complain("N9", box, f"message {sent.uid} shows {shown}, was sent {expected}")
        self._check_times(box, sent, msg_id, answer)
        return sent

    def _check_times(self, box: Box, sent: Sent, msg_id: int, answer: Answer) -> None:
        asked_at = answer.asked_at
        if answer.answered_at < sent.visible_from - SLACK or sent.unseen:
            self.complain("S4", box, f"message {sent.uid} was seen before its time")
        if asked_at > sent.ends_by + SLACK:
            self.complain("S5", box, f"message {sent.uid} was seen {asked_at - sent.ends_by:.3f} s after its end")
        if asked_at > box.ends_by + SLACK:
            self.complain("M1", box, f"message {sent.uid} was seen after the mailbox's end")
        if asked_at > box.deleted.get(msg_id, NEVER):
            self.complain("Q2", box, f"message {sent.uid} was seen after it was deleted")
        if asked_at > box.removed.get(msg_id, NEVER):
            self.complain("A5", box, f"message {sent.uid} was seen after it was acknowledged")
        for other in box.by_key[sent.key] if sent.key is not None else ():
            if other.msg_id is not None and not other.delay and other.msg_id > msg_id and other.answered_at < asked_at:
                self.complain("S2", box, f"message {sent.uid} was seen after {other.uid} took its place")

    def looked(self, box: Box, answer: Answer) -> list[Sent]:
        """Enter the reply to a QUERY."""
        ids = [int(item["msg_id"]) for item in answer.messages]
        if ids != sorted(set(ids)):
            self.complain("Q1", box, f"QUERY shows the order {ids}")
        found = (self.seen(box, item, answer) for item in answer.messages)
        return [sent for sent in found if sent is not None]

    # Fetching and settling.

    def delivered(self, group: Group, answer: Answer) -> list[Sent]:
        """Enter the reply to a FETCH of a group; the messages in their order."""
        box = group.box
        if group.opened_by == NEVER:
            group.opened_from, group.opened_by = answer.first_at, answer.answered_at
        group.lossless = group.lossless and self.lossless and answer.attempts == 1
        group.note("FETCH", answer.asked_at, answer.answered_at, (item["msg_id"] for item in answer.messages))
        found: list[Sent] = []
        firsts: defaultdict[str, list[int]] = defaultdict(list)
        for item in answer.messages:
            sent = self.seen(box, item, answer)
            if sent is None:
                continue
            found.append(sent)
            msg_id = int(item["msg_id"])
            self._check_right(group, sent, msg_id, item, answer)
            first = group.delivered[msg_id] == 0 and item.get("deliveries", 1) == 1
            group.delivered[msg_id] += 1
            self.count["deliveries"] += 1
            if first:
                firsts[sent.lane].append(msg_id)
            if group.lease:
                self._lease(group, sent, msg_id, item, answer)
        ranks = [LANES.index(sent.lane) for sent in found]
        if ranks != sorted(ranks):
            self.complain("F3", box, f"{group.name} got the lanes {ranks}")
        for lane, ids in firsts.items():
            before = [last for at, last in group.firsts[lane] if at < answer.asked_at]
            last = max(before, default=-1)
            if ids != sorted(ids) or ids[0] <= last:
                self.complain("A8", box, f"{group.name} got {lane} {ids} for the first time after {last}")
            group.firsts[lane].append((answer.answered_at, ids[-1]))
        return found

    def _check_right(self, group: Group, sent: Sent, msg_id: int, item: dict[str, Any], answer: Answer) -> None:
        box = group.box
        if answer.asked_at > group.settled.get(msg_id, NEVER):
            self.complain("K2", box, f"{group.name} got {sent.uid} again after its ACK")
        if msg_id in group.dead:
            self.complain("F7", box, f"{group.name} got the dead {sent.uid}")
        early = {
            "latest": not sent.delay and sent.visible_by < group.opened_from,
            "from_id": msg_id < group.start,
            "from_time": item["create_time"] < group.start,
        }
        if early.get(group.deliver, False):
            self.complain("F1", box, f"{group.name} got {sent.uid} from before its start")

    def _lease(self, group: Group, sent: Sent, msg_id: int, item: dict[str, Any], answer: Answer) -> None:
        box, count = group.box, int(item.get("deliveries", 0))
        if answer.answered_at < group.held.get(msg_id, 0.0) - SLACK:
            self.complain("F6", box, f"{group.name} got {sent.uid} while it was leased")
        ours = group.delivered[msg_id]
        if count < ours or (group.lossless and count != ours):
            self.complain("F7", box, f"{group.name} got {sent.uid} {ours} times, the service says {count}")
        if group.max_deliver is not None and count > group.max_deliver:
            self.complain("F7", box, f"{group.name} got {sent.uid} {count} times, the bound is {group.max_deliver}")
        group.held[msg_id] = answer.asked_at + group.lease / 1000

    def acking(self, group: Group, ids: Iterable[int]) -> None:
        """Enter that an ACK is on its way."""
        for msg_id in ids:
            group.acking.add(msg_id)
            group.held.pop(msg_id, None)

    def acked(self, group: Group, named: Sequence[int], shown: Sequence[int], answer: Answer) -> None:
        """Enter the answer to an ACK of messages out of the reply ``shown``.

        Without a lease it covers what stood before them in the reply (K2), with one exactly what it names (K3). Of a
        message that may have been gone by then, nobody can say whether it covered anything (K4).
        """
        box = group.box
        group.note("ACK", answer.asked_at, answer.answered_at, named)
        there = [msg_id for msg_id in named if not self._may_be_gone(group, msg_id, answer)]
        if group.lease:
            certain, perhaps = set(there), set(named)
        else:
            # What came since a reply that held the message and was lost is not covered: the service cannot know better.
            last = NEVER if self.lossless else max(there, default=-1)
            certain = {msg_id for msg_id in covered(there, shown) if msg_id in there or msg_id <= last}
            perhaps = set(covered(named, shown))
        for msg_id in certain | perhaps:
            if msg_id not in certain:
                group.perhaps_settled.add(msg_id)
                box.perhaps_removed.add(msg_id)
                continue
            group.settled.setdefault(msg_id, answer.answered_at)
            if box.retention == "until_ack":
                box.removed.setdefault(msg_id, answer.answered_at)

    def _may_be_gone(self, group: Group, msg_id: int, answer: Answer) -> bool:
        """Whether a message may have been gone before its ACK was carried out."""
        box, sent = group.box, group.box.by_id[msg_id]
        return (
            answer.attempts > 1
            or msg_id in box.deleting
            or sent.ends_from <= answer.answered_at
            or (sent.key is not None and len(box.by_key[sent.key]) > 1)
            or (
                box.retention == "until_ack"
                and any(msg_id in other.acking for other in box.groups.values() if other is not group)
            )
        )

    def returning(self, group: Group, ids: Sequence[int], delay: float) -> None:
        """Enter that a NACK is on its way."""
        until = time.time() + delay
        group.note(f"NACK for {delay:g} s", time.time(), until, ids)
        for msg_id in ids:
            group.held[msg_id] = min(group.held.get(msg_id, until), until)

    def extended(self, group: Group, ids: Sequence[int], lease: float, answer: Answer) -> None:
        """Enter the answer to an EXTEND."""
        group.note("EXTEND", answer.asked_at, answer.answered_at, ids)
        if answer.body["extended"] == len(ids):
            for msg_id in ids:
                group.held[msg_id] = max(group.held.get(msg_id, 0.0), answer.asked_at + lease)

    def buried(self, group: Group, answer: Answer) -> None:
        """Enter the reply to a QUERY for what is dead for a group."""
        for sent, item in zip(self.looked(group.box, answer), answer.messages, strict=True):
            msg_id = int(item["msg_id"])
            group.dead.add(msg_id)
            ours = group.delivered[msg_id]
            if ours > (group.max_deliver or 0) or (group.lossless and ours != group.max_deliver):
                self.complain("F7", group.box, f"{sent.uid} is dead for {group.name} after {ours} deliveries")

    def deleted(self, box: Box, msg_id: int, answer: Answer) -> None:
        """Enter the answer to a DELETE."""
        if answer.body["deleted"] or (answer.attempts > 1 and answer.error == "message not found"):
            box.deleted.setdefault(msg_id, answer.answered_at)
        elif answer.error != "message not found":
            self.complain("Q2", box, f"DELETE was answered {answer.error}")

    # Accounting.

    def fate(self, sent: Sent, group: Group | None, now: float) -> str | None:
        """Say why nothing more is owed for a message: to a group, or without one to those who look; None: it is."""
        box = sent.box
        # It has several numbers if it was stored more than once, and with a key only the last of them is left.
        for msg_id in sent.ids:
            if group is not None and msg_id in group.settled:
                return "delivered and acknowledged"
            if group is not None and msg_id in group.dead:
                return "dead"
            if msg_id in box.deleted:
                return "deleted"
            if msg_id in box.removed:
                return "acknowledged elsewhere"
            if group is not None and msg_id in group.perhaps_settled:
                return "delivered and perhaps acknowledged"
            if box.retention == "until_ack" and msg_id in box.perhaps_removed:
                return "perhaps acknowledged elsewhere"
        if sent.unseen or now > sent.ends_by + SLACK:
            return "expired"
        if now > box.ends_by + SLACK:
            return "expired with its mailbox"
        if box.newer(sent, now) is not None:
            return "compacted"
        return None

    def owed(self, group: Group, now: float) -> Iterator[Sent]:
        """Give the messages that the group has still to get or to settle."""
        return (sent for sent in group.box.sent if group.entitled(sent) and self.fate(sent, group, now) is None)

    def has_owed(self, group: Group, now: float) -> bool:
        """Whether anything is owed to the group."""
        return any(True for _ in self.owed(group, now))

    def audit(self, box: Box, found: Sequence[dict[str, Any]], answer: Answer) -> None:
        """Hold what a mailbox shows in the end against the books: all that should be there, nothing else."""
        shown = {int(item["msg_id"]) for item in found}
        seen = {sent.uid for item in found if (sent := self.seen(box, item, answer)) is not None}
        for sent in box.sent:
            over = self.fate(sent, None, answer.answered_at)
            certain = over is None and sent.ends_from > answer.answered_at and sent.visible_by < answer.first_at
            certain = certain and box.newer(sent, answer.answered_at, surely=False) is None
            if certain and sent.uid not in seen:
                self.complain("A8", box, f"message {sent.uid} ({sent.headers}) is missing")
            numbers = sent.ids if sent.key is not None else sent.ids & {sent.msg_id}
            if certain and numbers and numbers.isdisjoint(shown):
                self.complain("A8", box, f"message {sent.uid} is missing under its number {sent.msg_id}")
        # Numbers are given without gaps, so each that nobody saw must be of a message that nobody could see (A3).
        gaps = max(box.by_id, default=-1) + 1 - len(box.by_id)
        hidden = sum(1 if sent.msg_id is None else sent.attempts - 1 for sent in box.sent)
        if gaps > hidden:
            self.complain("A3", box, f"{gaps} numbers are of nobody")

    def close(self, now: float) -> Counter[str]:
        """Account for every message and every group, and fail if anything is wrong; return the fates."""
        fates: Counter[str] = Counter()
        for box in self.boxes:
            for group in box.groups.values():
                for sent in box.sent:
                    if not group.entitled(sent):
                        fates["not for this group"] += 1
                        continue
                    fate = self.fate(sent, group, now)
                    if fate is None:
                        self.wrong.append(f"A8: {box.address}: {group.name} never got or settled {vars_of(sent)}")
                    fates[fate or "lost"] += 1
        assert not self.wrong, f"{len(self.wrong)} wrong:\n" + "\n".join(self.wrong[:MANY])
        return fates


def covered(named: Sequence[int], shown: Sequence[int]) -> Sequence[int]:
    """Return what an ACK covers without a lease: all of the reply up to the last that it names (K2)."""
    return shown[: max((shown.index(msg_id) for msg_id in named), default=-1) + 1]


def vars_of(sent: Sent) -> str:
    """Describe a message for a complaint."""
    return f"message {sent.uid} (number {sent.msg_id}, {sent.headers}, sent at {sent.first_at:.3f})"
