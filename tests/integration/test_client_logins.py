"""How mediator.client proves who it is, and how it knows the server."""

import asyncio
import gc
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mediator.client import Client, Mailbox, connection
from mediator.errors import LoginRefusedError, NoSuchMailboxError, SetupError, UnreachableError
from mediator.tls_client import TlsClient
from tests.harness.certificates import Certificate, issue
from tests.harness.nkeys import Key
from tests.harness.service import Service
from tests.harness.waiting import until
from tests.integration.test_cli import external, serving

__all__ = ["external"]

SETTINGS = """
[gateway]
tls_cert = "{folder}/cert.pem"
tls_key = "{folder}/key.pem"
[registry]
enabled = false
[tenants.acme]
users = [{{ name = "ann", password = "right" }}, {{ name = "bea", nkey = "{nkey}" }}]
[tenants.beta]
users = [{{ name = "bob", password = "other" }}]
"""
BEA = Key("user")
GREETING = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1000}\r\n'


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return issue(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of two tenants, whose clients log in and encrypt."""
    folder = certificate.cert.parent
    (folder / "m.toml").write_text(SETTINGS.format(folder=folder, nkey=BEA.public))
    (folder / "bea.nk").write_text(BEA.seed + "\n")
    yield from serving(folder, config=folder / "m.toml")


@pytest.fixture
def url(service: Service) -> str:
    return service.nats_url.replace("nats:", "tls:")


async def test_users_and_nkeys_reach_their_tenant(
    url: str, certificate: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    tls = certificate.authority
    async with Mailbox.open(url, user="ann", password="right", tls=tls) as box:
        await box.send("mail")
        async with Mailbox.open(url, box.address, nkey=tls.parent / "bea.nk", tls=str(tls)) as same:
            assert [message.text for message in await same.query()] == ["mail"]
        inside = url.replace("tls://", "nats://bob:other@")
        context = ssl.create_default_context(cafile=tls)
        async with Mailbox.open(inside, box.address, tls=context) as other:
            with pytest.raises(NoSuchMailboxError):
                await other.query()
    # asyncio warns when a stream is closed that does not know of its TLS.
    assert "eof_received" not in caplog.text


@pytest.mark.parametrize(
    ("login", "said"),
    [
        ({"user": "ann", "password": "wrong"}, "user or password is wrong"),
        ({"token": "wrong"}, "the token is wrong"),
        ({}, "it asks for a login"),
    ],
)
async def test_a_refused_login_is_not_tried_again(url: str, certificate: Certificate, login: Any, said: str) -> None:
    with pytest.raises(LoginRefusedError, match=f"cannot connect to {url}: {said}"):
        await Client(url, tls=certificate.authority, **login).__aenter__()


async def test_an_untrusted_certificate_is_refused_at_once(url: str) -> None:
    with pytest.raises(UnreachableError, match="its certificate is not trusted"):
        await Client(url, user="ann", password="right").__aenter__()


async def test_a_handshake_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 0.2)
    writers: list[asyncio.StreamWriter] = []

    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","tls_required":true,"max_payload":1000}\r\n')

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(20):
            for scheme in ("nats", "tls"):
                with pytest.raises(UnreachableError, match="no NATS server answers there"):
                    async with Mailbox.open(f"{scheme}://127.0.0.1:{port}", patience=0.5):
                        pass
    finally:
        for writer in writers:
            writer.close()
        server.close()


async def test_a_server_that_does_not_greet_is_left_closed(recwarn: pytest.WarningsRecorder) -> None:
    # What tests before it left is not its own.
    gc.collect()
    recwarn.clear()
    writers: list[asyncio.StreamWriter] = []

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if len(writers) == 2:
            writer.close()
        else:
            writer.write(b"220 mail.example.com ESMTP\r\n" if len(writers) > 2 else GREETING + b"PONG\r\n")

    server, client = await connected(talk, silent)
    writers[0].close()
    await until(lambda: len(writers) > 4)
    await client.close()
    for writer in writers:
        writer.close()
    server.close()
    gc.collect()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []


async def test_a_closed_client_does_not_connect_again() -> None:
    writers: list[asyncio.StreamWriter] = []
    missed = 0

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if len(writers) == 1:
            writer.write(GREETING + b"PONG\r\n")
        else:
            writer.close()

    async def miss_the_first_cancellation(_error: Exception) -> None:
        nonlocal missed
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            missed += 1
            if missed > 1:
                raise

    server, client = await connected(talk, miss_the_first_cancellation)
    writers[0].close()
    await until(lambda: len(writers) > 4)
    # As asyncio.wait_for misses one that comes while a connection is made.
    await asyncio.wait_for(client.close(), 20)
    assert client.is_closed
    assert not [task for task in asyncio.all_tasks() if "_attempt_reconnect" in repr(task)]
    server.close()


async def connected(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    on_error: Callable[[Exception], Awaitable[None]],
) -> tuple[asyncio.Server, TlsClient]:
    """Listen, and connect a client that never gives up."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = TlsClient()
    options: dict[str, Any] = {"reconnect_time_wait": 0.0, "max_reconnect_attempts": -1}
    await client.connect(f"nats://127.0.0.1:{port}", error_cb=on_error, **options)
    return server, client


async def silent(_error: Exception) -> None:
    """Take no notice."""


async def test_no_password_goes_to_a_server_in_the_clear(external: Callable[[str], int]) -> None:
    port = external("authorization { user: a, password: right }")
    for host in (f"127.0.0.1:{external('')}", f"a:right@127.0.0.1:{port}"):
        with pytest.raises(UnreachableError, match="the server does not encrypt, but the URL begins with tls://"):
            await Client(f"tls://{host}", patience=0).__aenter__()
    # In the clear it would have been let in.
    async with Client(f"nats://a:right@127.0.0.1:{port}", patience=0) as client:
        with pytest.raises(UnreachableError, match="no mediator answers on"):
            await client.create()


async def test_tokens_are_options_or_part_of_the_url(external: Callable[[str], int]) -> None:
    port = external("authorization { token: secret }")
    async with Client(f"nats://127.0.0.1:{port}", token="secret"), Client(f"nats://secret@127.0.0.1:{port}"):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"user": "a", "token": "t"}, "token: there is another login, user"),
        ({"password": "p"}, "user: expected the name that the password belongs to"),
        ({"nkey": "not.there"}, "nkey: cannot read not.there"),
        ({"creds": Path("not.there")}, "creds: cannot read not.there"),
        ({"tls": "not.there"}, "tls_ca: cannot use not.there"),
    ],
)
def test_what_cannot_be_used_is_named(options: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        Client("nats://host", **options)
