"""Checks of message pickup 1.0 (RFC 0212), which has batches and no acknowledgement."""

import contextlib

import orjson

from conformance.checks import Level, expect
from conformance.didcomm.session import SUITE, V1, DidcommSession, Mailbox, eventually, written
from pickup.client import DeliveredMessage, ProblemError
from pickup.client.plaintext import Json, Plaintext

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN


async def _mailbox(session: DidcommSession, *texts: str) -> Mailbox:
    mailbox = await session.mailbox(V1, pickup="1.0")
    for text in texts:
        await mailbox.send(text)
    # Not every mediator with batches has a status.
    with contextlib.suppress(ProblemError):
        await eventually(mailbox, len(texts))
    return mailbox


def _batch(answer: Plaintext | None) -> list[DeliveredMessage]:
    """Return what is in a batch, by whichever name the mediator writes its list of attachments and their ids."""
    raw: Json = {} if answer is None else dict(answer.raw)
    items = raw.get("messages~attach", raw.get("~attach", raw.get("messages")))
    expect(isinstance(items, list), f"the answer has no list of messages: {list(raw)}")
    return [
        DeliveredMessage(str(item.get("@id") or item.get("id")), orjson.dumps(item["message"])) for item in items or []
    ]


async def _texts(mailbox: Mailbox, answer: Plaintext | None) -> list[str]:
    return await mailbox.texts(_batch(answer))


@SUITE.check(
    "didcomm.pickup1.status-counts",
    MUST,
    "RFC 0212 §Status",
    "message_count is the only required attribute.",
)
async def status_counts(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "first", "second")
    status = await mailbox.holder.status()
    expect(status.count == 2, f"of 2 messages {status.count} are counted")


@SUITE.check(
    "didcomm.pickup1.batch",
    MUST,
    "RFC 0212 §Batch Pickup",
    "A request to have multiple waiting messages sent inside a batch message.",
)
async def batch(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "first", "second", "third")
    answer = await session.request(
        mailbox.holder, written(mailbox.holder, "messagepickup/1.0/batch-pickup", {"batch_size": 2})
    )
    expect(answer is not None and answer.name == "batch", f"answered with {answer and answer.type}")
    texts = await _texts(mailbox, answer)
    expect(texts == ["first", "second"], f"with batch_size 2, {texts} came")
    ids = [mail.id for mail in _batch(answer)]
    expect(len(set(ids)) == 2, f"the ids are {ids}")


@SUITE.check(
    "didcomm.pickup1.empty-batch",
    SHOULD,
    "RFC 0212 §Batch",
    "A message that contains multiple waiting messages.",
)
async def empty_batch(session: DidcommSession) -> None:
    mailbox = await _mailbox(session)
    answer = await session.request(
        mailbox.holder, written(mailbox.holder, "messagepickup/1.0/batch-pickup", {"batch_size": 10})
    )
    expect(answer is not None and answer.name == "batch", f"with an empty queue, answered with {answer}")
    expect(_batch(answer) == [], "an empty queue brings messages")


@SUITE.check(
    "didcomm.pickup1.list",
    SHOULD,
    "RFC 0212 §Message Query With Message Id List",
    "A request to read single or multiple messages with a message id array.",
)
async def list_pickup(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "first", "second")
    came = _batch(
        await session.request(
            mailbox.holder, written(mailbox.holder, "messagepickup/1.0/batch-pickup", {"batch_size": 1})
        )
    )
    request = written(mailbox.holder, "messagepickup/1.0/list-pickup", {"message_ids": [came[0].id]})
    answer = await session.request(mailbox.holder, request)
    expect(answer is not None and answer.name == "list-response", f"answered with {answer and answer.type}")


@SUITE.check(
    "didcomm.pickup1.noop",
    MUST,
    "RFC 0212 §Noop",
    "This message has no expected behavior when received.",
)
async def noop(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "note")
    answer = await session.request(mailbox.holder, written(mailbox.holder, "messagepickup/1.0/noop", route="none"))
    expect(answer is None or answer.name != "problem-report", "noop is answered with a problem report")


@SUITE.check(
    "didcomm.pickup1.next-request-confirms",
    OWN,
    "docs/protocol.md D7",
    "After a batch over HTTP the next pickup request of the holder removes it.",
)
async def next_request_confirms(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "first", "second", "third")
    for expected in (["first", "second"], ["third"], []):
        texts = await mailbox.texts(await mailbox.holder.fetch(limit=2))
        expect(texts == expected, f"the batch has {texts} instead of {expected}")


@SUITE.check(
    "didcomm.pickup1.repeated-request",
    OWN,
    "docs/protocol.md Pickup",
    "A request that repeats the one that the batch answered gets the same batch.",
)
async def repeated_request(session: DidcommSession) -> None:
    mailbox = await _mailbox(session, "first", "second")
    request = written(mailbox.holder, "messagepickup/1.0/batch-pickup", {"batch_size": 1})
    once = await _texts(mailbox, await session.request(mailbox.holder, request))
    again = await _texts(mailbox, await session.request(mailbox.holder, request))
    expect(once == again == ["first"], f"the request brought {once}, and when it was sent once more {again}")
