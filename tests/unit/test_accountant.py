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
