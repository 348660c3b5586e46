"""Logging to standard error, as text or JSON, with secrets removed (A7); operators see the last lines."""

import logging
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from mediator import request_context
from mediator.errors import MediatorError
from mediator.mailboxes.address import redact
from mediator.operate.operations import (
    TEXT,
    Answer,
    OperationRequest,
    Right,
    about,
    limit,
    many,
    object_schema,
    operation,
)
from mediator.operate.records import LogLine

MAX_RECENT: Final = 500
"""Lines that operators see."""
MAX_RECENT_TEXT: Final = 2000
"""Characters that are kept of the text of such a line, and of its details."""
LEVELS: Final = ("debug", "info", "warning", "error", "critical")

HIDDEN = "[hidden]"
MAX_ERROR_TEXT = 300
"""Characters of an exception's text that are logged."""

_ADDRESSES = frozenset({"address", "mail_address"})
_SECRETS = frozenset({"payload", "headers", "token", "password"})
_DEPTH = 5
# At level info they log every job and every request.
_VERBOSE = ("apscheduler", "aiohttp.access")


class _OurHandler(logging.StreamHandler[TextIO]):
    """The handler of this module, to recognise it when logging is set up again."""


def setup(level: str, form: Literal["console", "json"], stream: TextIO | None = None) -> None:
    """Send log lines of the program and of libraries to ``stream`` (standard error); replaces a former set-up."""
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
        name_request,
        structlog.processors.ExceptionRenderer(_shown),
    ]
    # The renderer's own exception formatter would show local variables, and payloads with them; ours ran before.
    renderer: Processor = (
        structlog.processors.JSONRenderer(serializer=_to_json)
        if form == "json"
        else structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback, sort_keys=False
        )
    )
    handler = _OurHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _remember_line, renderer],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _OurHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


_recent: deque[LogLine] = deque(maxlen=MAX_RECENT)


def _remember_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remember a line as it is written, without its secrets."""
    rest = {key: value for key, value in event.items() if key not in _OWN_COLUMNS}
    details = _to_json(rest)
    _recent.append(
        LogLine(
            round(time.time() * 1000),
            str(event.get("level", "")),
            str(event.get("logger", "")),
            str(event.get("event", ""))[:MAX_RECENT_TEXT],
            orjson.loads(details) if len(details) <= MAX_RECENT_TEXT else {"details": details[:MAX_RECENT_TEXT]},
        )
    )
    return event


_OWN_COLUMNS: Final = frozenset({"timestamp", "level", "logger", "event"})


class LogOperations:
    """The operation ``log``."""

    @operation(
        "log",
        Right.OPERATE,
        f"The last lines that this instance logged, at most {MAX_RECENT}, the newest first; the log has all of them",
        object_schema(lines=many(LogLine.schema())),
        fields={
            "level": about(TEXT, "Only lines of this level or a worse one.", enum=list(LEVELS)),
            "limit": limit(MAX_RECENT),
        },
        path="/log",
    )
    async def _log(self, request: OperationRequest) -> Answer:
        worse = LEVELS[LEVELS.index(request.get("level", LEVELS[0])) :]
        found = [line for line in reversed(list(_recent)) if line.level in worse]
        return {"lines": [line.to_json() for line in found[: request["limit"]]]}


def name_request(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Add the id of the request that is being handled, and that of its trace while it is recorded."""
    if (scope := request_context.scope.get()) is not None:
        event.setdefault("request_id", scope.id)
    if (trace_id := request_context.trace_id.get()) is not None:
        event.setdefault("trace_id", trace_id)
    return event


def hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Shorten addresses and hide secrets by their keys, also inside dictionaries and lists."""
    return {key: _hidden(key, value, _DEPTH) for key, value in event.items()}


def _hidden(key: str, value: Any, depth: int) -> Any:
    if key in _SECRETS or depth == 0:
        return HIDDEN
    if key in _ADDRESSES:
        return redact(value) if isinstance(value, str) else HIDDEN
    if isinstance(value, dict):
        return {inner: _hidden(str(inner), inside, depth - 1) for inner, inside in value.items()}
    if isinstance(value, list | tuple) and not key.startswith("_") and key != "exc_info":
        return [_hidden("", inside, depth - 1) for inside in value]
    return value


def _to_json(event: EventDict, **_options: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _shown(exc_info: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    return "\n".join(_lines(exc_info[1], _DEPTH))


def _lines(error: BaseException, depth: int) -> Iterator[str]:
    """Yield the traceback, oldest cause first, without exception texts that may quote a message or an address."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and depth:
        yield from _lines(before, depth - 1)
    yield from "".join(traceback.format_tb(error.__traceback__)).splitlines()
    yield f"{type(error).__qualname__}: {_error_text(error)}"
    if isinstance(error, BaseExceptionGroup) and depth:
        for inner in error.exceptions:
            yield from _lines(inner, depth - 1)


def _error_text(error: BaseException) -> str:
    # Our own texts may name an address; databases quote the failing row from the second line on.
    if isinstance(error, MediatorError):
        return error.code
    return str(error).partition("\n")[0][:MAX_ERROR_TEXT]
