"""The service as NATS's own tools see it: `nats micro ls`, `info mq9` and `stats mq9` (NATS ADR-32).

Each instance answers ``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS``. A tenant learns of its own requests only.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from mediator import __version__
from mediator.errors import MediatorError
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.metrics import RequestSeries, VerbTotals
from mediator.nats.accounts import AccountMap
from mediator.nats.admission import ReplyQueue
from mediator.nats.client import Request
from mediator.nats.connection import NatsConnection, NatsSubscription
from mediator.nats.subjects import MICRO_NAME, MICRO_SUBJECTS

DESCRIPTION: Final = "Mailboxes for software agents: mq9 and DIDComm"
TYPE: Final = "io.nats.micro.v1."
"""What the ``type`` of each answer begins with."""
_NOT_IN_ID: Final = re.compile(r"[^A-Za-z0-9_-]")


class MicroService:
    """Answers NATS's discovery of services, on the connection of one door."""

    def __init__(
        self,
        connection: NatsConnection,
        replies: ReplyQueue,
        requests: RequestSeries,
        accounts: AccountMap,
        endpoints: Mapping[str, str],
        *,
        instance: str,
        prefix: str,
        queue: str,
    ) -> None:
        """``endpoints`` are subjects by verb; ``prefix`` is what stands before ``$SRV`` where accounts are tenants."""
        self._connection = connection
        self._replies = replies
        self._requests = requests
        self._accounts = accounts
        self._endpoints = [
            {"name": verb, "subject": subject, "queue_group": queue} for verb, subject in sorted(endpoints.items())
        ]
        self._prefix = prefix
        self._identity = {
            "name": MICRO_NAME,
            "id": _NOT_IN_ID.sub("-", instance),
            "version": __version__,
            "metadata": {"instance": instance},
        }
        self._started = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._subscriptions: list[NatsSubscription] = []

    async def open(self) -> None:
        """Start answering."""
        for subject in MICRO_SUBJECTS:
            self._subscriptions.append(await self._connection.subscribe(self._prefix + subject, "", self._receive))

    async def close(self) -> None:
        """Be found no more."""
        for subscription in self._subscriptions:
            await subscription.drop()

    def _receive(self, message: Request) -> None:
        """Answer one question; one that is for another service, or of nobody's tenant, gets no answer."""
        account, _, question = message.subject.rpartition("$SRV.")
        verb, *named = question.split(".")
        if named not in ([], [MICRO_NAME], [MICRO_NAME, self._identity["id"]]):
            return
        try:
            tenant = self._accounts.tenant_of(account.split(".")[1] if account else DEFAULT_TENANT)
            self._replies.check_room(0)
        except MediatorError:
            return
        if verb == "PING":
            self._answer(message, "ping_response", {})
        elif verb == "INFO":
            endpoints = [{**each, "metadata": {}} for each in self._endpoints]
            self._answer(message, "info_response", {"description": DESCRIPTION, "endpoints": endpoints})
        elif verb == "STATS":
            figures = self._requests.of_tenant(tenant)
            endpoints = [{**each, **_stats(figures.get(each["name"], VerbTotals()))} for each in self._endpoints]
            self._answer(message, "stats_response", {"started": self._started, "endpoints": endpoints})

    def _answer(self, message: Request, kind: str, fields: dict[str, Any]) -> None:
        self._replies.put(message.reply, orjson.dumps({"type": TYPE + kind, **self._identity, **fields}))


def _stats(figures: VerbTotals) -> dict[str, Any]:
    nanoseconds = int(figures.seconds * 1e9)
    return {
        "num_requests": figures.requests,
        "num_errors": figures.errors,
        "last_error": figures.last_error,
        "processing_time": nanoseconds,
        "average_processing_time": nanoseconds // max(1, figures.requests),
    }
