"""Which subjects a subscription finds in the store, and which nobody may have (E1, E2, E9, E10, N10)."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediator.nats.subjects import (
    ANY,
    BroadcastSubject,
    Edition,
    MailboxSubject,
    PlainSubject,
    PublicListSubject,
    RefusedSubject,
    classify,
    overlaps,
    stream_allowed,
)

A = "$mq9.AI."
ROOT = Path(__file__).parents[2]


@pytest.mark.rule("E1", "E2", "N10")
@pytest.mark.parametrize(
    ("subject", "found"),
    [
        ("MAILBOX.MSG.orders", MailboxSubject(Edition.LATER, "orders", "")),
        ("MAILBOX.MSG.orders.*", MailboxSubject(Edition.LATER, "orders", ANY)),
        ("MAILBOX.MSG.orders.high", MailboxSubject(Edition.LATER, "orders", "high")),
        ("MAILBOX.MSG.orders.critical", MailboxSubject(Edition.LATER, "orders", "critical")),
        ("MAILBOX.MSG.order.processing.urgent", MailboxSubject(Edition.LATER, "order.processing", "urgent")),
        (
            "MAILBOX.MSG.order.processing.urgent.normal",
            MailboxSubject(Edition.LATER, "order.processing.urgent", "normal"),
        ),
        ("MAILBOX.MSG.urgent.*", MailboxSubject(Edition.LATER, "urgent", ANY)),
        ("MAILBOX.MSG.urgent", MailboxSubject(Edition.LATER, "urgent", "")),
        ("MAILBOX.MSG.orders.notify", MailboxSubject(Edition.LATER, "orders.notify", "")),
        ("INBOX.m1.notify", MailboxSubject(Edition.FIRST, "m1", "notify")),
        ("INBOX.m1.*", MailboxSubject(Edition.FIRST, "m1", ANY)),
        ("INBOX.m1.low", MailboxSubject(Edition.FIRST, "m1.low", "")),
    ],
)
def test_mail_of_one_mailbox(subject: str, found: MailboxSubject) -> None:
    assert classify(A + subject) == found


@pytest.mark.rule("E9")
@pytest.mark.parametrize(
    ("subject", "pattern"),
    [
        ("BROADCAST.#", "BROADCAST.>"),
        ("BROADCAST.>", "BROADCAST.>"),
        ("BROADCAST.*.anomaly", "BROADCAST.*.anomaly"),
        ("BROADCAST.system.*", "BROADCAST.system.*"),
        ("BROADCAST.system.#", "BROADCAST.system.>"),
    ],
)
def test_broadcasts(subject: str, pattern: str) -> None:
    assert classify(A + subject) == BroadcastSubject(A + pattern)


@pytest.mark.rule("E10")
@pytest.mark.parametrize("subject", ["PUBLIC.LIST", "MAILBOX.MSG.public", "MAILBOX.MSG.public.*"])
def test_the_public_list(subject: str) -> None:
    assert classify(A + subject) == PublicListSubject(A + subject)


@pytest.mark.rule("N10")
@pytest.mark.parametrize(
    "subject",
    [
        ">",
        "*.>",
        "*.*",
        "*.AI.MAILBOX.MSG.x",
        "$mq9",
        "$mq9.>",
        "$mq9.*.MAILBOX.MSG.x",
        "$mq9.PUSH.>",
        "$mq9.PUSH.abc.>",
        "$mq9.AI.>",
        "$mq9.AI.MSG.SEND.x",
        "$mq9.AI.MAILBOX.*",
        "$mq9.AI.MAILBOX.MSG.>",
        "$mq9.AI.MAILBOX.MSG.*",
        "$mq9.AI.MAILBOX.MSG.*.urgent",
        "$mq9.AI.MAILBOX.MSG.a.*.urgent",
        "$mq9.AI.MAILBOX.MSG.a.*.*",
        "$mq9.AI.MAILBOX.MSG.a.>",
        "$mq9.AI.MAILBOX.MSG.",
        "$mq9.AI.INBOX.*.urgent",
        "$mq9.AI.BROADCAST.#.x",
        "$mq9.AI.BROADCAST.a..b",
        "$mq9.AI.BROADCAST.a\0b",
        "$mq9.AI.BROADCAST." + "a" * 600,
        "mq9ctl.push.x",
        "mq9ctl.*",
        "_INBOX.>",
        "_INBOX.*",
        "_INBOX.*.*",
    ],
)
def test_wildcards_over_others_are_refused_as_by_the_server(subject: str) -> None:
    assert classify(subject) == RefusedSubject(f'Permissions Violation for Subscription to "{subject}"')


@pytest.mark.rule("N10")
def test_no_pattern_reads_what_instances_tell_each_other() -> None:
    sources = [path for name in ("mediator", "pickup", "registry", "pipeline") for path in (ROOT / name).rglob("*.py")]
    texts = [path.read_text() for path in sources]
    topic = r'announcer\("(\w+)"\)|^(?:\w+_)?TOPIC: Final = "(\w+)"'
    topics = {found for text in texts for found in re.findall(topic, text, re.M)}
    named = {"".join(found) for found in topics} | {"wake", "cast", "gateway"}
    assert {"access", "asked", "found", "live", "seen", "sessions", "tenants"} <= named
    for topic in named:
        for pattern in (f"*.{topic}", f"*.{topic}.>", f"mq9ctl.{topic}"):
            assert isinstance(classify(pattern), RefusedSubject), pattern


@pytest.mark.rule("N11")
def test_a_subscription_may_name_its_mailbox_as_cards_do() -> None:
    for url in ("mq9://broker/", "mq9://a.b:4222/"):
        assert classify(f"{A}MAILBOX.MSG.{url}a.b.*") == MailboxSubject(Edition.LATER, "a.b", "*")
        assert classify(f"{A}INBOX.{url}a.b.urgent") == MailboxSubject(Edition.FIRST, "a.b", "urgent")


@pytest.mark.rule("N10")
def test_what_cannot_be_a_mailbox_is_one_that_does_not_exist() -> None:
    for name, address in (("MAILBOX.MSG.payment-agent.*", "payment-agent"), ("INBOX.A.urgent", "A")):
        text = f'Permissions Violation for Subscription to "{A}{name}": mailbox {address} does not exist'
        assert classify(A + name) == RefusedSubject(text)


@pytest.mark.parametrize(
    "subject", ["foo", "*", "foo.>", "*.orders", "_INBOX.abc", "_INBOX.abc.*", "_INBOX.abc.>", "$JS.API.>", "mq9.x", ""]
)
def test_all_else_is_plain(subject: str) -> None:
    assert classify(subject) == PlainSubject()


@given(st.text(max_size=40) | st.text("$mq9.AIBOXLGPSTH*>#ab", max_size=40).map(lambda text: A + text))
def test_any_text_is_read(subject: str) -> None:
    assert isinstance(
        classify(subject), PlainSubject | MailboxSubject | BroadcastSubject | PublicListSubject | RefusedSubject
    )


@pytest.mark.parametrize("subject", ["$mq9.>", "$mq9.AI.MSG.SEND.x", "*.>", ">", "_INBOX.>", "_INBOX.a.b", "*.AI.x"])
def test_a_stream_may_not_take_in_requests_or_replies(subject: str) -> None:
    assert not stream_allowed(subject)


@pytest.mark.parametrize("subject", ["orders.>", "orders.*", "*", "mq9.x", "x._INBOX.y"])
def test_a_stream_may_take_in_all_else(subject: str) -> None:
    assert stream_allowed(subject)


TOKENS = st.sampled_from(["a", "b", "*"])


@given(st.lists(TOKENS, min_size=1, max_size=4), st.lists(TOKENS, min_size=1, max_size=4), st.booleans(), st.booleans())
def test_two_patterns_overlap_if_some_subject_matches_both(
    one: list[str], other: list[str], more: bool, others_more: bool
) -> None:
    ours, theirs = [*one, *[">"][: int(more)]], [*other, *[">"][: int(others_more)]]
    subjects = [[]]
    found = False
    for _ in range(6):
        subjects = [[*subject, token] for subject in subjects for token in "ab"]
        found = found or any(matches(subject, ours) and matches(subject, theirs) for subject in subjects)
    assert overlaps(".".join(ours), ".".join(theirs)) == found


def matches(subject: list[str], pattern: list[str]) -> bool:
    """Whether a subject matches, told apart from the service."""
    if pattern[-1] == ">":
        pattern, subject = pattern[:-1], subject[: len(pattern) - 1] if len(subject) >= len(pattern) else []
    return len(subject) == len(pattern) and all(want in ("*", got) for want, got in zip(pattern, subject, strict=True))
