"""What is sent comes back to the byte: payloads, headers, keys, tags and ids of every kind."""

import hashlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mediator.mailboxes.group import Lease
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.message import Filter, Usage
from tests.harness.samples import ALL, T0, add, cut, decoded, everything, get, held, ids, leases, put, ref, waiting

PAYLOADS = {
    "empty": b"",
    "one NUL": b"\x00",
    "NULs around": b"\x00a\x00",
    "every byte": bytes(range(256)),
    "not UTF-8": b"\xff\xfe\xc0\x80",
    "escapes": b"\\x00 \\000 ''\";--",
    "line ends": b"\r\n\n\r",
    "digits": b"0012",
}
TEXTS = [
    "'",
    '"',
    "%",
    "_",
    "\\",
    "?",
    "%s",
    "$1",
    ":name",
    "{}",
    "é",
    "e\u0301",
    "😀",
    "\u202e",
    "\ufeff",
    "a\tb\r\n",
    "\x01",
]


@pytest.mark.rule("S1")
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_payload_survives_to_the_byte(store, reopen, payload):
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, payload, size=100)
        tx.delays.add(waiting(mailbox, T0, payload, size=100))
        found = [everything(tx, mailbox)[0], tx.delays.due(T0, 1, ALL)[0].message]
    store = reopen()
    with store.reading() as tx:
        mailbox = get(tx)
        found += [
            *everything(tx, mailbox),
            *tx.messages.lane(mailbox, Lane.NORMAL, -1, ALL, ALL, T0),
            *tx.messages.pick(mailbox, [0], ALL, T0),
            tx.delays.of(mailbox, 1)[0].message,
        ]
    assert [message.payload for message in found] == [payload] * 6
    assert all(type(message.payload) is bytes for message in found)
    assert {message.size for message in found} == {100}


@pytest.mark.rule("S1")
def test_a_large_payload_survives(store, reopen):
    block = hashlib.sha512(b"seed").digest()
    payload = b"".join(hashlib.sha512(block + bytes([n % 256, n // 256])).digest() for n in range(16_384))
    assert len(payload) == 1024 * 1024
    with store.transaction() as tx:
        mailbox = add(tx)
        put(tx, mailbox, payload)
        tx.delays.add(waiting(mailbox, T0, payload))
        put(tx, mailbox, b"small")
    store = reopen()
    with store.transaction() as tx:
        assert [message.payload for message in everything(tx, get(tx))] == [payload, b"small"]
        assert tx.delays.due(T0, 1, ALL)[0].message.payload == payload
        assert held(get(tx)) == (2, 2, len(payload) + 5)


@pytest.mark.rule("A8")
def test_a_shared_payload_lives_as_long_as_any_mailbox_has_it(store, reopen):
    payload = bytes(range(256)) * 64
    with store.transaction() as tx:
        for address in ("a", "b", "c"):
            put(tx, add(tx, address), payload)
        put(tx, get(tx, "a"), payload)
    for address, removed in (("b", 0), ("a", 0), ("c", 0)):
        with store.transaction() as tx:
            cut(tx, get(tx, address), removed)
        store = reopen()
        with store.reading() as tx:
            assert [message.payload for message in everything(tx, get(tx))] == [payload] * get(tx).messages
    with store.reading() as tx:
        assert [get(tx, address).messages for address in ("a", "b", "c")] == [1, 0, 0]


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=40)
named = words.filter(bool)
tag = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00,"), min_size=1, max_size=40)


@pytest.mark.rule("S1", "N9")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    payload=st.binary(max_size=300),
    headers=st.dictionaries(named, words, max_size=5),
    key=st.none() | named,
    tags=st.lists(tag, max_size=4).map(tuple),
    dedup_id=st.none() | named,
    reply_to=st.none() | named,
    recipient=st.none() | named,
    lane=st.sampled_from(Lane),
    times=st.tuples(*[st.integers(0, 10**14)] * 2, st.none() | st.integers(T0 + 1, 10**14)),
)
def test_every_field_of_a_message_survives(store, payload, headers, times, **fields):
    created_at, sent_at, expire_at = times
    fields |= {"created_at": created_at, "sent_at": sent_at, "expire_at": expire_at, "headers": headers}
    with store.transaction() as tx:
        old = tx.mailboxes.find("default", "a")
        if old is not None:
            tx.mailboxes.retire(old)
        mailbox = add(tx)
        kept = put(tx, mailbox, payload, **fields)
        # A delayed message was not visible yet: it has the time at which it was sent.
        delayed = waiting(mailbox, T0, payload, **fields | {"created_at": sent_at})
        tx.delays.add(delayed)
        assert [decoded(each) for each in everything(tx, mailbox)] == [kept]
    with store.reading() as tx:
        mailbox = get(tx)
        [found] = everything(tx, mailbox)
        assert decoded(found) == kept
        assert dict(found.headers) == headers
        assert tx.messages.refs(mailbox, [0], T0) == {0: ref(kept)}
        [found] = tx.delays.of(mailbox, ALL)
        assert found.message == delayed.message
        for wanted in fields["tags"]:
            assert ids(tx.messages.newest(mailbox, Filter(tags=(wanted,)), ALL, ALL, T0)) == [0]
        if kept.key is not None:
            assert tx.messages.keyed(mailbox, kept.key) == ref(kept)
            assert ids(tx.messages.newest(mailbox, Filter(key=kept.key), ALL, ALL, T0)) == [0]
        if kept.recipient is not None:
            assert tx.messages.recipient_usage(mailbox, kept.recipient) == Usage(1, len(payload))


@pytest.mark.rule("S1")
def test_keys_tags_and_dedup_ids_are_told_apart_to_the_letter(store, reopen):
    texts = [*TEXTS, *(text * 2 for text in TEXTS), *(f"a{text}" for text in TEXTS), "a", "A"]
    with store.transaction() as tx:
        mailbox = add(tx)
        for number, text in enumerate(texts):
            put(tx, mailbox, key=text, tags=(text,), recipient=text)
            tx.dedup_ids.add(mailbox, text, number, T0 + 1)
            tx.groups.add(mailbox, text)
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        for number, text in enumerate(texts):
            assert tx.messages.keyed(mailbox, text).msg_id == number
            assert ids(tx.messages.newest(mailbox, Filter(key=text, tags=(text,)), ALL, ALL, T0)) == [number]
            assert tx.messages.recipient_usage(mailbox, text) == Usage(1, 1)
            assert tx.dedup_ids.find(mailbox, text, T0) == number
            assert tx.groups.find(mailbox, text).name == text
        tx.dedup_ids.forget(mailbox, "%")
        assert tx.dedup_ids.find(mailbox, "%", T0) is None
        assert tx.dedup_ids.find(mailbox, "%%", T0) is not None
        assert tx.groups.count(mailbox) == len(texts)


@pytest.mark.rule("A3")
@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 1, 2**53, 2**62])
def test_ids_sizes_and_times_may_be_large(store, reopen, start):
    with store.transaction() as tx:
        mailbox = add(tx, expire_at=10**14, created_at=10**13)
        mailbox.next_id = start
        for _ in range(4):
            put(tx, mailbox, size=2**33, key="k", created_at=10**13, expire_at=10**14)
        assert held(mailbox) == (start + 4, 4, 2**35)
        tx.dedup_ids.add(mailbox, "d", start + 1, 10**14)
        group = tx.groups.add(mailbox, "g")
        group.start_at(start)
        tx.groups.save(group)
        tx.leases.put(group, [Lease(start + 2, Lane.NORMAL, 10**14, 1_000_000)])
        tx.delays.add(waiting(mailbox, 10**14, size=2**33))
        cut(tx, mailbox, start + 3)
    store = reopen()
    with store.transaction() as tx:
        mailbox = get(tx)
        assert held(mailbox) == (start + 4, 3, 3 * 2**33)
        there = [start, start + 1, start + 2]
        assert ids(everything(tx, mailbox)) == there
        assert ids(tx.messages.lane(mailbox, Lane.NORMAL, start, ALL, 2**40, T0)) == there[1:]
        assert ids(tx.messages.pick(mailbox, there, 2**40, T0)) == there
        assert ids(tx.messages.newest(mailbox, Filter(before_id=start + 1), ALL, ALL, T0)) == there[:1]
        assert ids(tx.messages.between(mailbox, Lane.NORMAL, start, start + 3, T0)) == there[1:]
        assert sorted(tx.messages.refs(mailbox, [*there, start + 3], T0)) == there
        assert tx.messages.first_since(mailbox, 10**13) == start
        assert tx.messages.first_since(mailbox, 10**13 + 1) == start + 4
        assert tx.messages.keyed(mailbox, "k").msg_id in there
        assert tx.dedup_ids.find(mailbox, "d", T0) == start + 1
        group = tx.groups.find(mailbox, "g")
        assert group.settled == [start - 1] * 4
        assert leases(tx, group, start + 2)[start + 2] == Lease(start + 2, Lane.NORMAL, 10**14, 1_000_000)
        assert tx.delays.next_due() == 10**14
        assert tx.delays.usage(mailbox) == Usage(1, 2**33)
        assert tx.mailboxes.usage("default") == Usage(4, 4 * 2**33)
        assert put(tx, mailbox).msg_id == start + 4
