"""mediator.client.sync against a running service: it does what the client with an event loop does."""

import asyncio
import inspect
import os
import threading
from collections.abc import Iterator

import pytest

from mediator import client as aio
from mediator.client import sync
from mediator.errors import BadRequestError, NoSuchMailboxError, UnreachableError
from tests.harness.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service("service", tmp_path_factory.mktemp("service"))
    running.start()
    try:
        asyncio.run(running.ready())
        yield running
    finally:
        running.discard()


@pytest.fixture
def box(service: Service) -> Iterator[sync.Mailbox]:
    with sync.Mailbox.open(service.nats_url, create=True) as opened:
        yield opened


@pytest.mark.parametrize("name", ["Client", "Mailbox", "Delivery", "Registration"])
def test_both_clients_have_the_same_methods(name: str) -> None:
    def methods(cls: type) -> dict[str, list[inspect.Parameter]]:
        found = {key: value for key, value in inspect.getmembers(cls, callable) if not key.startswith("_")}
        return {
            key: [parameter.replace(annotation=None) for parameter in inspect.signature(value).parameters.values()]
            for key, value in found.items()
        }

    without_loop, with_loop = methods(getattr(sync, name)), methods(getattr(aio, name))
    inside = {"track", "with_mailbox", "read", "of", "report_every"}
    assert {key: with_loop[key] for key in with_loop.keys() - inside} == {
        key: without_loop[key] for key in without_loop.keys() - inside
    }


def test_a_block_acknowledges_or_gives_back(box: sync.Mailbox) -> None:
    box.send_many(["good", "bad"])
    done = []

    def work() -> None:
        for message in box.consume(group="g", lease=60):
            with message:
                done.append((message.text, message.deliveries))
                if message.text == "bad":
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    for message in box.consume(group="g", lease=60):
        with message:
            done.append((message.text, message.deliveries))
        break
    assert done == [("good", 1), ("bad", 1), ("bad", 2)]
    assert box.fetch(group="g", lease=60, wait=0) == []


def test_a_lease_is_extended_while_its_block_blocks(service: Service, box: sync.Mailbox) -> None:
    box.send("long work")
    with sync.Client(service.nats_url) as other:
        for message in box.consume(group="g", lease=2):
            with message:
                assert other.mailbox(box.address).fetch(group="g", lease=2, wait=3) == []
            break
    assert box.fetch(group="g", lease=60, wait=0) == []


def test_an_early_end_gives_back_what_was_fetched_ahead(box: sync.Mailbox) -> None:
    box.send_many(["a", "b", "c"])
    messages = box.consume(group="g", lease=3600, prefetch=3)
    for message in messages:
        with message:
            break
    messages.close()  # type: ignore[attr-defined]
    assert [message.text for message in box.fetch(group="g", lease=60)] == ["b", "c"]


def test_workers_run_in_threads_of_their_own(service: Service, box: sync.Mailbox) -> None:
    # More than an event loop has for itself.
    threads = min(32, (os.cpu_count() or 1) + 4) + 1
    box.send_many(str(number) for number in range(2 * threads))
    together = threading.Barrier(threads, timeout=40)
    done: list[str] = []
    all_done = threading.Event()

    def handle(message: sync.Delivery) -> None:
        together.wait()
        done.append(message.text)
        if len(done) == 2 * threads:
            all_done.set()

    def work() -> None:
        with pytest.raises(BadRequestError, match="client: it was closed meanwhile"):
            client.mailbox(box.address).work(handle, group="g", concurrency=threads)

    with sync.Client(service.nats_url) as client:
        worker = threading.Thread(target=work)
        worker.start()
        assert all_done.wait(40)
    worker.join(40)
    assert not worker.is_alive()
    assert sorted(done, key=int) == [str(number) for number in range(2 * threads)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mediator worker")]


def test_mail_questions_and_agents(box: sync.Mailbox) -> None:
    assert box.send("question", reply_to=box.address, priority="critical") == 0
    (question,) = box.query()
    assert box.reply(question, {"an": "answer"}) == 1
    assert [message.text for message in box.fetch(group="g")] == ["question", '{"an": "answer"}']
    assert box.ack(1, group="g") == 2
    with box.registered({"name": "Parrot", "description": "repeats whatever it hears"}) as registration:
        registration.report(load=1)
        assert [agent.name for agent in box.discover("repeats", by_words=True)] == ["Parrot"]
    assert box.discover() == []
    box.delete(0)
    with pytest.raises(NoSuchMailboxError):
        box.mailbox("nobody").send("x")


def test_a_client_is_used_inside_its_block(service: Service) -> None:
    client = sync.Client(service.nats_url)
    with pytest.raises(BadRequestError, match="client: it is closed, or was never opened"):
        client.mailbox("a").send("x")
    with pytest.raises(UnreachableError), sync.Client("nats://127.0.0.1:1", patience=0):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "mediator client"]
