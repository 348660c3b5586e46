"""Reads a mailbox as a consumer group: a FETCH for each batch, an ACK once Spark has committed it (F1, K2).

An ACK without a lease settles everything before its message in any reply the group got (K2). So only the last reply is
acknowledged, as a whole, by the process that got it, once Spark has committed all its rows. A batch that Spark repeats
is read with QUERY, which leaves no reply behind; messages FETCHed again after a crash are recognised by msg_id. Leases
are not an option: messages that a killed run FETCHed would stay leased.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.bounds import MAX_FETCH, MAX_GROUP_NAME
from pipeline.source.group_rows import Item, checked, rows
from pipeline.source.nats_client import ServiceOptions, request
from pipeline.source.options import GROUP, normalize_names, read_integer
from pipeline.source.stream_options import EARLIEST, LATEST, Offset, max_rows
from pipeline.source.tracebacks import hide_tracebacks

WAIT_MS = 500
"""How long a FETCH waits for the first message (F2); Spark asks again at once."""
MAX_OWED = 2 * MAX_FETCH
"""Msg_ids of former batches in an offset; a killed run leaves one batch in doubt."""


@dataclass(frozen=True)
class GroupPartition(InputPartition):
    """A whole batch: one reply, to keep its order."""

    batch: pa.RecordBatch


@hide_tracebacks
class GroupStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A consumer group that is one query's own.

    An offset has the number of a batch and its msg_ids as they were given. ``again`` are those that came beside them
    and whose rows were in an earlier batch: its ACK was not made, or by a service that forgot it had delivered them
    (K2). ``owed`` may come yet: a run was killed between commit and ACK, and others go before them.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """:class:`BadRequestError` names a wrong option."""
        given = normalize_names(options, GROUP)
        self._schema = checked(schema)
        self._server = ServiceOptions.of(given)
        self._group = given["group"]
        if len(self._group) > MAX_GROUP_NAME:
            raise BadRequestError("group", f"expected at most {MAX_GROUP_NAME} characters")
        if "," in given.get("subscribe", ""):
            raise BadRequestError("subscribe", "expected one mailbox, where a group has a position")
        self._address = parse_address(given.get("subscribe", ""), "subscribe")
        self._starting = given.get("startingOffsets", LATEST).lower()
        if self._starting not in (EARLIEST, LATEST):
            raise BadRequestError("startingOffsets", f'expected {EARLIEST} or {LATEST}, got "{self._starting[:200]}"')
        self._most = read_integer(given, "maxOffsetsPerTrigger", 1, MAX_FETCH) or MAX_FETCH
        self._until: int | None = None
        self._fetched: dict[int, Item] = {}
        self._own: int | None = None
        """The batch whose reply this process got and has not acknowledged yet."""
        self._settled: int | None = None
        """The batch after which this process found nothing left."""

    def initialOffset(self) -> Offset:
        """Return the offset before the first batch."""
        return {"batch": 0, "ids": [], "again": [], "owed": []}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the messages of one batch."""
        return ReadMaxRows(self._most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Acknowledge the batch that ends at ``start`` and FETCH the next one; ``start`` again when there is none.

        Spark asks for the next batch only after it has committed the last one. Raises :class:`BadRequestError` in the
        service's words and :class:`UnavailableError` as :func:`pipeline.source.nats_client.request`.
        """
        number, ids, again, owed = _read(start)
        most = min(max_rows(limit) or MAX_FETCH, MAX_FETCH)
        if number == self._own:
            self._ack([*ids, *again])
        elif number == self._settled:
            owed = []
        else:
            owed = [*owed, *ids, *again]
        self._own = None
        done = {*ids, *again, *owed}
        new, repeated = self._fetch(number, most, done)
        while repeated and not new:
            self._ack(repeated)
            new, repeated = self._fetch(number, most, done)
        if not new:
            self._settled = number
            return start
        if self._is_later(new, most) and not repeated:
            return start
        self._fetched, self._own = new, number + 1
        still = [msg_id for msg_id in owed if msg_id not in repeated]
        return {"batch": number + 1, "ids": list(new), "again": repeated, "owed": still[-MAX_OWED:]}

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the newest message there is now."""
        newest = self._query(limit=1, headers_only=True)
        self._until = newest[-1]["msg_id"] if newest else -1

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the batch; a repeated one is read again, without messages removed or expired since."""
        _, ids, _, _ = _read(end)
        if start == end or not ids:
            return []
        fetched, self._fetched = self._fetched, {}
        if list(fetched) != ids:
            fetched = self._pick(ids)
        return [
            GroupPartition(rows([fetched[msg_id] for msg_id in ids if msg_id in fetched], self._schema, self._address))
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Return the batch."""
        assert isinstance(partition, GroupPartition)
        yield partition.batch

    def _is_later(self, new: Mapping[int, Item], most: int) -> bool:
        """Whether a run over what is there now is done: all this came later, and hides nothing in a lower lane."""
        return self._until is not None and min(new) > self._until and len(new) < most

    def _pick(self, ids: Sequence[int]) -> dict[int, Item]:
        """Read the messages of a batch that are still there."""
        left, found = set(ids), {}
        while left:
            items = self._query(limit=len(left), before_id=max(left) + 1)
            found.update({item["msg_id"]: item for item in items if item["msg_id"] in left})
            # What is between the highest and the lowest of a reply and not in it is gone.
            lowest = items[0]["msg_id"] if items else 0
            left = {msg_id for msg_id in left if msg_id < lowest}
        return found

    def _fetch(self, batch: int, most: int, done: Collection[int]) -> tuple[dict[int, Item], list[int]]:
        """Return the group's next messages, and the msg_ids of those that are ``done``."""
        # If the mailbox was recreated, its group starts from the earliest message, so that none is skipped.
        deliver = EARLIEST if batch else self._starting
        wait = WAIT_MS if self._until is None else 0
        config = {"num_msgs": most, "max_wait_ms": wait, "ack_wait_ms": 0}
        items = self._ask("FETCH", group_name=self._group, deliver=deliver, config=config)["messages"]
        new = {item["msg_id"]: item for item in items if item["msg_id"] not in done}
        return new, [item["msg_id"] for item in items if item["msg_id"] in done]

    def _query(self, **body: Any) -> list[Item]:
        found: list[Item] = self._ask("QUERY", **body)["messages"]
        return found

    def _ack(self, ids: Sequence[int]) -> None:
        self._ask("ACK", group_name=self._group, msg_ids=ids)

    def _ask(self, verb: str, **body: Any) -> dict[str, Any]:
        return request(self._server, f"{verb}.{self._address}", body)


def _read(offset: Offset) -> tuple[int, list[int], list[int], list[int]]:
    try:
        return offset["batch"], offset["ids"], offset["again"], offset["owed"]
    except KeyError:
        raise BadRequestError("checkpointLocation", "expected the checkpoint of a query with a group") from None
