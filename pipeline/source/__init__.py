"""The Spark data source ``mq9``: mailboxes and the journal as input, mail as output."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from mediator.errors import MediatorError
from pipeline.requirements import check_installed

Class = TypeVar("Class", bound=type)


def hide_tracebacks(cls: Class) -> Class:
    """Wrap the public methods of a class that Spark calls in a worker."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _wrapped(method))
    return cls


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with _without_traceback():
            answer = method(*arguments, **named)
        return _each(answer) if isinstance(answer, Iterator) else answer

    return call


def _each(rows: Iterator[Any]) -> Iterator[Any]:
    with _without_traceback():
        yield from rows


@contextmanager
def _without_traceback() -> Iterator[None]:
    try:
        yield
    except MediatorError:
        # The worker reads this when it reports the error, just before it exits, so other errors keep their traceback.
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


# Modules of this package need it: an older pyspark would fail at one of their imports, or when a stream is started.
check_installed()
