"""The command bench: a short load test of the running service, from a client."""

import asyncio
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mediator.cli import output
from mediator.cli.client import ClientOptions
from mediator.cli.options import CommandError, CommandGroup

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mediator.client import Client

IN_FLIGHT = (1, 10, 100)
BATCH = 100
LIFETIME = 3600
"""Seconds after which the service removes the mailbox of the test."""


app = CommandGroup()


@app.command(epilog="Example: mediator bench --seconds 5 --size 1024")
def bench(
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Duration of each step.")] = 2.0,
    size: Annotated[int, typer.Option(min=0, max=1 << 20, help="Bytes per payload.")] = 256,
    *,
    options: ClientOptions,
) -> None:
    """Run a short load test on the service: durable SENDs at 1, 10 and 100 in flight, then FETCH and ACK.

    It creates a mailbox for the test, empties it again, and lets it expire within an hour.
    """
    options.run(lambda client: _run(client, seconds, size, as_json=options.as_json))


async def _run(client: "Client", seconds: float, size: int, *, as_json: bool) -> None:
    fields = {"ttl": LIFETIME, "retention": "until_ack", "desc": "mediator bench"}
    address = (await client.request("MAILBOX.CREATE", fields))["mail_address"]
    body = {"group_name": "bench", "deliver": "earliest", "config": {"num_msgs": BATCH, "max_wait_ms": 0}}
    # The group starts before the first message.
    await client.request(f"MSG.FETCH.{address}", body)
    results = []
    with output.progress("{task.fields[rate]}") as progress:
        for in_flight in IN_FLIGHT:
            bar = progress.add_task(f"SEND, {in_flight} in flight", total=seconds, rate="")
            results.append(await _send(client, address, in_flight, seconds, os.urandom(size), progress, bar))
        sent = sum(result["messages"] for result in results)
        bar = progress.add_task(f"FETCH {BATCH} + ACK", total=sent, rate="")
        results.append(await _drain(client, address, body, sent, progress, bar))
    if as_json:
        output.print_json({"payload_bytes": size, "steps": results})
        return
    output.print_table(("step", "messages#", "a second#", "p50 ms#", "p99 ms#"), map(_row, results))


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        result["step"],
        str(result["messages"]),
        f"{result['per_second']:.0f}",
        f"{result['p50_ms']:.2f}",
        f"{result['p99_ms']:.2f}",
    )


async def _send(
    client: "Client", address: str, in_flight: int, seconds: float, payload: bytes, progress: "Progress", bar: "TaskID"
) -> dict[str, Any]:
    spans: list[float] = []
    started = time.perf_counter()
    end = started + seconds

    async def sender() -> None:
        begun = started
        # At least one is sent, even if this task starts late.
        while not spans or begun < end:
            begun = time.perf_counter()
            await client.request(f"MSG.SEND.{address}", payload)
            spans.append(time.perf_counter() - begun)

    async def show_progress() -> None:
        while True:
            passed = time.perf_counter() - started
            progress.update(bar, completed=min(passed, seconds), rate=f"{len(spans) / max(passed, 1e-6):.0f}/s")
            await asyncio.sleep(0.1)

    shown = asyncio.create_task(show_progress())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(sender())
    except* CommandError as errors:
        raise errors.exceptions[0] from None
    finally:
        shown.cancel()
    took = time.perf_counter() - started
    progress.update(bar, completed=seconds, rate=f"{len(spans) / took:.0f}/s")
    return _result(f"SEND, {in_flight} in flight", len(spans), took, spans)


async def _drain(
    client: "Client", address: str, body: dict[str, Any], sent: int, progress: "Progress", bar: "TaskID"
) -> dict[str, Any]:
    spans: list[float] = []
    count = 0
    started = time.perf_counter()
    while count < sent:
        begun = time.perf_counter()
        messages = (await client.request(f"MSG.FETCH.{address}", body))["messages"]
        if not messages:
            raise CommandError(f"{sent} messages were sent, only {count} came back")
        ids = [message["msg_id"] for message in messages]
        await client.request(f"MSG.ACK.{address}", {"group_name": "bench", "msg_ids": ids})
        now = time.perf_counter()
        spans.append(now - begun)
        count += len(messages)
        progress.update(bar, completed=count, rate=f"{count / (now - started):.0f}/s")
    return _result(f"FETCH {BATCH} + ACK", count, time.perf_counter() - started, spans)


def _result(step: str, messages: int, took: float, spans: list[float]) -> dict[str, Any]:
    ordered = sorted(spans) or [0.0]

    def percentile(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 3)

    return {
        "step": step,
        "messages": messages,
        "per_second": round(messages / took, 1),
        "p50_ms": percentile(0.5),
        "p99_ms": percentile(0.99),
    }
