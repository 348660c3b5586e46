"""Reads a mailbox as a consumer group: a FETCH for each batch, an ACK once Spark has committed it (F1, K2).

An ACK without a lease settles everything before its message in any reply the group got (K2). So only the last reply is
acknowledged, as a whole, by the process that got it, once Spark has committed all its rows. A batch that Spark repeats
is read with QUERY, which leaves no reply behind; messages FETCHed again after a crash are recognised by msg_id. Leases
are not an option: messages that a killed run FETCHed would stay leased.
"""

from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from mediator.errors import BadRequestError
from mediator.mailboxes.address import parse_address
from mediator.mailboxes.bounds import MAX_FETCH, MAX_GROUP_NAME
from pipeline.source import hide_tracebacks
from pipeline.source.nats_client import ServiceOptions, request
from pipeline.source.options import EARLIEST, GROUP, LATEST, Offset, max_rows, normalize_names, read_integer
from pipeline.source.schema import MESSAGES
from pipeline.source.sink import HEADERS

NAMES = (
    "mailbox",
    "msg_id",
    "lane",
    "key",
    "tags",
    "headers",
    "dedup_id",
    "reply_to",
    "created_at",
    "sent_at",
    "expire_at",
    "payload",
)
"""Columns as in :data:`pipeline.source.schema.MESSAGES`; times have seconds, and the lane ``low`` is ``normal``."""
WAIT_MS = 500
"""How long a FETCH waits for the first message (F2); Spark asks again at once."""
MAX_OWED = 2 * MAX_FETCH
"""Msg_ids of former batches in an offset; a killed run leaves one batch in doubt."""

Item = Mapping[str, Any]
"""A message as in a reply."""


@dataclass(frozen=True)
class GroupPartition(InputPartition):
    """A whole batch: one reply, to keep its order."""

    batch: pa.RecordBatch


@hide_tracebacks
class GroupStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A consumer group that is used by one query only.

    An offset has the number of a batch and its msg_ids in the order of the reply. ``again`` are msg_ids in the same
    reply whose rows were in an earlier batch: its ACK was not made, or by a service that forgot the delivery (K2).
    ``owed`` are msg_ids that may still come again: a run was killed between commit and ACK, and others come first.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        """:class:`BadRequestError` names a wrong option."""
        options = normalize_names(options, GROUP)
        for field, expected in zip(schema, columns(schema.fieldNames(), "schema"), strict=True):
            if field.dataType != expected.dataType:
                raise BadRequestError("schema", f"expected {field.name} to be {expected.dataType.simpleString()}")
        self._schema = schema
        self._server = ServiceOptions.of(options)
        self._group = options["group"]
        if len(self._group) > MAX_GROUP_NAME:
            raise BadRequestError("group", f"expected at most {MAX_GROUP_NAME} characters")
        if "," in options.get("subscribe", ""):
            raise BadRequestError("subscribe", "expected one mailbox, where a group has a position")
        self._address = parse_address(options.get("subscribe", ""), "subscribe")
        self._starting = options.get("startingOffsets", LATEST).lower()
        if self._starting not in (EARLIEST, LATEST):
            raise BadRequestError("startingOffsets", f'expected {EARLIEST} or {LATEST}, got "{self._starting[:200]}"')
        self._max_messages = read_integer(options, "maxOffsetsPerTrigger", 1, MAX_FETCH) or MAX_FETCH
        self._until: int | None = None
        """The last msg_id of a run with the trigger ``availableNow``."""
        self._fetched: dict[int, Item] = {}
        self._own: int | None = None
        """The batch whose reply this process got and has not acknowledged yet."""
        self._settled: int | None = None
        """The batch after which this process found no message left."""

    def initialOffset(self) -> Offset:
        """Return the offset before the first batch."""
        return {"batch": 0, "ids": [], "again": [], "owed": []}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the maximum number of messages of one batch."""
        return ReadMaxRows(self._max_messages)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Acknowledge the batch that ends at ``start`` and FETCH the next one; ``start`` again when there is none.

        Spark asks for the next batch only after it has committed the last one. Raises :class:`BadRequestError` with
        the service's error and :class:`UnavailableError` as :func:`pipeline.source.nats_client.request`.
        """
        number, ids, again, owed = _read_offset(start)
        max_messages = min(max_rows(limit) or MAX_FETCH, MAX_FETCH)
        if number == self._own:
            self._ack([*ids, *again])
        elif number == self._settled:
            owed = []
        else:
            owed = [*owed, *ids, *again]
        self._own = None
        done = {*ids, *again, *owed}
        new, repeated = self._fetch(number, max_messages, done)
        while repeated and not new:
            self._ack(repeated)
            new, repeated = self._fetch(number, max_messages, done)
        if not new:
            self._settled = number
            return start
        # A run over what is available now is done if all messages are newer, and none in a lower lane is hidden.
        is_later = self._until is not None and min(new) > self._until and len(new) < max_messages
        if is_later and not repeated:
            return start
        self._fetched, self._own = new, number + 1
        still_owed = [msg_id for msg_id in owed if msg_id not in repeated]
        return {"batch": number + 1, "ids": list(new), "again": repeated, "owed": still_owed[-MAX_OWED:]}

    def prepareForTriggerAvailableNow(self) -> None:
        """Remember the newest message there is now."""
        newest = self._query(limit=1, headers_only=True)
        self._until = newest[-1]["msg_id"] if newest else -1

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the batch; a repeated one is read again, without messages removed or expired since."""
        _, ids, _, _ = _read_offset(end)
        if start == end or not ids:
            return []
        fetched, self._fetched = self._fetched, {}
        if list(fetched) != ids:
            fetched = self._query_all(ids)
        items = [fetched[msg_id] for msg_id in ids if msg_id in fetched]
        rows = [{name: _value(item, name, self._address) for name in self._schema.fieldNames()} for item in items]
        return [GroupPartition(pa.RecordBatch.from_pylist(rows, to_arrow_schema(self._schema, timezone="UTC")))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the batch, in a task."""
        assert isinstance(partition, GroupPartition)
        yield partition.batch

    def _query_all(self, ids: Sequence[int]) -> dict[int, Item]:
        """Read the messages of a batch that still exist."""
        left, found = set(ids), {}
        while left:
            items = self._query(limit=len(left), before_id=max(left) + 1)
            found.update({item["msg_id"]: item for item in items if item["msg_id"] in left})
            # What lies between the highest and the lowest msg_id of a reply and is not in it was removed.
            lowest = items[0]["msg_id"] if items else 0
            left = {msg_id for msg_id in left if msg_id < lowest}
        return found

    def _fetch(self, batch: int, max_messages: int, done: Collection[int]) -> tuple[dict[int, Item], list[int]]:
        """Return the group's next messages, and the msg_ids of those that are ``done``."""
        config = {
            "num_msgs": max_messages,
            "max_wait_ms": WAIT_MS if self._until is None else 0,
            "ack_wait_ms": 0,
        }
        # If the mailbox was created again, its group starts from the earliest message, so that none is skipped.
        deliver = EARLIEST if batch else self._starting
        items = self._request("FETCH", group_name=self._group, deliver=deliver, config=config)["messages"]
        new = {item["msg_id"]: item for item in items if item["msg_id"] not in done}
        return new, [item["msg_id"] for item in items if item["msg_id"] in done]

    def _query(self, **body: Any) -> list[Item]:
        found: list[Item] = self._request("QUERY", **body)["messages"]
        return found

    def _ack(self, ids: Sequence[int]) -> None:
        self._request("ACK", group_name=self._group, msg_ids=ids)

    def _request(self, verb: str, **body: Any) -> dict[str, Any]:
        return request(self._server, f"{verb}.{self._address}", body)


def columns(names: Sequence[str], option: str) -> StructType:
    """Return the columns with these names, or all if there are none; :class:`BadRequestError` names ``option``."""
    for name in names:
        if name not in NAMES:
            raise BadRequestError(option, f'no column "{name[:100]}", of a group there are {", ".join(NAMES)}')
    return StructType([MESSAGES[name] for name in names or NAMES])


def _read_offset(offset: Offset) -> tuple[int, list[int], list[int], list[int]]:
    try:
        return offset["batch"], offset["ids"], offset["again"], offset["owed"]
    except KeyError:
        raise BadRequestError("checkpointLocation", "expected the checkpoint of a query with a group") from None


def _value(item: Item, name: str, address: str) -> Any:
    """Return the value of a column for a message of a FETCH or QUERY reply (N9)."""
    match name:
        case "mailbox":
            return address
        case "lane":
            return item["priority"]
        case "tags":
            return item.get("tags", [])
        case "headers":
            # The reply address has its own column.
            return {name: text for name, text in item.get("headers", {}).items() if name != HEADERS["reply_to"]}
        case "payload":
            return b64decode(item["payload"])
        case "created_at":
            return datetime.fromtimestamp(item["create_time"], UTC)
        case "sent_at":
            return datetime.fromtimestamp(item.get("sent_time", item["create_time"]), UTC)
        case "expire_at":
            return datetime.fromtimestamp(item["expire_at"], UTC) if "expire_at" in item else None
        case _:
            return item.get(name)
