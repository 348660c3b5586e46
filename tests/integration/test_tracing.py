"""Traces, as an OTLP collector gets them: one from the sender over door and commit to the consumer."""

import asyncio
import json
import secrets
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nats.aio.msg import Msg
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mediator.errors import SetupError
from mediator.mailboxes.address import redact
from mediator.operate.control import send_command
from mediator.settings.sections import OtelSettings
from mediator.tracing import opening
from mediator.tracing.opening import Instruments, open_tracing
from mediator.tracing.spans import Tracing
from pickup.client import Holder, Sender, Wallet
from tests.harness.app import PATIENCE, PREFIX, App, app
from tests.harness.collector import Span, collector
from tests.harness.live import Live


class Caller:
    """A program that traces what it does: its trace, its span, and the header that says so."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.trace, self.span = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace}-{self.span}-0{int(sampled)}", "tracestate": "shop=1"}


async def ask(service: App, verb: str, body: bytes, caller: Caller) -> dict[str, object]:
    client = await service.nats()
    reply = await client.request(PREFIX + verb, body, timeout=PATIENCE, headers=caller.headers)
    found: dict[str, object] = json.loads(reply.data)
    return found


def only(spans: dict[str, list[Span]], name: str) -> Span:
    (span,) = spans[name]
    return span


async def test_a_trace_leads_from_the_sender_to_each_consumer(tmp_path: Path) -> None:
    sender, reader, refused, unsampled = Caller(), Caller(), Caller(), Caller(sampled=False)
    async with collector() as traces:
        async with app(tmp_path, otel={"endpoint": traces.url + "/"}) as service:
            await service.done("MAILBOX.CREATE", {"name": "orders"})
            pushed: asyncio.Queue[Msg] = asyncio.Queue()
            client = await service.nats()
            await client.subscribe(PREFIX + "MAILBOX.MSG.orders.*", cb=pushed.put)
            await ask(service, "MSG.SEND.orders", b"hello", sender)
            push = await asyncio.wait_for(pushed.get(), PATIENCE)
            fetched = await ask(service, "MSG.FETCH.orders", b'{"deliver":"earliest","group_name":"g"}', reader)
            assert (await ask(service, "MSG.SEND.missing", b"", refused))["error"]
            await ask(service, "MSG.SEND.orders", b"quiet", unsampled)
        # What its sender wrote is handed back as any other header is.
        (item,) = fetched["messages"]  # type: ignore[misc]
        assert push.headers is not None
        assert {name: push.headers[name] for name in sender.headers} == sender.headers == item["headers"]

        spans = traces.of(sender.trace)
        send, queue, commit = only(spans, "SEND"), only(spans, "queue"), only(spans, "commit")
        assert (send.parent, queue.parent, commit.parent) == (sender.span, send.id, send.id)
        assert send.nanoseconds >= commit.nanoseconds > 0
        assert {span.attributes["mediator.way"]: span.parent for span in spans["deliver"]} == {
            "push": sender.span,
            "fetch": sender.span,
        }
        fetch = only(traces.of(reader.trace), "FETCH")
        assert (fetch.parent, fetch.links) == (reader.span, [sender.span])
        assert [fetch.id] in [span.links for span in spans["deliver"]]
        assert send.attributes["messaging.system"] == "mq9"
        assert send.attributes["messaging.operation.name"] == "send"
        # Addresses are secrets (A7).
        shown = send.attributes["messaging.destination.name"]
        assert shown == redact("orders")
        assert all(span.attributes["messaging.destination.name"] == shown for span in [*spans["deliver"], fetch])

        failed = only(traces.of(refused.trace), "SEND")
        assert (failed.failed, failed.attributes["error.type"]) == (True, "mailbox_not_found")
        assert traces.of(unsampled.trace) == {}
        assert traces.resource["service.name"] == "mediator"
        assert traces.resource["service.instance.id"]


async def test_requests_of_one_commit_are_linked(tmp_path: Path) -> None:
    caller = Caller()
    async with collector() as traces:
        async with app(tmp_path, otel={"endpoint": traces.url, "sample_ratio": 0}) as service:
            await service.done("MAILBOX.CREATE", {"name": "orders"})
            await asyncio.gather(*(ask(service, "MSG.SEND.orders", b"", caller) for _ in range(20)))
        spans = traces.of(caller.trace)
        # With a ratio of 0 no trace begins here.
        assert len(traces.spans) == sum(map(len, spans.values()))
        sends, commits = {span.id for span in spans["SEND"]}, {span.id: span for span in spans["commit"]}
        assert len(sends) == len(spans["queue"]) == len(commits) == 20
        first = [span for span in commits.values() if set(span.links) & sends]
        assert first
        for span in first:
            beside = [other for other in commits.values() if span.id in other.links]
            assert {other.parent for other in beside} == set(span.links)
            assert int(span.attributes["mediator.batch.size"]) > len(beside)


async def test_a_trace_leads_from_http_to_the_wallet(tmp_path: Path) -> None:
    caller, later = Caller(), Caller()
    async with (
        collector() as traces,
        app(tmp_path, otel={"endpoint": traces.url}, didcomm={"enabled": True}) as service,
    ):
        url = (await send_command(tmp_path, "invite"))["v1_url"]
        async with await Holder.connect(url, wallet=Wallet()) as holder, Sender() as sender:
            grant, key = await holder.mediate(), await holder.add_key()
            message = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": "1", "content": "hi"}
            envelope = await sender.pack_v1(key, grant.routing, message)
            type = "application/didcomm-envelope-enc"
            answer = await service.call("POST", "/didcomm", envelope, Content_Type=type, **caller.headers)
            assert answer.status == 202
            assert len(await holder.fetch()) == 1
            probe = await service.call("GET", "/livez", **caller.headers)
            bad = await service.call("POST", "/didcomm", b"{}", Content_Type=type, **caller.headers)
            assert (probe.status, bad.status) == (200, 400)
            missing = await service.call("GET", "/agents/none", **caller.headers)
            assert missing.status == 404
            async with Live.of(holder) as live:
                envelope = await sender.pack_v1(key, grant.routing, message | {"@id": "2"})
                answer = await service.call("POST", "/didcomm", envelope, Content_Type=type, **later.headers)
                assert answer.status == 202
                await live.mail()
    # Whoever asks over HTTP may be anybody: its trace is linked, and not continued.
    assert traces.of(caller.trace) == traces.of(later.trace) == {}
    posts = [span for span in traces.spans if span.name == "POST /didcomm" and span.links == [caller.span]]
    accepted, rejected = sorted(posts, key=lambda span: span.attributes["http.response.status_code"])
    assert accepted.parent == rejected.parent == ""
    spans = traces.of(accepted.trace)
    assert accepted.attributes["didcomm.message.type"].endswith("routing/1.0/forward")
    assert (rejected.failed, rejected.attributes["http.response.status_code"]) == (False, "400")
    assert rejected.attributes["error.type"] == "bad_envelope"
    assert only(spans, "commit").parent == accepted.id
    assert only(spans, "deliver").parent == accepted.id
    [found] = [span for span in traces.spans if span.name == "GET /agents/{mailbox}"]
    assert (found.attributes["http.response.status_code"], found.links) == ("404", [caller.span])
    # The wallet's own requests are a trace each, and the one that got the message is linked with it.
    assert any(accepted.id in span.links for span in traces.spans)
    [post] = [span for span in traces.spans if span.name == "POST /didcomm" and span.links == [later.span]]
    pushed = traces.of(post.trace)
    assert only(pushed, "deliver").parent == only(pushed, "POST /didcomm").id
    frames = [span.attributes["didcomm.message.type"] for span in traces.spans if span.name == "WebSocket /didcomm"]
    assert any(type.endswith("live-delivery-change") for type in frames)


async def test_a_collector_that_is_away_concerns_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "STOP_SECONDS", 0.1)
    async with collector() as traces:
        away = traces.url
    async with app(tmp_path, otel={"endpoint": away}) as service:
        await service.done("MAILBOX.CREATE", {"name": "orders"})
        await service.done("MSG.SEND.orders", b"hello")
    assert traces.spans == []


async def test_strangers_decide_neither_sampling_nor_state(tmp_path: Path) -> None:
    caller = Caller()
    async with (
        collector() as traces,
        app(tmp_path, otel={"endpoint": traces.url, "sample_ratio": 0}, didcomm={"enabled": True}) as service,
    ):
        url = (await send_command(tmp_path, "invite"))["v1_url"]
        async with await Holder.connect(url, wallet=Wallet()) as holder, Sender() as sender:
            grant, key = await holder.mediate(), await holder.add_key()
            message = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": "1", "content": "hi"}
            envelope = await sender.pack_v1(key, grant.routing, message)
            type = "application/didcomm-envelope-enc"
            answer = await service.call("POST", "/didcomm", envelope, Content_Type=type, **caller.headers)
            assert answer.status == 202
            assert (await service.call("GET", "/agents/none", **caller.headers)).status == 404
            assert len(await holder.fetch()) == 1
        database = sqlite3.connect(tmp_path / "mediator.db")
        assert database.execute("SELECT count(*) FROM message WHERE extra LIKE '%shop%'").fetchone() == (0,)
        database.close()
    assert traces.spans == []


def test_anonymous_clients_of_nats_decide_no_sampling() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    caller = Caller()
    message = SimpleNamespace(msg_id=0, size=1, headers=caller.headers)
    for trusts_nats in (False, True):
        tracing = Tracing(provider.get_tracer("test"), 0, trusts_nats=trusts_nats)
        span = tracing.begin("SEND", caller.headers, trusted=tracing.trusts_nats)
        assert (span is not None) == trusts_nats
        tracing.delivered([message], "task", "push")
        assert [one.name for one in exporter.get_finished_spans()] == ["deliver"] * trusts_nats


async def test_only_who_asks_for_traces_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with open_tracing(OtelSettings(), "one", trusts_nats=True) as instruments:
        assert instruments == Instruments()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match=r"otel\.endpoint: tracing needs .*\[otel\]"):
        async with open_tracing(OtelSettings(endpoint="http://127.0.0.1:4318"), "one", trusts_nats=True):
            pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with open_tracing(OtelSettings(), "one", trusts_nats=True) as instruments:
        assert instruments == Instruments()
