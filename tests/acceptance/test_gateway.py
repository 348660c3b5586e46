"""The gateway as users run it: inside the service, and as a process of its own that outlives services."""

import asyncio
import base64
import os
import signal
import subprocess
import sys
from pathlib import Path

import nats
import pytest

from tests.harness.service import Service, Services, free_port, listening, spawn
from tests.harness.waiting import until

PATIENCE = 20
BOX = "$mq9.AI.MAILBOX.MSG.orders.*"


def gateway_beside(service: Service, folder: Path, port: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mediator", "gateway", "--data-dir", str(service.data_dir)]
    return spawn([*command, "--listen", f"127.0.0.1:{port}"], folder / "gateway.log", dict(os.environ))


async def ask(client, subject: str, body: bytes = b"") -> bytes:
    """Make a request, again while the service is away."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return (await client.request(f"$mq9.AI.{subject}", body, timeout=2)).data
            except nats.errors.Error:
                await asyncio.sleep(0.1)


@pytest.mark.rule("E6")
async def test_stored_mail_is_pushed_on_the_public_port(services: Services):
    service = await services.running()
    client = await nats.connect(service.nats_url)
    await ask(client, "MAILBOX.CREATE", b'{"name":"orders"}')
    await ask(client, "MSG.SEND.orders", b"before")
    subscription = await client.subscribe(BOX)
    assert (await subscription.next_msg(timeout=PATIENCE)).data == b"before"
    await ask(client, "MSG.SEND.orders", b"after")
    assert (await subscription.next_msg(timeout=PATIENCE)).data == b"after"
    await client.close()
    service.terminate()
    assert await service.ended() == 0
    assert not service.complaints()


@pytest.mark.rule("E6")
async def test_a_separate_gateway_outlives_the_service(services: Services, tmp_path: Path):
    service = services.new()
    service.environment["MEDIATOR_GATEWAY__ENABLED"] = "false"
    await service.serve()
    port = free_port()
    process = gateway_beside(service, tmp_path, port)
    try:
        await until(lambda: listening(port), PATIENCE, "the gateway listens")
        client = await nats.connect(f"nats://127.0.0.1:{port}", reconnect_time_wait=0.1, max_reconnect_attempts=-1)
        await ask(client, "MAILBOX.CREATE", b'{"name":"orders"}')
        subscription = await client.subscribe(BOX)
        await ask(client, "MSG.SEND.orders", b"one")
        assert (await subscription.next_msg(timeout=PATIENCE)).data == b"one"
        await service.restart()
        await ask(client, "MSG.SEND.orders", b"two")
        # A subscription without a queue group begins anew with a new connection.
        while (await subscription.next_msg(timeout=PATIENCE)).data != b"two":
            pass
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.rule("E6")
@pytest.mark.parametrize("apart", [False, True])
async def test_before_an_external_server_it_listens_as_set(
    services: Services, tmp_path: Path, request: pytest.FixtureRequest, apart: bool
):
    url, port = await services.nats_server(), free_port()
    service = services.new(nats_url=url)
    key = {"MEDIATOR_CONTROL_KEY": base64.b64encode(bytes(32)).decode()}
    service.environment |= key if apart else {"MEDIATOR_GATEWAY__LISTEN": f"127.0.0.1:{port}"}
    await service.serve()
    if apart:
        command = [sys.executable, "-m", "mediator", "gateway", "--data-dir", str(tmp_path / "elsewhere")]
        command += ["--listen", f"127.0.0.1:{port}", "--nats-url", url]
        process = spawn(command, tmp_path / "gateway.log", {**os.environ, **key})
        request.addfinalizer(process.kill)
        await until(lambda: listening(port), PATIENCE, "the gateway listens")
    client, sender = await nats.connect(f"nats://127.0.0.1:{port}"), await nats.connect(url)
    await ask(sender, "MAILBOX.CREATE", b'{"name":"orders"}')
    subscription = await client.subscribe(BOX, queue="workers")
    await ask(sender, "MSG.SEND.orders", b"mail")
    message = await subscription.next_msg(timeout=PATIENCE)
    assert (message.subject, message.data) == (BOX.replace("*", "normal"), b"mail")
    await client.close()
    await sender.close()


async def test_a_gateway_without_a_service_says_so(tmp_path: Path):
    command = [sys.executable, "-m", "mediator", "gateway", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no service runs on" in done.stderr
    elsewhere = [*command, "--nats-url", "nats://127.0.0.1:1"]
    done = await asyncio.to_thread(subprocess.run, elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "control_key: expected the key that the services have set as well" in done.stderr
    done = await asyncio.to_thread(subprocess.run, command[:-2], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "gateway.listen" in done.stderr
