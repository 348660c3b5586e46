"""The accountant of the crash tests complains of what is lost, and only of that."""

import pytest

from tests.harness.accountant import Accountant, Box, Group, Sent
from tests.harness.client import Answer


def answer(at: float, **body: object) -> Answer:
    return Answer({"error": "", **body}, at, at, at, 1)


def sent(books: Accountant, uid: int, box: Box, at: float, msg_id: int, delay: int = 0) -> Sent:
    """Enter a message of the key "plan" and the answer to its SEND."""
    message = Sent(uid, box, b"%08d" % uid, key="plan", delay=delay)
    books.sending(message)
    books.stored(message, answer(at, msg_id=-1 if delay else msg_id))
    return message


@pytest.mark.rule("S2", "A8")
@pytest.mark.parametrize(("delay", "missed"), [(1, 0), (30, 2)], ids=["due", "not-due-yet"])
def test_what_a_delayed_message_may_have_replaced_is_not_missed(delay: int, missed: int):
    books, box = Accountant(lossless=True), Box("a.inbox")
    box.groups["readers"] = Group(box, "readers")
    sent(books, 0, box, 100.0, msg_id=0)
    sent(books, 1, box, 110.0, msg_id=1, delay=delay)
    # The second is due, but nobody knows yet whether it is there; nothing is shown.
    books.audit(box, [], answer(111.5))
    assert len(books.wrong) == missed


@pytest.mark.rule("S2", "A8")
@pytest.mark.parametrize(("key", "lost"), [("plan", 0), (None, 1)], ids=["with-a-key", "without"])
def test_of_a_message_sent_twice_with_a_key_one_is_left(key: str | None, lost: int):
    books, box = Accountant(lossless=False), Box("a.inbox")
    group = box.groups["readers"] = Group(box, "readers")
    twice = Sent(0, box, b"%08d" % 0, key=key)
    books.sending(twice)
    # The first request was slow and came after its repetition, whose answer is the one that is known.
    books.stored(twice, Answer({"error": "", "msg_id": 0}, 101.0, 100.0, 101.0, 2))
    item = {"msg_id": 1, "payload": "MDAwMDAwMDA=", "priority": "normal", "create_time": 102}
    item |= {"key": key} if key else {}
    fetched = answer(103.0, messages=[item])
    books.delivered(group, fetched)
    books.acked(group, [1], [1], answer(104.0))
    books.audit(box, [item], answer(105.0))
    assert not books.has_owed(group, 105.0)
    assert len(books.wrong) == lost
