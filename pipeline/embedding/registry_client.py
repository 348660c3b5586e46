"""Sends cards and vectors to the running service in batches, over its control socket."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mediator.errors import BadRequestError, SetupError, UnavailableError
from mediator.ops.control import send_command
from mediator.ops.operations import MAX_LONG_REQUEST
from registry.api.operations import MAX_TOGETHER

ROOM = MAX_LONG_REQUEST - 64 * 1024
"""Bytes of the agents of one request."""
SizedAgent = tuple[list[Any], int]
"""An agent as in a request, and its maximum size there in bytes."""


@dataclass(frozen=True, slots=True)
class RegistryClient:
    """A service that runs on a data directory, with its registry."""

    data_dir: Path

    def space(self) -> str:
        """Return the space of the configured model; :class:`SetupError` without a service or a registry with a model.

        :class:`UnavailableError` while the service does not know it yet.
        """
        model = self.status()["model"]
        if model is None:
            raise SetupError("the service has no model to compare with: registry.semantic is turned off")
        if model["space"] is None:
            raise UnavailableError(f"the service does not know its model yet: {model['problem']}")
        return str(model["space"])

    def status(self) -> dict[str, Any]:
        """Return the status of the registry; :class:`SetupError` without a service or a registry."""
        try:
            return self._ask("registry")
        except BadRequestError as error:
            raise SetupError("the service runs without its registry: see registry.enabled") from error

    def put(
        self, tenant: str, space: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None]
    ) -> dict[str, int]:
        """Register cards with their vectors; return the counts of :class:`registry.rules.BulkOutcome`."""
        return self._all("agents-put", agents, on_progress, tenant=tenant, space=space)

    def embed(self, space: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None]) -> dict[str, int]:
        """Give vectors to agents whose card is still as it was; return how many were ``embedded``."""
        return self._all("agents-embed", agents, on_progress, space=space)

    def _all(
        self, command: str, agents: Iterator[SizedAgent], on_progress: Callable[[int], None], **fields: Any
    ) -> dict[str, int]:
        total: dict[str, int] = {}
        handed = 0
        for some in batch_agents(agents):
            answer = self._ask(command, agents=some, **fields)
            for name in answer.keys() - {"error", "revision"}:
                total[name] = total.get(name, 0) + answer[name]
            handed += len(some)
            on_progress(handed)
        return total

    def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        answer = asyncio.run(send_command(self.data_dir, command, **fields))
        if answer["error"]:
            field, colon, problem = str(answer["error"]).partition(": ")
            if colon and field in ("command", "space", "tenant"):
                raise BadRequestError(field, problem)
            raise UnavailableError(f"the service refused: {answer['error']}")
        return answer


def batch_agents(agents: Iterator[SizedAgent]) -> Iterator[list[list[Any]]]:
    """Batch agents into requests."""
    some: list[list[Any]] = []
    room = ROOM
    for agent, size in agents:
        if some and (size > room or len(some) == MAX_TOGETHER):
            yield some
            some, room = [], ROOM
        some.append(agent)
        room -= size
    if some:
        yield some


def card_with(card: bytes, vectors: bytes) -> SizedAgent:
    """Return a card with its vectors for :meth:`RegistryClient.put`."""
    encoded = base64.b64encode(vectors).decode()
    # Inside a JSON string each byte of a JSON text takes two bytes at most.
    return [card.decode(), encoded], 2 * len(card) + len(encoded) + 16


def agent_with(no: int, card_revision: int, vectors: bytes) -> SizedAgent:
    """Return an agent's number with vectors of its card for :meth:`RegistryClient.embed`."""
    encoded = base64.b64encode(vectors).decode()
    return [no, card_revision, encoded], len(encoded) + 64
