"""MAILBOX.CREATE, UPDATE and the end of a mailbox (A1, A3, A6, M1–M4)."""

import pytest

from mediator.errors import BadRequestError, MailboxExistsError, NoSuchMailboxError, WrongTokenError
from mediator.mailboxes.bounds import Bounds
from mediator.mailboxes.events import EventType
from mediator.mailboxes.fetching import Deliver, Fetch
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.store.base import Store
from tests.harness.broker import BOX, DAY, GROUP, HOUR, SECOND, START, TENANT, Broker


@pytest.mark.rule("M1")
def test_what_create_says_is_kept(broker: Broker) -> None:
    broker.create(
        ttl=HOUR,
        desc="German to English",
        tags=("translate",),
        public=True,
        kind=Kind.LATEST,
        retention=Retention.UNTIL_ACK,
        archive=True,
        ack_wait=30 * SECOND,
    )
    mailbox = broker.mailbox()
    assert (mailbox.tenant, mailbox.address, mailbox.created_at) == (TENANT, BOX, START)
    assert (mailbox.desc, mailbox.tags, mailbox.public) == ("German to English", ("translate",), True)
    assert (mailbox.kind, mailbox.retention) == (Kind.LATEST, Retention.UNTIL_ACK)
    assert (mailbox.archive, mailbox.ack_wait, mailbox.expire_at) == (True, 30 * SECOND, START + HOUR)
    assert (mailbox.messages, mailbox.bytes) == (0, 0)


@pytest.mark.rule("A1", "A7", "M1")
def test_without_a_name_an_address_is_made(broker: Broker) -> None:
    first, second = broker.create(None), broker.create(None)
    assert first.mailbox.address != second.mailbox.address
    assert broker.send(to=first.mailbox.address) == 0


@pytest.mark.rule("A1")
@pytest.mark.parametrize("name", ["public", "Task", "payment-agent", ""])
def test_a_name_that_is_no_address_is_refused(broker: Broker, name: str) -> None:
    with pytest.raises(BadRequestError) as raised:
        broker.create(name)
    assert raised.value.field == "name"
    assert broker.events == []


@pytest.mark.rule("A1")
def test_the_reserved_address_is_not_there_to_be_written(broker: Broker) -> None:
    with pytest.raises((BadRequestError, NoSuchMailboxError)):
        broker.send(to="public")


@pytest.mark.rule("M1")
@pytest.mark.parametrize("default", [0, HOUR])
def test_no_ttl_is_the_configured_one(store: Store, default: int) -> None:
    broker = Broker(store, Bounds(default_ttl=default))
    assert broker.create("a").mailbox.expire_at == (START + default if default else None)
    assert broker.create("b", ttl=0).mailbox.expire_at is None
    assert broker.create("c", ttl=5 * SECOND).mailbox.expire_at == START + 5 * SECOND


@pytest.mark.rule("M1")
def test_a_mailbox_with_ttl_0_never_ends(broker: Broker) -> None:
    broker.create(ttl=0)
    broker.advance(10_000 * DAY)
    assert broker.send() == 0
    assert broker.clean_up().mailboxes == 0


@pytest.mark.rule("M1")
def test_the_moment_the_ttl_ends_nothing_can_be_reached(broker: Broker) -> None:
    token = broker.create(ttl=HOUR).token
    assert token is not None
    broker.send(b"x")
    broker.take()
    broker.now = START + HOUR - 1
    assert broker.shown() == [0]
    broker.now = START + HOUR
    for verb in (
        broker.send,
        broker.fetch,
        lambda: broker.fetch(None),
        lambda: broker.ack(0),
        lambda: broker.nack(0),
        lambda: broker.extend(0, ack_wait=SECOND),
        broker.query,
        lambda: broker.query(dead_for=GROUP),
        lambda: broker.delete(0),
        lambda: broker.update(token, desc="x"),
        broker.redrive,
        broker.drop,
        broker.delete_mailbox,
    ):
        with pytest.raises(NoSuchMailboxError, match=f"^mailbox {BOX} does not exist$"):
            verb()


@pytest.mark.rule("M1")
def test_the_ttl_is_fixed_when_it_is_created(broker: Broker) -> None:
    token = broker.create(ttl=HOUR).token
    assert token is not None
    broker.advance(HOUR - 1)
    broker.send()
    broker.take()
    broker.update(token, desc="still needed")
    broker.create(public=True, ttl=DAY)
    broker.advance(1)
    with pytest.raises(NoSuchMailboxError):
        broker.query()


@pytest.mark.rule("M2")
def test_a_taken_address_is_refused_and_nothing_changes(broker: Broker) -> None:
    broker.create(desc="first")
    broker.send(b"x")
    told = len(broker.events)
    with pytest.raises(MailboxExistsError, match=f"^mailbox {BOX} already exists$"):
        broker.create(desc="second", ttl=HOUR)
    mailbox = broker.mailbox()
    assert (mailbox.desc, mailbox.expire_at, mailbox.messages) == ("first", None, 1)
    assert len(broker.events) == told


@pytest.mark.rule("M2", "M3")
@pytest.mark.parametrize("public", [True, False])
def test_the_second_edition_may_create_twice(broker: Broker, public: bool) -> None:
    first = broker.create(desc="first", public=True)
    broker.send(b"x")
    second = broker.create(desc="second", public=public, ttl=HOUR, retention=Retention.UNTIL_ACK)
    assert first.token is not None
    assert second.token is None
    assert second.mailbox.id == first.mailbox.id
    mailbox = broker.mailbox()
    assert (mailbox.desc, mailbox.public, mailbox.expire_at) == ("first", True, None)
    assert mailbox.retention is Retention.KEEP
    assert broker.shown() == [0]


@pytest.mark.rule("A3", "M1", "M2")
@pytest.mark.parametrize("end", ["expired", "deleted", "collected"])
def test_an_address_created_again_is_a_new_mailbox(broker: Broker, end: str) -> None:
    old = broker.create(ttl=HOUR)
    assert old.token is not None
    broker.send(b"old", key="k", dedup_id="d")
    broker.send(b"old")
    broker.send(b"old, delayed", delay=2 * HOUR)
    assert broker.take(ack_wait=SECOND) == [0, 1]
    broker.ack(0)
    if end == "deleted":
        broker.delete_mailbox()
    else:
        broker.advance(HOUR)
    if end == "collected":
        broker.clean_up()
    new = broker.create()
    assert new.mailbox.id != old.mailbox.id
    assert new.token not in (None, old.token)
    assert broker.shown() == []
    assert broker.take() == []
    # Ids from 0, no old dedup id, no old key, no old group position, and the old delayed mail never comes.
    assert broker.send(b"new", dedup_id="d", key="k") == 0
    broker.advance(3 * HOUR)
    broker.release()
    assert [message.payload for message in broker.fetch().messages] == [b"new"]
    assert [message.payload for message in broker.query()] == [b"new"]
    with pytest.raises(WrongTokenError):
        broker.update(old.token, desc="x")
    broker.clean_up(limit=1)
    assert [message.payload for message in broker.query()] == [b"new"]
    assert broker.take() == [0]


@pytest.mark.rule("A6")
def test_equal_addresses_in_two_tenants_are_two_mailboxes(broker: Broker) -> None:
    broker.create(tenant="a")
    with pytest.raises(NoSuchMailboxError):
        broker.query(tenant="b")
    broker.create(tenant="b")
    assert broker.send(b"for a", tenant="a", dedup_id="d") == 0
    assert broker.send(b"for b", tenant="b", dedup_id="d") == 0
    assert [message.payload for message in broker.query(tenant="a")] == [b"for a"]
    broker.delete(0, tenant="a")
    broker.delete_mailbox(tenant="a")
    assert [m.payload for m in broker.fetch(tenant="b", deliver=Deliver.EARLIEST).messages] == [b"for b"]


@pytest.mark.rule("M3")
def test_the_token_is_not_kept(broker: Broker) -> None:
    created = broker.create()
    assert created.token is not None
    mailbox = broker.mailbox()
    assert mailbox is not None
    assert created.token not in repr(mailbox)
    assert bytes.fromhex(created.token) not in mailbox.token_hash
    assert len(created.token) >= 32


@pytest.mark.rule("M3", "M4")
def test_update_changes_what_it_names_with_the_right_token_only(broker: Broker) -> None:
    token = broker.create(desc="one", tags=("a",), ack_wait=5 * SECOND).token
    other = broker.create("other").token
    assert token is not None
    assert other is not None
    for wrong in (other, "", token[:-1], token.upper() + "0"):
        with pytest.raises(WrongTokenError, match=r"^token: does not match the one given at CREATE$"):
            broker.update(wrong, desc="two", tags=("b",))
    mailbox = broker.mailbox()
    assert (mailbox.desc, mailbox.tags) == ("one", ("a",))
    broker.update(token, desc="two")
    broker.update(token, tags=("b", "c"))
    broker.update(token)
    mailbox = broker.mailbox()
    assert (mailbox.address, mailbox.desc, mailbox.tags, mailbox.ack_wait) == (BOX, "two", ("b", "c"), 5 * SECOND)
    broker.update(token, desc="", tags=())
    mailbox = broker.mailbox()
    assert (mailbox.desc, mailbox.tags) == ("", ())


@pytest.mark.rule("M3", "M4")
def test_an_answer_says_how_it_was_whatever_comes_after_it(broker: Broker) -> None:
    created = broker.create("brief", public=True)
    assert created.token is not None
    answers = [created.mailbox, broker.create("brief", public=True).mailbox]
    answers += [broker.update(created.token, "brief", desc="d"), broker.set_ack_wait(SECOND, "brief")]
    broker.delete_mailbox("brief")
    assert [answer.address for answer in answers] == ["brief"] * 4
    assert [answer.desc for answer in answers] == ["", "", "d", "d"]
    assert [answer.ack_wait for answer in answers] == [None, None, None, SECOND]


@pytest.mark.rule("M4", "F5")
def test_a_deleted_mailbox_is_gone_at_once(broker: Broker) -> None:
    broker.create()
    request = Fetch(TENANT, BOX, GROUP)
    before = broker.fetching(request)
    broker.delete_mailbox()
    assert (TENANT, BOX) in broker.woken, "who waits in a FETCH must learn of it"
    with pytest.raises(NoSuchMailboxError):
        broker.again(request, before)
    with pytest.raises(NoSuchMailboxError):
        broker.send()
    assert broker.told(EventType.MAILBOX_DELETED) == [-1]
    with pytest.raises(NoSuchMailboxError):
        broker.delete_mailbox()


@pytest.mark.rule("M1", "M4")
def test_the_life_of_a_mailbox_is_told_once(broker: Broker) -> None:
    broker.create(ttl=HOUR)
    broker.advance(HOUR)
    broker.create(ttl=HOUR)
    broker.advance(HOUR)
    broker.clean_up()
    assert len(broker.told(EventType.MAILBOX_CREATED)) == 2
    assert len(broker.told(EventType.MAILBOX_EXPIRED)) == 2
