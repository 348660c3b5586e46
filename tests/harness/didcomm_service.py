"""The DIDComm door of a real service: its invitations, and holders that are connected to it."""

import asyncio
import contextlib
import io
import json
import os
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from mediator.cli import build_app
from mediator.cli.options import CommandError
from mediator.errors import MediatorError
from pickup.client import DeliveredMessage, Holder, Sender
from tests.harness.service import Service, Services

SETTINGS = {"MEDIATOR_DIDCOMM__OUTBOUND_NETWORKS": '["127.0.0.0/8"]'}
"""Peers of these tests have their endpoints on this machine."""


@dataclass(frozen=True, slots=True)
class Invites:
    """What `mediator invite` printed."""

    v1: str
    v2: str
    v1_short: str
    v2_short: str


def missing(what: str) -> None:
    """Skip the test, but fail where CI is set."""
    import pytest

    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


class Door:
    """One service with its door open to peers on this machine."""

    def __init__(self, service: Service, stack: AsyncExitStack) -> None:
        self.service = service
        self._stack = stack

    @classmethod
    async def opened(
        cls,
        services: Services,
        stack: AsyncExitStack,
        name: str = "service",
        *,
        settings: dict[str, str] | None = None,
        **options: Any,
    ) -> "Door":
        """Start a service and wait until it is ready; ``settings`` are environment variables."""
        service = services.new(name, **options)
        service.environment |= SETTINGS | (settings or {})
        await service.serve()
        return cls(service, stack)

    @property
    def url(self) -> str:
        """Where envelopes are posted."""
        return f"http://127.0.0.1:{self.service.http_port}/didcomm"

    @property
    def ws(self) -> str:
        """Where WebSockets are opened."""
        return f"ws://127.0.0.1:{self.service.http_port}/didcomm"

    async def command(self, *words: str) -> str:
        """Run `mediator` and return what it prints; in this process, which spares loading it anew."""
        return await asyncio.to_thread(_run, words)

    async def invite(self, *options: str) -> Invites:
        """Make an invitation."""
        said = await self.command("invite", "--json", "--data-dir", str(self.service.data_dir), *options)
        made = json.loads(said)
        return Invites(made["v1_url"], made["v2_url"], made["v1_short_url"], made["v2_short_url"])

    async def holder(self, invitation: str, **options: Any) -> Holder:
        """Connect a holder, closed with the test."""
        return await self._stack.enter_async_context(await Holder.connect(invitation, **options))

    async def sender(self) -> Sender:
        """Make a sender, closed with the test."""
        return await self._stack.enter_async_context(Sender())


_PRINTING = threading.Lock()


def _run(words: tuple[str, ...]) -> str:
    # What is printed goes to one place for all threads, so one command runs at a time.
    with _PRINTING, io.TextIOWrapper(io.BytesIO(), "utf-8") as printed, contextlib.redirect_stdout(printed):
        complained = io.StringIO()
        try:
            with contextlib.redirect_stderr(complained):
                build_app()(list(words), prog_name="mediator")
        except (MediatorError, CommandError) as error:
            raise AssertionError(str(error)) from error
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(complained.getvalue()) from ended
        printed.seek(0)
        return printed.read()


def note(text: str) -> dict[str, Any]:
    """A plaintext of v1 that a person might send."""
    return {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": text, "content": text}


def note_v2(text: str) -> dict[str, Any]:
    """The same in v2."""
    return {"id": text, "type": "https://didcomm.org/basicmessage/2.0/message", "body": {"content": text}}


async def texts(holder: Holder, mails: list[DeliveredMessage]) -> list[str]:
    """Open mail and return what was written."""
    return [await text(holder, mail) for mail in mails]


async def text(holder: Holder, mail: DeliveredMessage) -> str:
    """Open one."""
    message = (await holder.open(mail)).message
    return str(message["content"] if "content" in message else message["body"]["content"])
