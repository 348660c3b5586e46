"""examples/push_webhook.py: holders are woken through servers that check what Google's and Apple's would."""

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from pickup.client import Holder, ProblemError
from tests.harness.certificates import issue
from tests.harness.didcomm_service import Door, note
from tests.harness.service import Services, free_port, listening, spawn
from tests.harness.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples/push_webhook.py"
SECRET = "a-long-random-text"
DEAD = "dead-token"
FCM, APNS = "push-notifications-fcm/1.0", "push-notifications-apns/1.0"
SCOPE = "https://www.googleapis.com/auth/firebase.messaging"


def pem(key: Any) -> str:
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text.decode()


@dataclass
class Google:
    """FCM's HTTP v1 API, and the token endpoint of service accounts."""

    key: Any = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))
    tokens: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[TestServer]:
        app = web.Application()
        app.router.add_post("/token", self._token)
        app.router.add_post("/v1/projects/wallets/messages:send", self._send)
        async with TestServer(app) as server:
            yield server

    def account(self, server: TestServer) -> dict[str, str]:
        return {
            "type": "service_account",
            "project_id": "wallets",
            "private_key_id": "k1",
            "private_key": pem(self.key),
            "client_email": "push@wallets.example",
            "token_uri": str(server.make_url("/token")),
        }

    async def _token(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
        public = RSAKey.import_key(pem(self.key)).as_pem(private=False)
        assertion = jwt.decode(str(form["assertion"]), RSAKey.import_key(public), algorithms=["RS256"])
        claims = assertion.claims
        assert assertion.header["kid"] == "k1"
        assert (claims["iss"], claims["scope"]) == ("push@wallets.example", SCOPE)
        assert claims["aud"] == str(request.url)
        assert 0 < claims["exp"] - claims["iat"] <= 3600
        self.tokens.append(f"access-{len(self.tokens)}")
        return web.json_response({"access_token": self.tokens[-1], "expires_in": 3599, "token_type": "Bearer"})

    async def _send(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {self.tokens[-1]}":
            return web.json_response({"error": {"code": 401, "status": "UNAUTHENTICATED"}}, status=401)
        body = await request.json()
        assert set(body) == {"message"}
        message = body["message"]
        assert set(message) == {"token", "notification", "data", "android"}
        assert set(message["notification"]) == {"title", "body"}
        assert all(isinstance(value, str) for value in message["data"].values())
        assert message["android"]["priority"] in ("NORMAL", "HIGH")
        self.messages.append(message)
        if message["token"] == DEAD:
            details = [{"@type": "type.googleapis.com/google.firebase.fcm.v1.FcmError", "errorCode": "UNREGISTERED"}]
            return web.json_response({"error": {"code": 404, "status": "NOT_FOUND", "details": details}}, status=404)
        return web.json_response({"name": "projects/wallets/messages/1"})


@dataclass
class Apple:
    """APNs: HTTP/2 over TLS alone."""

    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    pushed: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self, folder: Path) -> AsyncIterator[tuple[str, Path]]:
        """Return the URL, and the authority to trust."""
        certificate = issue(folder)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate.cert, certificate.key)
        tls.set_alpn_protocols(["h2"])
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=tls)
        async with server:
            yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", certificate.authority

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        headers: dict[int, dict[str, str]] = {}
        bodies: dict[int, bytes] = {}
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                for event in connection.receive_data(data):
                    if isinstance(event, RequestReceived):
                        headers[event.stream_id], bodies[event.stream_id] = dict(event.headers), b""  # type: ignore[arg-type]
                    elif isinstance(event, DataReceived):
                        bodies[event.stream_id] += event.data
                        connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    elif isinstance(event, StreamEnded):
                        status, answer = self._answer(headers[event.stream_id], json.loads(bodies[event.stream_id]))
                        connection.send_headers(event.stream_id, [(":status", str(status))])
                        connection.send_data(event.stream_id, answer, end_stream=True)
                writer.write(connection.data_to_send())
                await writer.drain()
        writer.close()

    def _answer(self, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, bytes]:
        public = ECKey.import_key(pem(self.key)).as_pem(private=False)
        scheme, _, token = headers["authorization"].partition(" ")
        provider = jwt.decode(token, ECKey.import_key(public), algorithms=["ES256"])
        known = (provider.header["kid"], provider.claims["iss"]) == ("KEY1234567", "TEAM123456")
        if scheme != "bearer" or not known or provider.claims["iat"] > time.time() + 60:
            return 403, b'{"reason":"InvalidProviderToken"}'
        if (headers[":method"], headers["apns-topic"]) != ("POST", "org.example.wallet"):
            return 400, b'{"reason":"BadTopic"}'
        if headers["apns-push-type"] != "alert" or set(body["aps"]["alert"]) != {"title", "body"}:
            return 400, b'{"reason":"PayloadEmpty"}'
        self.pushed.append((headers, body))
        if headers[":path"] == f"/3/device/{DEAD}":
            return 410, b'{"reason":"Unregistered","timestamp":1}'
        return 200, b""


@dataclass
class Phone:
    """A holder that is asleep, and its key."""

    holder: Holder
    key: str

    async def mail(self, door: Door) -> None:
        grant, sender = await self.holder.mediate(), await door.sender()
        await sender.send_v1(self.key, grant.routing, grant.endpoint, note("wake up"))


async def phone(door: Door, protocol: str, device: dict[str, str]) -> Phone:
    holder = await door.holder((await door.invite()).v1)
    await holder.mediate()
    made = Phone(holder, await holder.add_key())
    await holder.ask(f"{protocol}/set-device-info", device)
    return made


async def test_phones_are_woken_and_dead_devices_forgotten(services: Services, tmp_path: Path):
    google, apple, port = Google(), Apple(), free_port()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(google.serving())
        apns_url, authority = await stack.enter_async_context(apple.serving(tmp_path))
        (tmp_path / "account.json").write_text(json.dumps(google.account(server)))
        (tmp_path / "key.p8").write_text(pem(apple.key))
        command = [
            sys.executable, str(EXAMPLE), "--secret", SECRET, "--port", str(port),
            "--fcm", str(tmp_path / "account.json"), "--fcm-url", str(server.make_url("")).rstrip("/"),
            "--apns", str(tmp_path / "key.p8"), "--apns-key-id", "KEY1234567", "--apns-team", "TEAM123456",
            "--apns-topic", "org.example.wallet", "--apns-url", apns_url,
        ]  # fmt: skip
        webhook = spawn(command, tmp_path / "webhook.log", {"SSL_CERT_FILE": str(authority)})
        stack.callback(webhook.wait)
        stack.callback(webhook.kill)
        await until(lambda: listening(port), what="the webhook listens")
        settings = {"MEDIATOR_DIDCOMM__PUSH_WEBHOOK": f"http://127.0.0.1:{port}/ring/{SECRET}"}
        door = await Door.opened(services, stack, settings=settings)

        android = await phone(door, FCM, {"device_token": "android-token", "device_platform": "android"})
        iphone = await phone(door, APNS, {"device_token": "a1b2"})
        lost = await phone(door, FCM, {"device_token": DEAD, "device_platform": "android"})
        sold = await phone(door, APNS, {"device_token": DEAD})
        for one in (android, iphone, lost, sold):
            await one.mail(door)
        await until(lambda: len(google.messages) == 2 and len(apple.pushed) == 2, 30, "all phones are rung")
        assert {message["token"] for message in google.messages} == {"android-token", DEAD}
        assert all(message["data"] == {"messages": "1"} for message in google.messages)
        assert {headers[":path"] for headers, _ in apple.pushed} == {"/3/device/a1b2", f"/3/device/{DEAD}"}
        # One access token and one provider token serve several notifications.
        assert google.tokens == ["access-0"]
        assert len({headers["authorization"] for headers, _ in apple.pushed}) == 1

        async def forgotten() -> bool:
            for one, protocol in ((lost, FCM), (sold, APNS)):
                with contextlib.suppress(ProblemError):
                    await one.holder.ask(f"{protocol}/get-device-info", {})
                    return False
            return True

        await until(forgotten, 30, "devices that are gone are forgotten")
        kept = await iphone.holder.ask(f"{APNS}/get-device-info", {})
        assert kept.body["device_token"] == "a1b2"
        with pytest.raises(ProblemError):
            await lost.holder.ask(f"{FCM}/get-device-info", {})
