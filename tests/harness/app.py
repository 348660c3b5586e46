"""The service as a whole, in this process, with its registry: NATS clients and HTTP callers of its tenants."""

import contextlib
import gc
import io
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import nats
from nats.aio.client import Client
from yarl import URL

from mediator.app import RunningService, open_service
from mediator.http.callers import read_local_token
from mediator.store.opening import database_path
from tests.harness.core import make_settings
from tests.harness.door import parsed
from tests.harness.stores import migrated

PREFIX = "$mq9.AI."
PATIENCE = 30.0
"""Seconds until a test gives up on an answer that does not come."""
ADA, BOB = "ada-" + "t0ken" * 4, "bob-" + "t0ken" * 4
TENANTS = {
    "acme": {"users": [{"name": "ada", "password": "pw-ada"}], "api_tokens": [ADA]},
    "globex": {"users": [{"name": "bob", "password": "pw-bob"}], "api_tokens": [BOB]},
}
"""Two tenants, each with one user of NATS and one API token."""


@dataclass
class Answer:
    """What came over HTTP."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class App:
    """A running service, and those who come to it."""

    service: RunningService
    http: aiohttp.ClientSession
    local_token: str
    _stack: contextlib.AsyncExitStack
    _clients: dict[str, Client]

    async def nats(self, user: str = "") -> Client:
        """Return the NATS client of a user; "" has no credentials."""
        if user not in self._clients:
            named = {"user": user, "password": f"pw-{user}"} if user else {}
            self._clients[user] = await nats.connect(self.service.nats_url, **named)
            self._stack.push_async_callback(self._clients[user].close)
        return self._clients[user]

    async def ask(self, verb: str, body: Any = b"", user: str = "") -> dict[str, Any]:
        """Make a request over NATS, and return its reply, checked for what every reply has (N1)."""
        return parsed(await self.ask_raw(verb, body, user))

    async def ask_raw(self, verb: str, body: Any = b"", user: str = "") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        client = await self.nats(user)
        return (await client.request(PREFIX + verb, data, timeout=PATIENCE)).data

    async def done(self, verb: str, body: Any = b"", user: str = "") -> dict[str, Any]:
        """Make a request over NATS that succeeds."""
        reply = await self.ask(verb, body, user)
        assert reply["error"] == "", f"{verb}: {reply}"
        return reply

    async def call(
        self, method: str, path: str, body: Any = None, *, token: str | None = None, **headers: str
    ) -> Answer:
        """Make a request over HTTP; ``headers`` are written with underscores.

        ``token`` is by default the secret of this machine, and "" none.
        """
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        token = self.local_token if token is None else token
        if token:
            sent.setdefault("Authorization", f"Bearer {token}")
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        # The client would write large bytes with a warning, and a path in a form of its own.
        body, url = data and io.BytesIO(data), URL(path, encoded=True)
        async with self.http.request(method, url, data=body, headers=sent, allow_redirects=False) as answer:
            return Answer(answer.status, answer.headers, await answer.read())


@contextlib.asynccontextmanager
async def app(folder: Path, **options: Any) -> AsyncIterator[App]:
    """Run the service; without a model, unless ``registry`` says otherwise, as few tests need one."""
    switch, thresholds = sys.getswitchinterval(), gc.get_threshold()
    chosen = {"registry": {"semantic": False}, "didcomm": {"enabled": False}, "journal": {"enabled": False}, **options}
    settings = make_settings(data_dir=folder, nats="127.0.0.1:0", http="127.0.0.1:0", **chosen)
    if "database_url" not in options:
        migrated(database_path(folder))
    try:
        async with contextlib.AsyncExitStack() as stack:
            service = await stack.enter_async_context(open_service(settings))
            http = aiohttp.ClientSession(f"http://127.0.0.1:{service.http_port}")
            await stack.enter_async_context(http)
            yield App(service, http, read_local_token(folder), stack, {})
    finally:
        # What the service sets for its process is not for the tests.
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(switch)


def card(mailbox: str, name: str = "", **fields: Any) -> dict[str, Any]:
    """Return a card of few words."""
    return {"name": name or mailbox, "mailbox": mailbox, **fields}
