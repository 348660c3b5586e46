"""What passed through each mailbox in each hour, from the events of the journal: counts, bytes, depth and waits.

Every function takes and returns DataFrames; ``events`` are rows of :data:`pipeline.journal_schema.EVENTS` in any
order. Hours are timestamps at their beginning, in UTC whatever the session's time zone; waits are milliseconds.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from mediator.mailboxes.events import EventType
from pipeline.journal_schema import BORN

HOUR = 3_600_000
COUNTED = {
    "delayed": EventType.DELAYED,
    "delivered": EventType.DELIVERED,
    "leased": EventType.LEASED,
    "acknowledged": EventType.ACKNOWLEDGED,
    "expired": EventType.EXPIRED,
    "deleted": EventType.DELETED,
    "compacted": EventType.COMPACTED,
    "dead": EventType.DEAD,
}
"""Columns that count the events of one kind."""
TOTALS = ("sent", *COUNTED, "bytes_in")
"""Columns of :func:`hourly` whose sum over hours and mailboxes means something."""
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
WAITS = ("first", "ack")
"""From when a message became visible to when it was first handed to a group, and to its first ACK."""

_MAILBOX = ("tenant", "mailbox")
_MESSAGE = (*_MAILBOX, "msg_id", "created_at")
"""After a backup was put back msg_ids are given again, to messages that became visible at another time."""
_GIVEN = (EventType.DELIVERED, EventType.LEASED)
_GONE = (EventType.EXPIRED, EventType.COMPACTED, EventType.DELETED)
_ENDED = (EventType.MAILBOX_EXPIRED, EventType.MAILBOX_DELETED)


def hour_of(moment: Column) -> Column:
    """Return the beginning of the hour of a timestamp, in UTC."""
    return F.timestamp_millis(F.unix_millis(moment) - F.pmod(F.unix_millis(moment), F.lit(HOUR)))


def hourly(events: DataFrame) -> DataFrame:
    """Return a row for each mailbox and hour in which something happened.

    Columns: ``tenant``, ``mailbox``, ``hour``; ``sent``, those of :data:`COUNTED` and ``bytes_in``; ``came``,
    ``came_bytes``, ``went`` and ``went_bytes``, what became visible and what was removed one by one; ``ended``, whether
    the mailbox did; ``first_p50`` … ``ack_p99`` with the numbers of messages ``first_count`` and ``ack_count``.

    Events count in the hour in which they happened, or its message became visible if a clock set back puts that later;
    waits in the hour in which the message became visible. ``sent`` counts accepted messages, the delayed ones then and
    not again when they are released.
    """
    counted = _flows(events).groupBy(*_MAILBOX, "hour").agg(*_counts())
    return _joined(counted, _waits(_handled(events), *_MAILBOX))


def tenant_waits(events: DataFrame) -> DataFrame:
    """Return the waits of all of a tenant's messages, and with ``tenant`` null of all tenants', for each hour."""
    handled = _handled(events).withColumn("whose", F.explode(F.array(F.col("tenant"), F.lit(None))))
    return _waits(handled.drop("tenant").withColumnRenamed("whose", "tenant"), "tenant")


def groups(events: DataFrame) -> DataFrame:
    """Return for each group and hour how many of the messages that became visible then it was given and acknowledged.

    Columns: ``tenant``, ``mailbox``, ``group``, ``hour``, ``given``, ``acknowledged``; each message counts once.
    """
    message = F.struct("msg_id", "created_at")
    return (
        events.where(_is(*_GIVEN, EventType.ACKNOWLEDGED) & (F.col("group") > 0))
        .withColumn("hour", hour_of(F.col("created_at")))
        .groupBy(*_MAILBOX, "group", "hour")
        .agg(
            F.count_distinct(F.when(_is(*_GIVEN), message)).alias("given"),
            F.count_distinct(F.when(_is(EventType.ACKNOWLEDGED), message)).alias("acknowledged"),
        )
    )


def with_depth(rows: DataFrame) -> DataFrame:
    """Add to all rows of :func:`hourly` what was there at the end of the hour: ``depth`` and ``depth_bytes``.

    ``change`` and ``change_bytes`` are what the hour added to it or took away. A mailbox that ends takes all of it.
    """
    so_far = Window.partitionBy(*_MAILBOX).orderBy("hour")
    over = F.max("ended").over(so_far)
    for depth, came, went in (("depth", "came", "went"), ("depth_bytes", "came_bytes", "went_bytes")):
        there = F.sum(F.col(came) - F.col(went)).over(so_far)
        rows = rows.withColumn(depth, F.when(over, F.lit(0)).otherwise(there))
    for change, depth in (("change", "depth"), ("change_bytes", "depth_bytes")):
        rows = rows.withColumn(change, F.col(depth) - F.coalesce(F.lag(depth).over(so_far), F.lit(0)))
    return rows


def carried(rows: DataFrame, keys: Sequence[str], until: Column) -> DataFrame:
    """Return ``keys``, ``hour``, ``depth`` and ``depth_bytes`` for every hour from the first to ``until``.

    ``rows`` come from :func:`with_depth`. By ``tenant`` and ``mailbox`` the answer is as long as mailboxes are many
    and old; by ``tenant`` it is not.
    """
    changes = rows.groupBy(*keys, "hour").agg(F.sum("change").alias("change"), F.sum("change_bytes").alias("bytes"))
    span = Window.partitionBy(*keys).orderBy("hour")
    next_hour = F.coalesce(F.lead("hour").over(span), until + F.expr("interval 1 hour"))
    return (
        changes.withColumn("depth", F.sum("change").over(span))
        .withColumn("depth_bytes", F.sum("bytes").over(span))
        .withColumn("last", next_hour - F.expr("interval 1 hour"))
        .where("last >= hour")
        .select(
            *keys,
            F.explode(F.sequence("hour", "last", F.expr("interval 1 hour"))).alias("hour"),
            "depth",
            "depth_bytes",
        )
    )


def _is(*codes: int) -> Column:
    # As text: each code as a column of its own would be told to Java by itself.
    return F.expr(f"what IN ({', '.join(str(int(code)) for code in codes)})")


def _flows(events: DataFrame) -> DataFrame:
    """Return events with the hour they count in, each message's beginning once.

    A beginning may come under two names, which agree in ``created_at`` and not always in ``at``, and a released message
    under the second as stored: released is the greater code and the truth.
    """
    born = (
        events.where(_is(*BORN))
        .groupBy(*_MESSAGE)
        .agg(F.max("what").alias("what"), F.max("bytes").alias("bytes"))
        .withColumn("hour", hour_of(F.col("created_at")))
        .drop("created_at")
    )
    # After the clock was set back a message may go before it came; depths must not. Operators' acts are no mailbox's.
    others = events.where(~_is(*BORN, EventType.OPERATED)).withColumn("hour", hour_of(F.greatest("at", "created_at")))
    return others.select(*born.columns).unionByName(born)


def _counts() -> list[Column]:
    sent = _is(EventType.STORED, EventType.DELAYED)
    # What expired before it was released never was there.
    went = _is(*_GONE) & (F.col("msg_id") >= 0)
    flows = {"bytes_in": sent, "came_bytes": _is(*BORN), "went_bytes": went}
    return [
        F.count_if(sent).alias("sent"),
        *(F.count_if(_is(code)).alias(name) for name, code in COUNTED.items()),
        F.count_if(_is(*BORN)).alias("came"),
        F.count_if(went).alias("went"),
        *(F.sum(F.when(which, F.col("bytes")).otherwise(0)).alias(name) for name, which in flows.items()),
        F.bool_or(_is(*_ENDED)).alias("ended"),
    ]


def _handled(events: DataFrame) -> DataFrame:
    """Return a row for each message that was given or acknowledged, with its waits; a clock set back makes them 0."""
    moments = (
        events.where(_is(*_GIVEN, EventType.ACKNOWLEDGED))
        .groupBy(*_MESSAGE)
        .agg(
            F.min(F.when(_is(*_GIVEN), F.col("at"))).alias("first_at"),
            F.min(F.when(_is(EventType.ACKNOWLEDGED), F.col("at"))).alias("ack_at"),
        )
    )
    waits = [F.greatest(F.unix_millis(f"{wait}_at") - F.unix_millis("created_at"), F.lit(0)) for wait in WAITS]
    # greatest() passes over nulls: without this, what never came would have come at once.
    known = [
        F.when(F.col(f"{wait}_at").isNotNull(), value).alias(wait) for wait, value in zip(WAITS, waits, strict=True)
    ]
    return moments.select(*_MAILBOX, hour_of(F.col("created_at")).alias("hour"), *known)


def _waits(handled: DataFrame, *keys: str) -> DataFrame:
    """Return exact percentiles, between two values in proportion."""
    wanted = F.array(*(F.lit(share) for share in QUANTILES.values()))
    rows = handled.groupBy(*keys, "hour").agg(
        *(F.percentile(wait, wanted).alias(wait) for wait in WAITS),
        *(F.count(wait).alias(f"{wait}_count") for wait in WAITS),
    )
    each = [F.col(wait)[index].alias(f"{wait}_{name}") for wait in WAITS for index, name in enumerate(QUANTILES)]
    return rows.select(*keys, "hour", *each, *(f"{wait}_count" for wait in WAITS))


def _joined(counted: DataFrame, waits: DataFrame) -> DataFrame:
    """Join both; what had only waits in an hour, its beginning being lost, counts nothing there."""
    rows = counted.join(waits, [*_MAILBOX, "hour"], "full_outer")
    absent = {name: 0 for name, kind in rows.dtypes if kind == "bigint" and name != "mailbox"}
    return rows.fillna({**absent, "ended": False})
