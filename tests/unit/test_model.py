"""The broker against a model: random verbs in random order, and what must hold whatever happens (A3, A8, F, K, S).

The model keeps sets and lists and nothing clever. Where a rule leaves room (a message may come twice, a group may mix
leases with none) it knows what must come and what may come, and holds the broker to both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mediator.errors import (
    MailboxExistsError,
    MediatorError,
    NoSuchMailboxError,
    NoSuchMessageError,
    TooManyDelayedError,
)
from mediator.mailboxes.fetching import Deliver, Fetch, Fetched
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import Usage
from mediator.store.base import Store
from tests.harness.broker import DAY, SECOND, START, TENANT, Broker
from tests.harness.stores import ram_store
from tests.harness.verified import assert_intact

BOXES = ("a", "b")
GROUPS = ("g", "h")
KEYS = (None, None, "k", "l")
DEDUP_IDS = (None, None, None, "d", "e")
SPANS = (1, 400, SECOND, 3 * SECOND, 10 * SECOND, 31 * SECOND)
RECIPIENTS = (None, None, "did:key:x")
AMPLE = 1 << 30
CONNECTIONS = ("x", "y", "z")
CLAIM = 30 * SECOND
ROOM = 4
"""How many messages a group may lease here, so that groups do get full (F6)."""
DELAYED = 3
"""How many it may give back with a delay."""


@dataclass(eq=False)
class Mail:
    """One message from SEND on; ``id`` is -1 until it is visible."""

    payload: bytes
    lane: Lane
    sent_at: int
    key: str | None
    expire_at: int | None
    recipient: str | None
    id: int = -1
    created_at: int = 0
    removed: bool = False
    """Replaced by key, deleted, or acknowledged in a work queue: never to be seen again."""
    deleted: bool = False

    def is_live(self, now: int) -> bool:
        return self.id >= 0 and not self.removed and not self.over(now)

    def over(self, now: int) -> bool:
        return self.expire_at is not None and self.expire_at <= now

    @property
    def rank(self) -> tuple[int, int]:
        return self.lane, self.id


@dataclass
class Given:
    """The last delivery of a message to a group."""

    leased: bool
    until: int = 0
    delayed: bool = False
    """Whether it was given back with a delay since."""
    count: int = 0
    """Leased deliveries so far."""


@dataclass
class Members:
    """A group: where it began, what it was given, what is settled for certain and what may be."""

    start: int
    given: dict[int, Given] = field(default_factory=dict)
    replies: list[list[int]] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)
    perhaps: set[int] = field(default_factory=set)
    max_deliver: int | None = None
    plain: bool = True
    """No lease was ever given: then K2 says exactly what an ACK covers."""
    revived: set[int] = field(default_factory=set)
    holds: dict[str, list[list[int]]] = field(default_factory=dict)
    """What each connection was handed without a lease, reply by reply, without what it acknowledged."""
    clients: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    """The same for ever, also of connections that ended."""
    claims: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Whose a message is, and until when (F9)."""

    def claimed_by_others(self, connection: str, now: int) -> set[int]:
        return {i for i, (name, until) in self.claims.items() if name != connection and until > now}

    def free(self, connection: str) -> None:
        self.holds.pop(connection, None)
        self.claims = {i: claim for i, claim in self.claims.items() if claim[0] != connection}

    def dead(self, msg_id: int, now: int) -> bool:
        given = self.given.get(msg_id)
        return (
            given is not None
            and given.leased
            and given.until <= now
            and self.max_deliver is not None
            and given.count >= self.max_deliver
            and msg_id not in self.settled
            and msg_id not in self.revived
        )

    def running(self, msg_id: int, now: int) -> bool:
        given = self.given.get(msg_id)
        return given is not None and given.leased and given.until > now and msg_id not in self.settled

    def leased(self, box: "Box", now: int, surely: bool) -> int:
        """Count the leases that take room: certainly those of messages that nobody may have settled (F6)."""
        return sum(
            self.running(msg_id, now)
            and not given.delayed
            and not (surely and msg_id in self.perhaps)
            and box.mail[msg_id].is_live(now)
            for msg_id, given in self.given.items()
        )

    def delayed(self, box: "Box", now: int, surely: bool) -> int:
        """Count what was given back with a delay; what is gone may be counted for a while (F6)."""
        done = self.settled | self.perhaps
        return sum(
            given.delayed
            and not (surely and (msg_id in done or self.dead(msg_id, now) or not box.mail[msg_id].is_live(now)))
            for msg_id, given in self.given.items()
        )


@dataclass
class Box:
    """One generation of a mailbox."""

    expire_at: int | None
    retention: Retention
    kind: Kind
    ack_wait: int | None
    deleted: bool = False
    mail: dict[int, Mail] = field(default_factory=dict)
    groups: dict[str, Members] = field(default_factory=dict)
    dedup: dict[str, Mail] = field(default_factory=dict)
    last_at: int = 0

    def is_live(self, now: int) -> bool:
        return not self.deleted and (self.expire_at is None or self.expire_at > now)

    def live(self, now: int) -> list[Mail]:
        return [mail for mail in self.mail.values() if mail.is_live(now)]

    def show(self, mail: Mail, now: int) -> None:
        for older in self.mail.values():
            if self.kind is Kind.LATEST or (mail.key is not None and older.key == mail.key):
                older.removed = True
        mail.id = len(self.mail)
        self.last_at = mail.created_at = max(now, self.last_at)
        self.mail[mail.id] = mail


@dataclass
class Waiting:
    """Delayed mail."""

    due_at: int
    seq: int
    box: Box
    mail: Mail


def machine(store_factory: Callable[[], Store]) -> type[RuleBasedStateMachine]:
    """Make a machine that runs the broker over a new store for each example."""

    class Mediator(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.patches = [
                patch("mediator.mailboxes.fetching.MAX_LEASED", ROOM),
                patch("mediator.mailboxes.settling.MAX_DELAYED", DELAYED),
            ]
            for each in self.patches:
                each.start()
            self.store = store_factory()
            self.broker = Broker(self.store)
            self.boxes: dict[str, Box] = {}
            self.waiting: list[Waiting] = []
            self.sent = 0
            self.last: dict[tuple[str, str], list[int]] = {}
            self.last_connection: dict[tuple[str, str], str] = {}
            self.ended: dict[str, int] = dict.fromkeys(CONNECTIONS, 0)

        @property
        def now(self) -> int:
            return self.broker.now

        def box(self, name: str) -> Box | None:
            box = self.boxes.get(name)
            return box if box is not None and box.is_live(self.now) else None

        def refused(self, error: type[MediatorError], verb: Callable[[], Any]) -> None:
            with pytest.raises(error):
                verb()

        # mailboxes

        @initialize(ack_wait=st.sampled_from((None, None, SECOND)), retention=st.sampled_from(Retention))
        def begin(self, ack_wait: int | None, retention: Retention) -> None:
            self.create("a", None, retention, Kind.STANDARD, ack_wait)

        @rule(
            name=st.sampled_from(BOXES),
            ttl=st.sampled_from((None, 0, 10 * SECOND)),
            retention=st.sampled_from(Retention),
            kind=st.sampled_from((Kind.STANDARD, Kind.STANDARD, Kind.LATEST)),
            ack_wait=st.sampled_from((None, None, 0, SECOND)),
        )
        def create(self, name: str, ttl: int | None, retention: Retention, kind: Kind, ack_wait: int | None) -> None:
            def verb() -> object:
                return self.broker.create(name, ttl=ttl, retention=retention, kind=kind, ack_wait=ack_wait)

            if self.box(name) is not None:
                self.refused(MailboxExistsError, verb)
                return
            verb()
            self.boxes[name] = Box(self.now + ttl if ttl else None, retention, kind, ack_wait)
            for group in GROUPS:
                self.last.pop((name, group), None)

        @rule(name=st.sampled_from(BOXES), sure=st.integers(0, 7))
        def delete_mailbox(self, name: str, sure: int) -> None:
            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.delete_mailbox(name))
            elif sure == 0:
                self.broker.delete_mailbox(name)
                box.deleted = True

        # sending

        @rule(
            name=st.sampled_from(BOXES),
            lane=st.sampled_from(Lane),
            size=st.sampled_from((0, 0, 0, 3000)),
            key=st.sampled_from(KEYS),
            ttl=st.sampled_from((None, None, None, 0, 2 * SECOND, 2 * DAY)),
            delay=st.sampled_from((None, None, None, 0, SECOND, 4 * SECOND, DAY + SECOND)),
            dedup_id=st.sampled_from(DEDUP_IDS),
            recipient=st.sampled_from(RECIPIENTS),
        )
        def send(
            self,
            name: str,
            lane: Lane,
            size: int,
            key: str | None,
            ttl: int | None,
            delay: int | None,
            dedup_id: str | None,
            recipient: str | None,
        ) -> None:
            self.sent += 1
            payload = b"%d " % self.sent + b"x" * size

            def verb() -> int:
                return self.broker.send(
                    payload,
                    to=name,
                    lane=lane,
                    key=key,
                    ttl=ttl,
                    delay=delay,
                    dedup_id=dedup_id,
                    recipient=recipient,
                )

            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, verb)
                return
            now = self.now
            first = box.dedup.get(dedup_id) if dedup_id is not None else None
            if first is not None and not first.deleted and not first.over(now) and first.sent_at + DAY > now:
                assert verb() == first.id
                return
            mail = Mail(payload, lane, now, key, now + ttl if ttl else None, recipient)
            if dedup_id is not None:
                box.dedup[dedup_id] = mail
            if delay:
                self.waiting.append(Waiting(now + delay, self.sent, box, mail))
                assert verb() == -1
                assert self.broker.woken == set()
                return
            box.show(mail, now)
            assert verb() == mail.id
            assert self.broker.woken == {(TENANT, name)}

        @rule(several=st.integers(1, 4))
        def send_several(self, several: int) -> None:
            for number in range(several):
                self.send("a", Lane(number * 3 % 4), 0, None, None, None, None, None)

        @rule(limit=st.sampled_from((1, 2, 100)))
        def release(self, limit: int) -> None:
            for one in sorted((w for w in self.waiting if w.due_at <= self.now), key=lambda w: (w.due_at, w.seq)):
                self.waiting.remove(one)
                if one.box.is_live(self.now) and not one.mail.over(self.now):
                    one.box.show(one.mail, self.now)
            while self.broker.release(limit).count:
                pass

        # fetching

        @rule(
            name=st.sampled_from(BOXES),
            deliver=st.sampled_from(Deliver),
            back=st.integers(0, 5),
            num_msgs=st.sampled_from((1, 2, 1000)),
        )
        def look(self, name: str, deliver: Deliver, back: int, num_msgs: int) -> None:
            box = self.box(name)
            request = self.request(name, None, deliver, back, num_msgs=num_msgs, budget=AMPLE)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.fetching(request))
                return
            start = self.start(box, request)
            wanted = sorted((m for m in box.live(self.now) if m.id >= start), key=lambda m: m.rank)[:num_msgs]
            self.same(box, self.broker.fetching(request), [mail.id for mail in wanted])

        @rule(
            name=st.sampled_from(BOXES),
            group=st.sampled_from(GROUPS),
            deliver=st.sampled_from((Deliver.EARLIEST, Deliver.EARLIEST, *Deliver)),
            back=st.integers(0, 5),
            force=st.sampled_from((False,) * 5 + (True,)),
            num_msgs=st.sampled_from((1, 2, 3, 1000, 1000)),
            budget=st.sampled_from((1, 7000, AMPLE, AMPLE, AMPLE)),
            ack_wait=st.sampled_from((None, None, 0, SECOND, 5 * SECOND)),
            max_deliver=st.sampled_from((None, None, None, 1, 2)),
            connection=st.sampled_from(CONNECTIONS),
        )
        def fetch(
            self,
            name: str,
            group: str,
            deliver: Deliver,
            back: int,
            force: bool,
            num_msgs: int,
            budget: int,
            ack_wait: int | None,
            max_deliver: int | None,
            connection: str = CONNECTIONS[0],
        ) -> None:
            # Those who fetch from the first mailbox are not known.
            connection = "" if name == BOXES[0] else connection
            request = self.request(
                name,
                group,
                deliver,
                back,
                force_deliver=force,
                num_msgs=num_msgs,
                budget=budget,
                ack_wait=ack_wait,
                max_deliver=max_deliver,
                max_wait=0,
                connection=connection,
            )
            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.fetching(request))
                return
            members = box.groups.get(group)
            if members is None or force:
                fixed = members.max_deliver if members is not None else None
                members = box.groups[group] = Members(self.start(box, request), max_deliver=fixed)
            if members.max_deliver is None:
                members.max_deliver = max_deliver
            lease = (ack_wait if ack_wait is not None else box.ack_wait) or 0
            self.last_connection[name, group] = connection
            self.last[name, group] = self.check(box, members, self.broker.fetching(request), request, lease)

        @rule(
            name=st.sampled_from(BOXES),
            group=st.sampled_from(GROUPS),
            each=st.booleans(),
            connection=st.sampled_from(CONNECTIONS),
        )
        def work(self, name: str, group: str, each: bool, connection: str) -> None:
            """What a common client does: FETCH a few, then acknowledge each, or the last one alone."""
            if self.box(name) is None:
                return
            self.fetch(name, group, Deliver.EARLIEST, 0, False, 3, AMPLE, None, None, connection)
            got = self.last[name, group]
            for msg_id in got if each else got[-1:]:
                self.acknowledge(name, group, [msg_id], connection)

        @rule(connection=st.sampled_from(CONNECTIONS))
        def end_connection(self, connection: str) -> None:
            self.broker.end(connection)
            self.ended[connection] += 1
            for box in self.boxes.values():
                for members in box.groups.values():
                    members.free(connection)

        @rule(sure=st.integers(0, 3))
        def forget_claims(self, sure: int) -> None:
            """What a restart does: all connections end, and what they were handed is not known any more."""
            if sure == 0:
                self.broker.forget_claims()
                for connection in ("", *CONNECTIONS):
                    self.ended[connection] = self.ended.get(connection, 0) + 1
                    for box in self.boxes.values():
                        for members in box.groups.values():
                            members.free(connection)

        def request(self, name: str, group: str | None, deliver: Deliver, back: int, **options: Any) -> Fetch:
            box = self.boxes.get(name)
            next_id = len(box.mail) if box is not None else 0
            return Fetch(
                TENANT,
                name,
                group,
                deliver,
                from_id=max(0, next_id - back),
                from_time=max(START, self.now - back * SECOND),
                **options,
            )

        def start(self, box: Box, request: Fetch) -> int:
            match request.deliver:
                case Deliver.LATEST:
                    return len(box.mail)
                case Deliver.EARLIEST:
                    return 0
                case Deliver.FROM_ID:
                    return request.from_id
                case Deliver.FROM_TIME:
                    since = [m.id for m in box.mail.values() if m.created_at >= request.from_time]
                    return min(since, default=len(box.mail))

        def same(self, box: Box, fetched: Fetched, ids: list[int]) -> None:
            """Hold that these are the messages, and each is what was sent."""
            assert [message.msg_id for message in fetched.messages] == ids
            for message in fetched.messages:
                mail = box.mail[message.msg_id]
                assert mail.is_live(self.now), "expired, replaced, deleted or acknowledged for all"
                assert (message.payload, message.lane, message.key) == (mail.payload, mail.lane, mail.key)
                assert (message.created_at, message.sent_at) == (mail.created_at, mail.sent_at)

        def check(self, box: Box, members: Members, fetched: Fetched, request: Fetch, lease: int) -> list[int]:
            """Hold a group's reply to the rules, and note what it hands out."""
            now = self.now
            got = [message.msg_id for message in fetched.messages]
            self.same(box, fetched, got)
            ranks = [box.mail[msg_id].rank for msg_id in got]
            assert ranks == sorted(set(ranks)), "by lane, FIFO in each (F3)"
            assert len(got) <= request.num_msgs
            assert all(msg_id >= members.start for msg_id in got), "before the position (F1)"
            connection = request.connection
            claimed = members.claimed_by_others(connection, now)
            assert not set(got) & claimed, "claimed by another connection (F9)"
            assert not any(members.running(msg_id, now) for msg_id in got), "under another's lease (F6)"
            assert not any(members.dead(msg_id, now) for msg_id in got), "delivered too often (F7)"
            assert not set(got) & members.settled, "acknowledged already (K2)"
            for lane in Lane:
                first = [i for i in got if box.mail[i].lane is lane and i not in members.given]
                before = [i for i in members.given if box.mail[i].lane is lane]
                assert not first or not before or first[0] > max(before), "FIFO on first delivery (A8)"

            owed = [mail for mail in self.owed(box, members) if mail.id not in claimed]
            full = len(got) == request.num_msgs or request.budget != AMPLE
            missing = [mail.id for mail in owed if mail.id not in got]
            no_room = False
            if lease:
                no_room = members.leased(box, now, surely=False) + len(got) >= ROOM
                assert members.leased(box, now, surely=True) + len(got) <= ROOM, "more than may be leased (F6)"
            if (full or no_room) and got:
                assert all(box.mail[msg_id].rank > ranks[-1] for msg_id in missing), "passed over (A8)"
            else:
                assert no_room or not missing, "not delivered (A8)"
            assert no_room or not fetched.note, "kept back by nothing (F6)"
            assert full or not missing or fetched.note, "kept back without a word (F6)"
            if request.budget != AMPLE and len(got) > 1:
                assert sum(len(box.mail[msg_id].payload) for msg_id in got) <= request.budget
            running = [
                g.until for i, g in members.given.items() if members.running(i, now) and box.mail[i].is_live(now)
            ]
            if not got and running:
                assert fetched.retry_at is not None
                assert now < fetched.retry_at <= min(running)

            for message in fetched.messages:
                given = members.given.setdefault(message.msg_id, Given(False))
                given.leased = lease > 0
                given.delayed = False
                members.perhaps.discard(message.msg_id)
                members.revived.discard(message.msg_id)
                if lease:
                    given.until = now + lease
                    given.count += 1
                    assert message.deliveries == given.count
            if lease and got:
                members.plain = False
                members.free(connection)
            elif got:
                members.replies.append(got)
                members.holds.setdefault(connection, []).append(got)
                members.clients.setdefault((connection, self.ended.get(connection, 0)), []).append(got)
                members.claims |= dict.fromkeys(got, (connection, now + CLAIM))
            return got

        def owed(self, box: Box, members: Members) -> list[Mail]:
            """Return what must come with the next FETCH that is large enough (A8)."""
            return [
                mail
                for mail in box.live(self.now)
                if mail.id >= members.start
                and mail.id not in members.settled
                and mail.id not in members.perhaps
                and not members.running(mail.id, self.now)
                and not members.dead(mail.id, self.now)
            ]

        # settling

        @rule(
            name=st.sampled_from(BOXES),
            group=st.sampled_from((*GROUPS, "")),
            which=st.lists(st.integers(-1, 12), min_size=1, max_size=3),
            connection=st.sampled_from(CONNECTIONS),
        )
        def ack_any(self, name: str, group: str, which: list[int], connection: str) -> None:
            self.acknowledge(name, group, which, connection)

        @rule(name=st.sampled_from(BOXES), group=st.sampled_from(GROUPS), place=st.integers(-3, 3))
        def ack_given(self, name: str, group: str, place: int) -> None:
            got = self.last.get((name, group))
            if got:
                chosen = got[place % len(got)] if place != -1 else got[-1]
                self.acknowledge(name, group, [chosen], self.last_connection[name, group])

        def acknowledge(self, name: str, group: str, ids: list[int], connection: str = CONNECTIONS[0]) -> None:
            connection = "" if name == BOXES[0] else connection
            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.ack(*ids, group=group, box=name))
                return
            must: set[int] = set()
            may: set[int] = set()
            members = box.groups.get(group)
            if members is not None:
                for msg_id in ids:
                    covered = self.covered(box, members, msg_id, connection)
                    may |= covered
                    if not covered:
                        continue
                    known = any(msg_id in reply for reply in members.holds.get(connection, ()))
                    if members.plain and known:
                        must |= covered
                    elif box.mail[msg_id].is_live(self.now):
                        must.add(msg_id)
            self.broker.ack(*ids, group=group, box=name, connection=connection)
            if members is not None and connection in members.holds:
                left_over = ([i for i in reply if i not in may] for reply in members.holds[connection])
                members.holds[connection] = [reply for reply in left_over if reply]
                members.claims = {i: c for i, c in members.claims.items() if c[0] != connection or i not in may}
            if members is None:
                return
            if box.retention is Retention.UNTIL_ACK:
                left = set(self.broker.shown(name, limit=1000, budget=AMPLE))
                for mail in box.live(self.now):
                    if mail.id not in left:
                        assert mail.id in may, "removed for all without an ACK that covers it (K2, K3)"
                        mail.removed = True
            members.settled |= must
            members.perhaps |= may - must - members.settled

        def covered(self, box: Box, members: Members, msg_id: int, connection: str) -> set[int]:
            """Return what an ACK of the message covers (F9, K2, K3, K4)."""
            given = members.given.get(msg_id)
            if given is None:
                return set()
            if given.leased:
                return {msg_id}
            lane = box.mail[msg_id].lane
            # Whoever acknowledges a message is one of those that were handed it, maybe on another connection.
            own = members.holds.get(connection, [])
            known = any(msg_id in reply for reply in own)
            clients = [own] if known else list(members.clients.values())
            found: set[int] | None = None
            for replies in clients:
                if not any(msg_id in reply for reply in replies):
                    continue
                before = {i for reply in replies for i in reply if i <= msg_id and box.mail[i].lane <= lane}
                stood = [set(reply[: reply.index(msg_id)]) for reply in replies[-32:] if msg_id in reply]
                # Of a connection that is not known any of its replies may be the one that arrived.
                before |= set.union(set(), *stood) if connection else set.intersection(*stood or [set()])
                found = before if found is None else found & before
            found = found or set()
            if known:
                found -= members.claimed_by_others(connection, self.now)
            return {i for i in found if not members.given[i].leased} | {msg_id}

        @rule(
            name=st.sampled_from(BOXES),
            group=st.sampled_from(GROUPS),
            which=st.lists(st.integers(0, 12), min_size=1, max_size=3),
            span=st.sampled_from((0, 0, 400, 3 * SECOND)),
            longer=st.booleans(),
        )
        def nack_or_extend(self, name: str, group: str, which: list[int], span: int, longer: bool) -> None:
            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.nack(*which, group=group, box=name))
                return
            members = box.groups.get(group)
            held = [i for i in set(which) if members is not None and members.running(i, self.now)]
            there = [i for i in held if box.mail[i].is_live(self.now)]
            if longer:
                done = self.broker.extend(*which, group=group, box=name, ack_wait=SECOND + span)
            else:
                more = [i for i in held if span and members is not None and not members.given[i].delayed]
                sure = [i for i in more if i in there and members is not None and i not in members.perhaps]
                try:
                    done = self.broker.nack(*which, group=group, box=name, delay=span)
                except TooManyDelayedError:
                    assert members is not None
                    assert more
                    assert members.delayed(box, self.now, surely=False) + len(more) > DELAYED
                    return
                if sure and members is not None:
                    assert members.delayed(box, self.now, surely=True) + len(sure) <= DELAYED
            assert len(there) <= done <= len(held)
            for msg_id in held:
                assert members is not None
                given = members.given[msg_id]
                given.until = max(given.until, self.now + SECOND + span) if longer else self.now + span
                given.delayed = given.delayed if longer else span > 0

        @rule(name=st.sampled_from(BOXES), group=st.sampled_from(GROUPS), drop=st.booleans())
        def work_on_dead(self, name: str, group: str, drop: bool) -> None:
            box = self.box(name)
            members = box.groups.get(group) if box is not None else None
            if box is None or members is None:
                return
            dead = [mail for mail in box.live(self.now) if members.dead(mail.id, self.now)]
            assert self.broker.shown(name, dead_for=group, limit=1000) == sorted(mail.id for mail in dead)
            if drop:
                assert self.broker.drop(group=group, box=name) == len(dead)
                members.settled |= {mail.id for mail in dead}
                for mail in dead if box.retention is Retention.UNTIL_ACK else ():
                    mail.removed = True
                return
            assert self.broker.redrive(group=group, box=name) == len(dead)
            for mail in dead:
                members.given[mail.id].count = 0
                members.given[mail.id].delayed = False
                members.revived.add(mail.id)

        # looking and removing

        @rule(
            name=st.sampled_from(BOXES),
            key=st.sampled_from(KEYS),
            before_id=st.sampled_from((None, None, 0, 3, 6)),
            limit=st.sampled_from((1, 3, 1000)),
        )
        def query(self, name: str, key: str | None, before_id: int | None, limit: int) -> None:
            box = self.box(name)
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.query(name))
                return
            wanted = [
                mail.id
                for mail in box.live(self.now)
                if (key is None or mail.key == key) and (before_id is None or mail.id < before_id)
            ]
            found = self.broker.shown(name, key=key, before_id=before_id, limit=limit, budget=AMPLE)
            assert found == wanted[-limit:]

        @rule(name=st.sampled_from(BOXES), msg_id=st.integers(0, 12))
        def delete(self, name: str, msg_id: int) -> None:
            box = self.box(name)
            mail = box.mail.get(msg_id) if box is not None else None
            if box is None:
                self.refused(NoSuchMailboxError, lambda: self.broker.delete(msg_id, name))
            elif mail is None or not mail.is_live(self.now):
                self.refused(NoSuchMessageError, lambda: self.broker.delete(msg_id, name))
            else:
                self.broker.delete(msg_id, name)
                mail.removed = mail.deleted = True

        # time

        @rule(span=st.sampled_from(SPANS))
        def pass_time(self, span: int) -> None:
            self.broker.advance(span)

        @rule(sure=st.integers(0, 3))
        def pass_a_day(self, sure: int) -> None:
            if sure == 0:
                self.broker.advance(DAY)

        @rule(limit=st.integers(1, 3))
        def clean_up_a_slice(self, limit: int) -> None:
            self.broker.collect(limit)

        # what always holds

        @invariant()
        def counters_tell_what_is_stored(self) -> None:
            for name in BOXES:
                if self.box(name) is None:
                    continue
                mailbox = self.broker.mailbox(name)
                assert mailbox is not None
                with self.store.reading() as tx:
                    stored = tx.messages.first(mailbox, 10_000)
                    held = tx.messages.recipient_usage(mailbox, "did:key:x")
                assert mailbox.messages == len(stored)
                assert mailbox.bytes == sum(ref.size for ref in stored)
                kept = [ref.size for ref in stored if ref.recipient is not None]
                assert held == Usage(len(kept), sum(kept))
                box = self.boxes[name]
                assert mailbox.next_id == len(box.mail)
                ids = {ref.msg_id for ref in stored}
                assert {mail.id for mail in box.live(self.now)} <= ids
                assert not any(box.mail[msg_id].removed for msg_id in ids)

        def teardown(self) -> None:
            """Everything that is owed comes in the end: delayed mail, ended leases, mail never fetched (A8)."""
            for each in self.patches:
                each.stop()
            assert_intact(self.store)
            last = [self.now, *(one.due_at for one in self.waiting)]
            for box in self.boxes.values():
                for members in box.groups.values():
                    last += [given.until for given in members.given.values()]
            self.broker.now = max(last) + CLAIM
            self.release(1000)
            self.broker.clean_up(limit=2)
            for name, box in self.boxes.items():
                if not box.is_live(self.now):
                    continue
                assert self.broker.shown(name, limit=1000, budget=AMPLE) == [mail.id for mail in box.live(self.now)]
                for group in box.groups:
                    self.drain(name, box, group)
            self.counters_tell_what_is_stored()
            self.store.close()

        def drain(self, name: str, box: Box, group: str) -> None:
            members = box.groups[group]
            lease = 5 * SECOND if group == GROUPS[0] else 0
            members.claims.clear()
            for _ in range(len(box.mail) + 1):
                owed = {mail.id for mail in self.owed(box, members)}
                self.fetch(name, group, Deliver.LATEST, 0, False, 2, AMPLE, lease, None)
                got = self.last[name, group]
                assert got or not owed
                for msg_id in got:
                    self.acknowledge(name, group, [msg_id])
                if not got:
                    break
            assert self.owed(box, members) == []

    Mediator.TestCase.settings = settings(
        max_examples=50,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return Mediator


@pytest.mark.rule(
    "A3", "A5", "A8", "F1", "F3", "F4", "F6", "F7", "F8", "F9", "K2", "K3", "K4", "Q1", "Q2", "S2", "S3", "S4"
)
class TestSqlite(machine(ram_store).TestCase):
    """The machine over a store on a RAM disk."""
