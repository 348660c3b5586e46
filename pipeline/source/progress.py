"""What the progress of a query says about a stream of mailboxes."""

from collections.abc import Mapping
from typing import Any

import orjson


def messages_behind(source: Mapping[str, Any]) -> int:
    """Return how many msg_ids a stream of mailboxes has not read yet, by one of the ``sources`` of a query's progress.

    Messages that were removed since count too, so there may be fewer to read.
    """
    latest, end = (orjson.loads(source[name] or "{}") for name in ("latestOffset", "endOffset"))
    return sum(max(0, next_id - end.get(number, 0)) for number, next_id in latest.items())
