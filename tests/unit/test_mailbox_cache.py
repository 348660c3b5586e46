"""Mailboxes that a store remembers, by place, by number and by send-only address (A10)."""

import pytest

from mediator.mailboxes.mailbox import NewMailbox
from mediator.mailboxes.rows import KeptMailbox
from mediator.mailboxes.session import MailboxCache


def added(cache: MailboxCache, no: int, address: str) -> KeptMailbox:
    mailbox = KeptMailbox.made(no, NewMailbox("t", address, 0))
    mailbox.send_only = f"send.{no}"
    cache.add(mailbox)
    cache.found_by_send_only(mailbox)
    return mailbox


@pytest.mark.rule("A10")
def test_a_mailbox_that_goes_is_known_by_no_name() -> None:
    cache = MailboxCache(1)
    first, second = added(cache, 1, "a"), added(cache, 2, "b")
    assert cache.at_send_only("t", "send.1") is cache.at("t", "a") is cache.by_id(1) is first
    assert cache.at_send_only("other", "send.1") is None
    cache.at("t", "b")
    cache.trim()
    assert (cache.at("t", "a"), cache.by_id(1), cache.at_send_only("t", "send.1")) == (None, None, None)
    assert cache.at_send_only("t", "send.2") is second
    cache.forget(second)
    assert (cache.at("t", "b"), cache.by_id(2), cache.at_send_only("t", "send.2")) == (None, None, None)


@pytest.mark.rule("A10")
def test_to_be_found_by_its_send_only_address_is_to_be_used() -> None:
    cache = MailboxCache(2)
    used = added(cache, 1, "a")
    added(cache, 2, "b")
    cache.at_send_only("t", "send.1")
    added(cache, 3, "c")
    cache.trim()
    assert cache.at("t", "a") is used
    assert cache.at("t", "b") is None


@pytest.mark.rule("A3", "A10")
def test_the_next_at_an_address_is_not_found_by_the_former_name() -> None:
    cache = MailboxCache(2)
    added(cache, 1, "a")
    added(cache, 2, "a")
    assert cache.at_send_only("t", "send.1") is None
    assert cache.at_send_only("t", "send.2") is cache.at("t", "a")
