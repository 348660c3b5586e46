"""Kept broadcasts and the board of public mailboxes, on every store (A1, A3, A8, E9, E10)."""

import json
import random

import pytest

from mediator.errors import BadRequestError, MessageTooLargeError
from mediator.mailboxes import board, broadcasting, creating
from mediator.mailboxes.address import PUBLIC
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.broadcasting import HIDDEN, LIFE, MAX_KEPT, keep
from mediator.mailboxes.creating import Create, Update
from mediator.mailboxes.events import EventType
from mediator.mailboxes.message import Draft
from mediator.mailboxes.quotas import Quotas
from tests.harness.samples import ALL, T0, TENANT, add, everything, get, held

BOUNDS = Bounds()


def quotas():
    return Quotas(Quota(), Quota())


def cast(store, *payloads, subject="a.b", now=T0, **given):
    """Keep broadcasts in one transaction and return the msg_id of the last, and the events."""
    with store.transaction() as tx:
        for payload in payloads:
            msg_id = keep(tx, BOUNDS, quotas(), TENANT, subject, Draft(payload, **given), now)
        return msg_id, list(tx.events)


def kept(store, now=T0):
    """Return the bodies and subjects of what is kept, oldest first."""
    with store.reading() as tx:
        return [(message.key, message.payload) for message in everything(tx, get(tx, HIDDEN), now)]


@pytest.mark.rule("E9", "S2")
def test_kept_broadcasts_have_their_order_and_subjects(store, reopen):
    assert cast(store, b"1", b"2")[0] == 1
    assert cast(store, b"3", subject="c.d")[0] == 2
    assert cast(store, b"4")[0] == 3
    store = reopen()
    assert kept(store) == [("a.b", b"1"), ("a.b", b"2"), ("c.d", b"3"), ("a.b", b"4")]


@pytest.mark.rule("E9", "S5")
def test_a_broadcast_is_kept_an_hour_or_as_long_as_it_says(store):
    cast(store, b"hour")
    cast(store, b"second", ttl=1000)
    cast(store, b"until", expire_at=T0 + 2000)
    cast(store, b"for ever", ttl=0)
    for now, left in ((T0 + 999, 4), (T0 + 1000, 3), (T0 + 2000, 2), (T0 + LIFE - 1, 2), (T0 + LIFE, 1)):
        assert len(kept(store, now)) == left
    with pytest.raises(BadRequestError):
        cast(store, b"past", expire_at=T0)


@pytest.mark.rule("E9")
def test_too_many_broadcasts_let_the_oldest_go(store):
    cast(store, *(b"%d" % number for number in range(MAX_KEPT)))
    assert len(kept(store)) == MAX_KEPT
    _, events = cast(store, b"one", b"two", b"three")
    assert [(event.type, event.msg_id) for event in events if event.type is not EventType.STORED] == [
        (EventType.EXPIRED, 0),
        (EventType.EXPIRED, 1),
        (EventType.EXPIRED, 2),
    ]
    left = [payload for _, payload in kept(store)]
    assert len(left) == MAX_KEPT
    assert (left[0], left[-1]) == (b"3", b"three")


@pytest.mark.rule("E9", "N7")
def test_too_many_bytes_of_broadcasts_let_the_oldest_go(store, monkeypatch):
    limit = 100_000
    monkeypatch.setattr(broadcasting, "MAX_KEPT_BYTES", limit)
    # The subject has three bytes.
    quarter = b"x" * (limit // 4 - 3)
    cast(store, quarter, quarter)
    cast(store, quarter, quarter)
    with store.reading() as tx:
        assert held(get(tx, HIDDEN)) == (4, 4, limit)
    cast(store, b"")
    with store.reading() as tx:
        assert held(get(tx, HIDDEN)) == (5, 4, limit // 4 * 3 + 3)
    cast(store, b"y" * (limit - 3))
    assert [payload[:1] for _, payload in kept(store)] == [b"y"]
    with pytest.raises(MessageTooLargeError):
        cast(store, b"x" * limit)
    assert len(kept(store)) == 1


@pytest.mark.rule("E9", "A6")
def test_the_mailbox_of_broadcasts_is_hidden_and_permanent(store):
    cast(store, b"1")
    with store.transaction() as tx:
        add(tx, "a")
        assert [mailbox.address for mailbox in tx.mailboxes.list(TENANT, "", ALL, T0)] == ["a"]
        assert tx.mailboxes.public(TENANT, "", (), 0, ALL, T0) == []
        assert broadcasting.ready(tx, TENANT, T0).id == get(tx, HIDDEN).id
        assert broadcasting.ready(tx, "other", T0).id != get(tx, HIDDEN).id
        for address in (HIDDEN, PUBLIC):
            with pytest.raises(BadRequestError):
                creating.delete(tx, TENANT, address, T0)


# The board.


def create(store, name, now=T0, **given):
    with store.transaction() as tx:
        return creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, name, **{"public": True} | given), now)


def posted(store, now=T0):
    """Return what the board shows."""
    with store.reading() as tx:
        return [json.loads(message.payload) for message in everything(tx, get(tx, PUBLIC), now)]


def names(store, now=T0):
    return [(entry["name"], entry.get("deleted", False)) for entry in posted(store, now)]


@pytest.mark.rule("E10")
def test_the_board_shows_each_public_mailbox_as_it_is(store, reopen):
    token = create(store, "b", desc="é", tags=("t", "u")).token
    create(store, "a")
    create(store, "private", public=False)
    create(store, "plain", public=None)
    shown = {"mail_address": "b", "mail_id": "b", "name": "b", "created_at": T0 // 1000}
    assert posted(store)[0] == shown | {"desc": "é", "tags": ["t", "u"]}
    with store.transaction() as tx:
        creating.update(tx, Update(TENANT, "b", token, desc="new", tags=()), T0)
    store = reopen()
    assert names(store) == [("a", False), ("b", False)]
    assert posted(store)[1] == shown | {"desc": "new", "tags": []}


@pytest.mark.rule("E10", "M1", "A3")
def test_an_ended_mailbox_leaves_the_board_at_once(store):
    create(store, "a", ttl=1000)
    create(store, "b")
    with store.transaction() as tx:
        creating.delete(tx, TENANT, "b", T0)
        private = creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, "private"), T0).mailbox
        creating.delete(tx, TENANT, private.address, T0)
    assert names(store) == [("a", False), ("b", True)]
    assert names(store, T0 + 1000) == [("b", True)]
    with store.transaction() as tx:
        creating.expire(tx, get(tx, "a"), T0 + 1000)
    assert names(store, T0 + 1000) == [("b", True), ("a", True)]
    create(store, "b", now=T0 + 1000)
    assert names(store, T0 + 1000) == [("a", True), ("b", False)]
    assert names(store, T0 + 1000 + board.ENDED_LIFE) == [("b", False)]


@pytest.mark.rule("E10", "M1")
def test_an_address_reused_before_the_clean_up_is_there_once(store):
    create(store, "a", ttl=1000, desc="old")
    create(store, "a", now=T0 + 1000, desc="new")
    assert [entry["desc"] for entry in posted(store, T0 + 1000)] == ["new"]


@pytest.mark.rule("E10")
def test_a_board_made_late_shows_what_is_there_by_then(store):
    with store.transaction() as tx:
        for number in range(1005):
            add(tx, f"b{number:04}", public=True)
        add(tx, "over", public=True, expire_at=T0)
        add(tx, "private")
        add(tx, "theirs", tenant="other", public=True)
        board.ready(tx, TENANT, T0)
        board.ready(tx, TENANT, T0)
    assert names(store) == [(f"b{number:04}", False) for number in range(1005)]
    assert [mailbox for mailbox in names(store) if mailbox[0] == "theirs"] == []


@pytest.mark.rule("E10", "N3")
def test_a_create_that_fails_or_changes_nothing_is_not_posted(store):
    create(store, "a", desc="first")
    create(store, "a", desc="second")
    with store.transaction() as tx, pytest.raises(BadRequestError):
        creating.create(tx, BOUNDS, random.randbytes, Create(TENANT, PUBLIC, public=True), T0)
    assert [(entry["name"], entry["desc"]) for entry in posted(store)] == [("a", "first")]
    with store.reading() as tx:
        assert get(tx, PUBLIC).next_id == 1
