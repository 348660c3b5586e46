"""The first edition as its paper shows it: INBOX, QUERY with a token, and three words for the lanes (E1–E7, M1–M3)."""

import json
import time
from typing import Any

import pytest

from tests.acceptance.editions.stock import PREFIX, Stock, bodies, id_of, taken, word_of
from tests.acceptance.service import until


def letter(sender: str, kind: str, **more: Any) -> dict[str, Any]:
    """A message with the fields that the paper suggests."""
    return {"from": sender, "type": kind, "payload": {"steps": [1, 2]}, "ts": int(time.time() * 1000), **more}


@pytest.mark.rule("M3", "E4")
async def test_a_mailbox_is_asked_for_and_has_an_inbox_and_a_token(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", b'{"type": "standard", "ttl": 1800}')
    assert made["inbox"] == f"{PREFIX}INBOX.{made['mail_id']}"
    assert len(made["mail_id"]) >= 26
    assert made["token"]
    plain = await stock.ask("MAILBOX.CREATE", b"{}")
    assert plain["mail_id"] != made["mail_id"]
    other = await stock.ask("MAILBOX.CREATE", b'{"ttl": 1800}')
    assert other["token"] not in (made["token"], plain["token"])
    assert await stock.refused("MAILBOX.CREATE", b'{"type": "newest"}')


@pytest.mark.rule("E4")
async def test_a_mailbox_of_type_latest_holds_the_state_of_now(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", {"type": "latest", "ttl": 1800})
    inbox = f"INBOX.{made['mail_id']}"
    for load in (10, 80, 35):
        await stock.ask(f"{inbox}.normal", {"load": load})
    unread = await stock.ask(f"MAILBOX.QUERY.{made['mail_id']}", {"token": made["token"]})
    assert unread["messages"] == [{"load": 35}]
    late = await stock.subscribe(f"{inbox}.*")
    assert [json.loads(body) for body in await bodies(late, 1)] == [{"load": 35}]
    await stock.publish(f"{inbox}.urgent", {"load": 99})
    assert [json.loads(body) for body in await bodies(late, 1)] == [{"load": 99}]


@pytest.mark.rule("E4", "E6")
async def test_query_shows_what_was_missed_to_whoever_has_the_token(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", {"type": "standard", "ttl": 1800})
    box, token = made["mail_id"], {"token": made["token"]}
    sent = [letter("m7", "progress", done=n) for n in range(3)]
    for one in sent:
        await stock.ask(f"INBOX.{box}.normal", one)
    alarm = letter("m8", "stop")
    await stock.ask(f"INBOX.{box}.urgent", alarm)
    assert await stock.ask(f"MAILBOX.QUERY.{box}", token) == {
        "error": "", "mail_id": box, "unread": 4, "messages": [alarm, *sent]
    }  # fmt: skip
    assert "token" in await stock.refused(f"MAILBOX.QUERY.{box}", {"token": "guessed"})
    online = await stock.subscribe(f"INBOX.{box}.*")
    assert [json.loads(body) for body in await bodies(online, 4)] == [alarm, *sent]

    async def nothing_is_left() -> bool:
        return (await stock.ask(f"MAILBOX.QUERY.{box}", token))["unread"] == 0

    await until(nothing_is_left, 10, "what was pushed and read is not unread")


@pytest.mark.rule("E1", "E6")
async def test_words_of_an_inbox_are_read_together_or_one_alone(stock: Stock):
    box = await stock.create(type="standard", ttl=1800)
    everything = await stock.subscribe(f"INBOX.{box}.*")
    alarms = await stock.subscribe(f"INBOX.{box}.urgent")
    chatter = await stock.subscribe(f"INBOX.{box}.notify")
    for word in ("normal", "urgent", "notify"):
        await stock.ask(f"INBOX.{box}.{word}", letter("m2", word, deadline=1_999_999_999_000))
    seen = await taken(everything, 3)
    assert [message.subject for message in seen] == [
        f"{PREFIX}INBOX.{box}.{word}" for word in ("normal", "urgent", "notify")
    ]
    assert [json.loads(message.data)["type"] for message in seen] == ["normal", "urgent", "notify"]
    assert [word_of(message) for message in await taken(alarms, 1)] == ["urgent"]
    assert [word_of(message) for message in await taken(chatter, 1)] == ["notify"]


@pytest.mark.rule("E1", "E6")
async def test_mail_waits_and_comes_by_urgency_when_its_reader_is_back(stock: Stock):
    box = await stock.create(type="standard", ttl=1800)
    for number, word in enumerate(("notify", "normal", "urgent", "normal", "urgent")):
        await stock.ask(f"INBOX.{box}.{word}", b"%d" % number)
    back = await stock.subscribe(f"INBOX.{box}.*")
    assert await bodies(back, 5) == [b"2", b"4", b"1", b"3", b"0"]
    await stock.publish(f"INBOX.{box}.normal", b"new")
    assert await bodies(back, 1) == [b"new"]


@pytest.mark.rule("E6")
async def test_the_example_of_a_program_that_receives_sends_and_looks(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", b'{"type":"standard","ttl":1800}')
    got: list[bytes] = []

    async def received(message: Any) -> None:
        got.append(message.data)

    await stock.client.subscribe(f"{made['inbox']}.*", cb=received)
    line = b'{"from":"m9","type":"task_result","payload":"ok","ts":1700000000000}'
    await stock.client.publish(f"{made['inbox']}.normal", line)
    await until(lambda: got == [line], 10, "the message arrives as it was sent")
    answer = await stock.client.request(
        f"{PREFIX}MAILBOX.QUERY.{made['mail_id']}", json.dumps({"token": made["token"]}).encode(), timeout=3
    )
    assert json.loads(answer.data)["unread"] in (0, 1)


@pytest.mark.rule("N8")
async def test_an_answer_goes_to_the_subject_that_the_message_names(stock: Stock):
    asker, worker = [await stock.create(type="standard", ttl=1800) for _ in range(2)]
    tasks, answers = await stock.subscribe(f"INBOX.{worker}.*"), await stock.subscribe(f"INBOX.{asker}.*")
    question = letter(asker, "question", correlation_id="c-1", reply_to=f"{PREFIX}INBOX.{asker}.normal")
    await stock.publish(f"INBOX.{worker}.normal", question)
    [task] = await taken(tasks, 1)
    asked = json.loads(task.data)
    assert asked == question
    await stock.client.publish(asked["reply_to"], json.dumps(letter(worker, "done", correlation_id="c-1")).encode())
    [answer] = await taken(answers, 1)
    assert (json.loads(answer.data)["type"], json.loads(answer.data)["correlation_id"]) == ("done", "c-1")


@pytest.mark.rule("M1", "E4")
async def test_a_mailbox_ends_with_its_time_and_takes_its_mail_along(stock: Stock):
    made = await stock.ask("MAILBOX.CREATE", {"type": "standard", "ttl": 1})
    question = (f"MAILBOX.QUERY.{made['mail_id']}", {"token": made["token"]})
    await stock.publish(f"INBOX.{made['mail_id']}.normal", b"short")

    async def gone() -> bool:
        return (await stock.request(*question))["error"] == f"mailbox {made['mail_id']} does not exist"

    await until(gone, 10, "the mailbox is gone")
    assert "does not exist" in await stock.refused(f"INBOX.{made['mail_id']}.normal", b"late")


@pytest.mark.rule("E6", "E8")
async def test_what_is_not_ours_stays_nats(stock: Stock):
    """Plain subjects are heard by who listens and kept for nobody; stored ones reach nobody past the store."""
    await stock.client.publish("plain.news", b"unheard")
    news = await stock.client.subscribe("plain.*")
    box = await stock.create(type="standard", ttl=1800)
    mail = await stock.subscribe(f"INBOX.{box}.*")
    await stock.client.publish("plain.news", b"heard")
    await stock.publish(f"INBOX.{box}.urgent", b"no", expire_at="1")
    await stock.publish(f"INBOX.{box}.urgent", b"stored")
    assert await bodies(news, 1) == [b"heard"]
    [message] = await taken(mail, 1)
    assert (message.data, id_of(message)) == (b"stored", 0)
