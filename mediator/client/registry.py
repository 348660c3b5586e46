"""Agents as the registry knows them, and the registration of one's own, kept alive by reports."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mediator.errors import NoSuchAgentError

log = logging.getLogger("mediator.client")


@dataclass(frozen=True)
class Agent:
    """An agent that was found."""

    card: Mapping[str, Any]
    """The AgentCard as it was registered."""
    score: float | None = field(default=None, kw_only=True)
    """0 to 1, among the agents of one answer; None where nothing was searched for."""
    explanation: Mapping[str, Any] | None = field(default=None, kw_only=True)
    """What keywords and vectors gave to the score (G3); None unless ``explain`` was asked for."""

    @property
    def name(self) -> str:
        """Its name, empty if it has none."""
        name = self.card.get("name")
        return name if isinstance(name, str) else ""

    @property
    def address(self) -> str:
        """The mail address at which it is reached, empty where its card names none."""
        return card_address(self.card)


def card_address(card: Mapping[str, Any]) -> str:
    """Return the mail address of a card, from the top level or the parameters of an A2A extension (G1)."""
    value = card.get("mailbox")
    if not value:
        capabilities = card.get("capabilities")
        extensions = capabilities.get("extensions") if isinstance(capabilities, Mapping) else None
        for extension in extensions if isinstance(extensions, list) else ():
            parameters = extension.get("params") if isinstance(extension, Mapping) else None
            if isinstance(parameters, Mapping) and isinstance(parameters.get("mailbox"), str):
                value = parameters["mailbox"]
                break
    return value.rpartition("/")[2] if isinstance(value, str) else ""


class Registration:
    """An agent that is registered; it reports again and again, and registers anew where it was forgotten."""

    def __init__(
        self,
        address: str,
        register: Callable[[], Awaitable[object]],
        report: Callable[[str, Mapping[str, Any]], Awaitable[object]],
    ) -> None:
        self.address = address
        """The mailbox by which the registry knows the agent."""
        self.status: Mapping[str, Any] = {}
        """What the next report says, such as ``{"load": 0.5}``."""
        self._register = register
        self._report = report

    async def report(self, /, **status: Any) -> None:
        """Report now; what is given is the status from now on, unless it is refused. Raises as any request."""
        said = status or self.status
        try:
            await self._report(self.address, said)
        except NoSuchAgentError:
            await self._register()
            await self._report(self.address, said)
        # Not what a report at the same time said before.
        self.status = status or self.status

    async def report_every(self, seconds: float) -> None:
        """Report until this is cancelled; what fails is logged and tried again at the next time."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.report()
            except Exception as error:
                log.warning("agent %s could not report: %s", self.address, error)
