"""Logging to standard error, as text or JSON, with secrets removed (A7)."""

import logging
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from mediator import request_context
from mediator.errors import MediatorError
from mediator.mailboxes.address import redact

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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
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
