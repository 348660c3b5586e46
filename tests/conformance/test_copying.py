"""Mail copied by rule, on every store: with the original or not at all, once, and nothing of it is copied again."""

import pytest

from mediator.errors import (
    BadRequestError,
    CopyRefusedError,
    NoSuchMailboxError,
    QuotaExceededError,
    SendOnlyError,
)
from mediator.mailboxes import broadcasting, copying, moving, sending
from mediator.mailboxes.bounds import Bounds, Quota
from mediator.mailboxes.copy_rule import MAX_RULES, CopyCounts, CopyRule, WhenFull
from mediator.mailboxes.events import EventType
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Kind, Retention
from mediator.mailboxes.message import Door, Draft
from mediator.mailboxes.moving import Resend, Transfer
from mediator.mailboxes.sending import Send
from tests.harness.broker import BOX, GROUP, HOUR, SECOND, TENANT, Broker
from tests.harness.mediation import Mediation, key
from tests.harness.protocols import envelope

AUDIT = "audit"


@pytest.fixture
def broker(store):
    return make(store)


def make(store, bounds=None):
    broker = Broker(store, bounds)
    broker.create()
    broker.create(AUDIT)
    return broker


def add(broker, name="all", to=AUDIT, tenant=TENANT, **options):
    return broker.run(lambda tx: copying.add_rule(tx, CopyRule(tenant, name, to, **options), broker.now))


def remove(broker, name="all", tenant=TENANT):
    return broker.run(lambda tx: copying.remove_rule(tx, tenant, name))


def counts(broker, name="all"):
    return broker.store.copy_rules.counts[TENANT, name]


def copies(broker, box=AUDIT):
    return [(message.payload, message.headers.get("mq9-copy-of")) for message in broker.query(box)]


@pytest.mark.rule("C1")
def test_without_rules_nothing_is_copied(broker):
    broker.send(b"x")
    assert copies(broker) == []


@pytest.mark.rule("C1")
def test_a_rule_copies_from_when_it_is_made_until_it_is_removed(broker):
    broker.send(b"before")
    add(broker)
    broker.send(b"one")
    broker.send(b"two")
    remove(broker)
    broker.send(b"after")
    assert copies(broker) == [(b"one", f"{BOX}/1"), (b"two", f"{BOX}/2")]
    assert counts(broker) == CopyCounts(matched=2, copied=2)


@pytest.mark.rule("C1")
def test_a_rule_holds_after_a_restart(broker, reopen):
    add(broker)
    broker.store = reopen()
    broker.send(b"x")
    assert copies(broker) == [(b"x", f"{BOX}/0")]


@pytest.mark.rule("C1")
@pytest.mark.parametrize(
    ("rule", "copied"),
    [
        ({"address": ">"}, "abcde"),
        ({"address": "shop.orders"}, "b"),
        ({"address": "shop.>"}, "bc"),
        ({"address": "shop.orders.>"}, "c"),
        ({"tags": ("red",)}, "de"),
        ({"tags": ("red", "big")}, "e"),
        ({"lanes": (Lane.URGENT, Lane.CRITICAL)}, "ad"),
        ({"lanes": (Lane.URGENT,), "tags": ("red",)}, "d"),
        ({"doors": (Door.DIDCOMM, Door.OPERATOR)}, "ce"),
    ],
)
def test_what_a_rule_gives_must_match_all(broker, rule, copied):
    for name in ("shop.orders", "shop.orders.eu", "shopping"):
        broker.create(name)
    add(broker, **rule)
    broker.send(b"a", lane=Lane.CRITICAL)
    broker.send(b"b", to="shop.orders")
    broker.send(b"c", to="shop.orders.eu", door=Door.DIDCOMM)
    broker.send(b"d", to="shopping", lane=Lane.URGENT, tags=("red",))
    broker.send(b"e", to="shopping", tags=("big", "red", "old"), door=Door.OPERATOR)
    assert b"".join(payload for payload, _ in copies(broker)).decode() == copied


@pytest.mark.rule("C1")
def test_rules_of_another_tenant_copy_nothing(broker):
    broker.create(tenant="other")
    broker.create(AUDIT, tenant="other")
    add(broker, tenant="other")
    broker.send(b"x")
    assert copies(broker) == []
    assert broker.query(AUDIT, tenant="other") == []


@pytest.mark.rule("C1")
def test_mail_to_a_send_only_address_is_matched_by_the_mailbox(broker):
    address = broker.create("inbox").send_only
    add(broker, address="inbox")
    broker.send(b"x", to=address)
    assert copies(broker) == [(b"x", "inbox/0")]


@pytest.mark.rule("C1", "E9")
def test_a_kept_broadcast_is_matched_by_its_subject(broker):
    add(broker, address="billing.>")

    def keep(subject):
        draft = Draft(b"x", tags=("t",))
        broker.run(lambda tx: broadcasting.keep(tx, broker.bounds, broker.quotas, TENANT, subject, draft, broker.now))

    keep("stock.low")
    keep("billing.Paid")
    assert copies(broker) == [(b"x", "billing.Paid/1")]
    [copied] = broker.query(AUDIT)
    assert (copied.key, copied.expire_at, copied.tags) == (None, None, ("t",))


@pytest.mark.rule("C2")
def test_a_copy_has_the_content_and_neither_key_nor_end(broker):
    add(broker)
    content = {"lane": Lane.URGENT, "tags": ("a", "b"), "reply_to": "back", "headers": {"h": "v"}}
    broker.send(b"x", **content, key="k", ttl=HOUR, dedup_id="d")
    [copied] = broker.query(AUDIT)
    assert (copied.lane, copied.tags, copied.reply_to) == (Lane.URGENT, ("a", "b"), "back")
    assert copied.headers == {"h": "v", "mq9-copy-of": f"{BOX}/0", "mq9-copy-key": "k"}
    assert (copied.key, copied.expire_at, copied.dedup_id, copied.recipient) == (None, None, None, None)
    assert copied.payload_size == 1
    assert (TENANT, AUDIT) in broker.woken
    assert broker.told(EventType.STORED) == [0, 0]


@pytest.mark.rule("C2")
def test_headers_alone_are_copied_where_the_rule_says_so(broker):
    add(broker, headers_only=True)
    broker.send(b"secret", headers={"h": "v"})
    [copied] = broker.query(AUDIT)
    assert (copied.payload, copied.headers["h"]) == (b"", "v")


@pytest.mark.rule("C2")
def test_what_becomes_of_the_original_leaves_the_copy_alone(broker):
    add(broker)
    broker.send(b"replaced", key="k")
    broker.send(b"newer", key="k")
    broker.send(b"deleted")
    broker.send(b"expired", ttl=SECOND)
    broker.delete(2)
    broker.advance(2 * SECOND)
    broker.clean_up()
    broker.delete_mailbox()
    broker.clean_up()
    assert [payload for payload, _ in copies(broker)] == [b"replaced", b"newer", b"deleted", b"expired"]


@pytest.mark.rule("C2")
def test_copies_are_kept_as_long_as_the_rule_says(broker):
    add(broker, ttl=HOUR)
    broker.send(b"x")
    broker.advance(HOUR - 1)
    assert len(copies(broker)) == 1
    broker.advance(1)
    assert copies(broker) == []


@pytest.mark.rule("C2")
def test_what_is_rolled_back_leaves_no_copy_and_no_rule(broker):
    def break_off(tx):
        sending.send(tx, broker.bounds, broker.quotas, Send(TENANT, BOX, Draft(b"lost")), broker.now)
        copying.add_rule(tx, CopyRule(TENANT, "late", AUDIT), broker.now)
        raise ZeroDivisionError

    add(broker)
    with pytest.raises(ZeroDivisionError):
        broker.run(break_off)
    assert (copies(broker), broker.query(BOX), counts(broker)) == ([], [], CopyCounts())
    broker.send(b"kept")
    assert copies(broker) == [(b"kept", f"{BOX}/0")]
    assert [one.name for one in broker.run(lambda tx: tx.copy_rules.of(TENANT))] == ["all"]


@pytest.mark.rule("C2", "S3")
def test_a_repeated_send_is_copied_once(broker):
    add(broker)
    assert broker.send(b"x", dedup_id="d") == broker.send(b"x", dedup_id="d") == 0
    assert (len(copies(broker)), counts(broker).matched) == (1, 1)


@pytest.mark.rule("C2")
def test_two_rules_with_one_target_copy_once(broker):
    broker.create("second")
    add(broker, "a")
    add(broker, "b")
    add(broker, "c", to="second")
    broker.send(b"x")
    assert (len(copies(broker)), len(copies(broker, "second"))) == (1, 1)


@pytest.mark.rule("C2")
def test_copies_may_be_work_for_a_group(store):
    broker = Broker(store)
    broker.create()
    broker.create(AUDIT, retention=Retention.UNTIL_ACK)
    add(broker)
    broker.send(b"x")
    assert broker.take(GROUP, AUDIT) == [0]
    broker.ack(0, box=AUDIT)
    assert (copies(broker), broker.shown()) == ([], [0])


@pytest.mark.rule("C3", "S7")
def test_a_full_target_refuses_both_or_drops_the_copy(store):
    broker = make(store, Bounds(mailbox=Quota(messages=2)))
    add(broker)
    broker.send(b"there", to=AUDIT)
    broker.send(b"1")
    broker.create("more")
    with pytest.raises(CopyRefusedError, match="copy_refused: rule all cannot copy this message: where copies go, "):
        broker.send(b"2", to="more", dedup_id="d", key="k")
    assert (broker.shown("more"), len(copies(broker))) == ([], 2)
    assert counts(broker) == CopyCounts(matched=2, copied=1, refused=1)
    remove(broker)
    add(broker, "spare", when_full=WhenFull.DROP)
    assert broker.send(b"2", to="more", dedup_id="d", key="k") == 0
    assert (len(copies(broker)), counts(broker, "spare")) == (2, CopyCounts(matched=1, dropped=1))


@pytest.mark.rule("C3", "S7")
def test_rates_bound_what_is_sent_and_not_its_copies(store):
    broker = make(store, Bounds(mailbox=Quota(rate=2), tenant=Quota(rate=4)))
    broker.create("second")
    add(broker)
    for box in (BOX, BOX, "second", "second"):
        broker.send(b"x", to=box)
    assert len(copies(broker)) == 4
    with pytest.raises(QuotaExceededError):
        broker.send(b"x", to="second")


@pytest.mark.rule("C3", "S7")
def test_copies_count_in_what_a_tenant_may_hold(store):
    broker = make(store, Bounds(tenant=Quota(messages=3)))
    add(broker)
    broker.send(b"1")
    with pytest.raises(CopyRefusedError):
        broker.send(b"2")
    broker.advance(HOUR)
    assert (broker.shown(), len(copies(broker))) == ([0], 1)


@pytest.mark.rule("C3", "N7")
def test_a_copy_too_large_for_its_headers_is_refused_or_dropped(store):
    broker = make(store, Bounds(max_message=100))
    add(broker)
    with pytest.raises(CopyRefusedError, match="the limit is 100"):
        broker.send(b"x" * 100)
    remove(broker)
    add(broker, when_full=WhenFull.DROP)
    broker.send(b"x" * 100)
    assert copies(broker) == []


@pytest.mark.rule("C3")
def test_a_target_that_is_gone_takes_nothing(broker):
    add(broker)
    broker.delete_mailbox(AUDIT)
    with pytest.raises(CopyRefusedError, match="the mailbox for copies does not exist"):
        broker.send(b"x")
    broker.create(AUDIT, kind=Kind.LATEST)
    with pytest.raises(CopyRefusedError, match="more than its latest message"):
        broker.send(b"x")
    assert broker.shown() == []
    remove(broker)
    broker.send(b"x")


@pytest.mark.rule("C4")
def test_a_copy_is_not_copied_nor_mail_to_its_target(broker):
    broker.create("second")
    add(broker, "first")
    add(broker, "second", to="second", address=AUDIT)
    broker.send(b"x")
    broker.send(b"direct", to=AUDIT)
    assert copies(broker) == [(b"x", f"{BOX}/0"), (b"direct", None)]
    assert copies(broker, "second") == [(b"direct", f"{AUDIT}/1")]


@pytest.mark.rule("C4", "F7")
def test_moved_mail_is_not_copied_and_resent_mail_is(broker):
    broker.create("other")
    broker.send(b"x")
    add(broker)
    for keep in (True, False):
        request = Transfer(TENANT, BOX, "other", [0], keep)
        broker.run(lambda tx: moving.transfer(tx, broker.bounds, broker.quotas, request, broker.now))  # noqa: B023
    assert (copies(broker), broker.shown("other")) == ([], [0, 1])
    broker.fetch(GROUP, "other", max_deliver=1, ack_wait=SECOND, deliver="earliest")
    broker.advance(2 * SECOND)
    broker.fetch(GROUP, "other")
    request = Resend(TENANT, "other", GROUP, 0, payload=b"mended")
    broker.run(lambda tx: moving.resend(tx, broker.bounds, broker.quotas, request, broker.now))
    assert copies(broker) == [(b"mended", "other/2")]


@pytest.mark.rule("C4", "F7")
def test_a_copy_that_is_sent_again_is_not_copied(broker):
    broker.create("second")
    add(broker)
    broker.send(b"x")
    add(broker, "again", to="second", address=AUDIT)
    broker.fetch(GROUP, AUDIT, max_deliver=1, ack_wait=SECOND, deliver="earliest")
    broker.advance(2 * SECOND)
    broker.fetch(GROUP, AUDIT)
    request = Resend(TENANT, AUDIT, GROUP, 0)
    broker.run(lambda tx: moving.resend(tx, broker.bounds, broker.quotas, request, broker.now))
    assert copies(broker, "second") == []


@pytest.mark.rule("C5", "S4")
def test_delayed_mail_is_copied_when_it_becomes_visible(broker):
    add(broker, tags=("t",))
    broker.send(b"now", tags=("t",))
    broker.send(b"late", tags=("t",), delay=SECOND, headers={"h": "v"})
    broker.send(b"bare", delay=SECOND)
    broker.send(b"plain", tags=("t",), delay=SECOND)
    assert [payload for payload, _ in copies(broker)] == [b"now"]
    broker.advance(SECOND)
    broker.release()
    assert copies(broker) == [(b"now", f"{BOX}/0"), (b"late", f"{BOX}/1"), (b"plain", f"{BOX}/3")]
    assert counts(broker) == CopyCounts(matched=3, copied=3)
    assert [message.headers for message in broker.query()][1:] == [{"h": "v"}, {}, {}]


@pytest.mark.rule("C5")
def test_rules_of_the_moment_of_sending_copy_delayed_mail(broker):
    broker.create("second")
    add(broker, "gone")
    add(broker, "stays", to="second")
    broker.send(b"x", delay=SECOND)
    remove(broker, "gone")
    add(broker, "new")
    broker.advance(SECOND)
    broker.release()
    assert (copies(broker), copies(broker, "second")) == ([], [(b"x", f"{BOX}/0")])


@pytest.mark.rule("C5", "C3")
def test_delayed_mail_needs_room_for_its_copy_when_sent(store):
    broker = make(store, Bounds(mailbox=Quota(messages=1)))
    add(broker)
    broker.send(b"late", delay=SECOND)
    broker.send(b"fills", to=AUDIT)
    broker.create("more")
    with pytest.raises(CopyRefusedError):
        broker.send(b"refused", to="more", delay=SECOND)
    broker.advance(SECOND)
    broker.release()
    assert [payload for payload, _ in copies(broker)] == [b"fills", b"late"]


@pytest.mark.rule("C5")
def test_delayed_mail_that_is_never_seen_is_not_copied(broker):
    add(broker)
    broker.send(b"x", delay=SECOND, ttl=SECOND)
    broker.send(b"gone", delay=SECOND)
    begun = broker.run(lambda tx: moving.begin_purge(tx, TENANT, BOX, broker.now))
    broker.run(lambda tx: moving.purge(tx, begun, broker.now))
    broker.advance(SECOND)
    broker.release()
    assert copies(broker) == []


@pytest.mark.rule("C6")
def test_copies_of_a_forgotten_mailbox_and_its_rules_go(broker, monkeypatch):
    monkeypatch.setattr(copying, "FORGET_SLICE", 2)
    broker.create("other")
    add(broker)
    add(broker, "named", address=BOX)
    for number in range(5):
        broker.send(b"x", to=BOX if number % 2 else "other")
    broker.send(b"", to=AUDIT)
    assert broker.run(lambda tx: copying.forget_rules(tx, TENANT, BOX)) == 1
    target, after, total = broker.mailbox(AUDIT).id, -1, 0
    while after is not None:
        with broker.reading() as tx:
            found, after = copying.find_copies(tx, target, {BOX}, after)
        total += broker.run(lambda tx: copying.forget_copies(tx, target, found, broker.now))  # noqa: B023
    assert (total, [of for _, of in copies(broker)]) == (2, ["other/0", "other/1", "other/2", None])
    assert broker.mailbox(AUDIT).messages == 4


@pytest.mark.rule("C1")
@pytest.mark.parametrize(
    ("field", "rule"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "Über"}),
        ("to_address", {"to": "Audit"}),
        ("to_address", {"to": "public"}),
        ("to_address", {"to": AUDIT, "address": AUDIT}),
        ("to_address", {"to": "latest"}),
        ("to_address", {"to": "wallet"}),
        ("address", {"address": ""}),
        ("address", {"address": "shop.*"}),
        ("address", {"address": "shop>"}),
        ("address", {"address": "id:2"}),
        ("address", {"address": ".>"}),
        ("address", {"address": "a" * 257}),
        ("tags", {"tags": ("a,b",)}),
        ("tags", {"tags": ("",)}),
    ],
)
def test_a_wrong_rule_is_refused_by_the_name_of_its_field(broker, field, rule):
    broker.create("latest", kind=Kind.LATEST)
    broker.create("wallet", kind=Kind.MEDIATION)
    with pytest.raises(BadRequestError) as refused:
        add(broker, **rule)
    assert refused.value.field == field
    broker.send(b"x")
    assert copies(broker) == []


@pytest.mark.rule("C1")
def test_a_rule_needs_a_target_a_free_name_and_room(broker):
    with pytest.raises(NoSuchMailboxError):
        add(broker, to="nowhere")
    with pytest.raises((BadRequestError, SendOnlyError)):
        add(broker, to=broker.create("inbox").send_only)
    add(broker, address="a")
    with pytest.raises(BadRequestError, match="there is a rule all already"):
        add(broker)
    with pytest.raises(BadRequestError, match="has no rule none"):
        remove(broker, "none")
    for number in range(MAX_RULES - 1):
        add(broker, f"r{number}", address="a")
    with pytest.raises(BadRequestError, match="at most 100"):
        add(broker, "more")


@pytest.mark.rule("C1")
def test_rules_of_settings_stand_beside_stored_ones(broker, reopen):
    add(broker, "database")
    broker.create("second")
    broker.store = reopen()
    broker.store.copy_rules.configure([CopyRule(TENANT, "settings", "second", configured=True)])
    broker.send(b"x")
    assert (len(copies(broker)), len(copies(broker, "second"))) == (1, 1)
    with pytest.raises(BadRequestError, match="settings is in the settings"):
        remove(broker, "settings")


@pytest.mark.rule("C1", "C2", "D4", "D11")
def test_envelopes_are_copied_sealed_by_their_door(store):
    mail = Mediation(store)
    mail.create(AUDIT)
    own = mail.mailbox_of(mail.holder(1, key(2))).address
    add(mail, doors=(Door.DIDCOMM,))
    sealed = envelope()
    assert mail.forward(key(2), sealed).queued == 1
    mail.post(sealed, own)
    shown = mail.run(lambda tx: tx.mailboxes.send_only(tx.mailboxes.find(TENANT, own)))
    assert copies(mail) == [(sealed, f"{shown}/0")]
    assert mail.forward(key(2), b"late", delay=SECOND).queued == 1
    mail.advance(SECOND)
    mail.release()
    assert copies(mail)[1:] == [(b"late", f"{shown}/2")]


@pytest.mark.rule("C3", "D9")
def test_a_forward_whose_copy_is_refused_is_dropped(store):
    mail = Mediation(store, bounds=Bounds(mailbox=Quota(messages=1)))
    mail.create(AUDIT)
    holder = mail.holder(1, key(2))
    add(mail)
    mail.send(b"there", to=AUDIT)
    outcome = mail.forward(key(2), b"mail")
    assert (outcome.queued, outcome.full) == (0, 1)
    assert mail.deliver(holder) == []


@pytest.mark.rule("C2", "A7", "A10")
def test_who_reads_copies_cannot_read_a_generated_address(broker):
    made = broker.create(None)
    add(broker)
    broker.send(b"now", to=made.mailbox.address, reply_to=BOX, headers={"h": "v"})
    broker.send(b"late", to=made.send_only, delay=SECOND)
    broker.advance(SECOND)
    broker.release()
    found = broker.query(AUDIT)
    assert [one.headers["mq9-copy-of"] for one in found] == [f"{made.send_only}/0", f"{made.send_only}/1"]
    for one in found:
        told = {name: getattr(one, name) for name in ("headers", "key", "tags", "reply_to", "recipient", "dedup_id")}
        assert made.mailbox.address not in str(told)
    with pytest.raises(SendOnlyError):
        broker.fetch(GROUP, made.send_only)
    with pytest.raises(SendOnlyError):
        broker.delete(0, made.send_only)


@pytest.mark.rule("C6")
def test_copies_of_a_generated_address_are_found_by_it(broker):
    made = broker.create(None)
    add(broker)
    broker.send(b"x", to=made.mailbox.address)
    broker.delete_mailbox(made.mailbox.address)
    broker.clean_up()
    with broker.reading() as tx:
        found = copying.find_copies(tx, broker.mailbox(AUDIT).id, {made.mailbox.address}, -1)
    assert found == ([0], None)


@pytest.mark.rule("C3", "S7")
def test_what_is_refused_takes_nothing_of_the_quota(store):
    broker = make(store, Bounds(tenant=Quota(messages=10)))
    broker.create("gone")
    add(broker, "a")
    add(broker, "b", to="gone")
    broker.delete_mailbox("gone")
    for _ in range(30):
        with pytest.raises(CopyRefusedError):
            broker.send(b"x")
    remove(broker, "b")
    for _ in range(5):
        broker.send(b"x")
    with pytest.raises(QuotaExceededError):
        broker.send(b"x")


@pytest.mark.rule("C2", "C4")
def test_a_rule_that_changed_meanwhile_copies_delayed_mail_once(broker):
    add(broker, "a")
    add(broker, "b", to=AUDIT, tags=("red",))
    broker.create("second")
    broker.send(b"late", delay=HOUR, tags=("red",))
    remove(broker, "a")
    remove(broker, "b")
    for name in ("a", "b"):
        add(broker, name, to=BOX, address="other.>")
    broker.advance(HOUR)
    broker.release()
    assert broker.query(BOX)[0].payload == b"late"
    assert len(broker.query(BOX)) == 1


@pytest.mark.rule("C1", "A6")
def test_the_rules_of_a_tenant_go_with_it(broker):
    add(broker)
    broker.run(lambda tx: copying.remove_rules(tx, TENANT))
    broker.send(b"x")
    assert copies(broker) == []
    add(broker)
