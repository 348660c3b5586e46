"""Calls the services that an operator names in ``registry.embeddings_url`` and ``registry.rerank_url``.

The texts of cards and requests leave the machine here and nowhere else. Problems are told in two forms: one for the
callers of DISCOVER, who must not learn the operator's hosts, and one with details for the operator. Neither has more of
an answer than the names of an error in it, since many servers repeat the texts that they were sent.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

import orjson
from aiohttp import ClientConnectionError, ClientError, ClientResponse, ClientSession, DummyCookieJar, TCPConnector
from yarl import URL

from mediator.http.bodies import read_body

Result = Literal["ok", "late", "refused", "failed"]
Observe = Callable[[Result, float], None]
"""Called after each request with its result and the seconds it took."""

MAX_BODY: Final = 16 * 1024 * 1024
"""Bytes of an answer: 32 vectors of 4 096 numbers have three million."""
MAX_RETRY_AFTER: Final = 60.0
"""Seconds of a ``Retry-After`` that are obeyed; after them it is tried again."""
_CONNECTIONS: Final = 16
_SMALL: Final = 64 * 1024
"""Bytes of an answer that is parsed on the event loop: handing it to a thread takes longer."""
_ERROR_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_REFUSES_INPUT: Final = (400, 413, 422)
_TEMPORARY: Final = (408, 425, 429)


class OutsideError(Exception):
    """A request to an outside service failed; what is wrong may pass: it is away, busy, late, or answers nonsense."""

    result: Result = "failed"

    def __init__(self, problem: str, detail: str = "", retry_after: float = 0.0) -> None:
        """``problem`` may be shown to anybody; ``detail`` is for the operator; ``retry_after`` are seconds."""
        super().__init__(problem)
        self.detail = f"{problem} ({detail})" if detail else problem
        self.retry_after = retry_after


class OutsideLateError(OutsideError):
    """It did not answer in time."""

    result = "late"


class OutsideRefusedError(OutsideError):
    """It does not take this input, such as a text that is too long."""

    result = "refused"


class OutsideSettingsError(OutsideError):
    """It does not know the path, the model or the key: waiting does not help."""


class OutsideService:
    """An HTTP client of one URL. Created on the event loop that it is used on."""

    def __init__(self, what: str, url: str, key: str | None, observe: Observe) -> None:
        """``what`` begins each problem, such as "the embedding server"; ``key`` is sent as a bearer token."""
        self.what = what
        self.url = URL(url)
        self._key = key
        self._observe = observe
        self._session: ClientSession | None = None
        self._closed = False

    @property
    def host(self) -> str:
        """Scheme, host and port: what an operator needs to know, without what may be secret in a path or query."""
        return str(self.url.origin())

    async def post(self, body: Mapping[str, Any], seconds: float) -> Any:
        """Post JSON and return the JSON that is answered; raises :class:`OutsideError` and its kinds.

        No redirect is followed, since texts and key are for this URL alone.
        """
        began = time.monotonic()
        result: Result = "failed"
        try:
            async with asyncio.timeout(seconds):
                try:
                    answer = await self._post(body)
                except ClientConnectionError:
                    # A kept connection that the server closed at this very moment; asking changes nothing there.
                    answer = await self._post(body)
            result = "ok"
            return answer
        except OutsideError as error:
            result = error.result
            raise
        except TimeoutError:
            result = "late"
            raise OutsideLateError(f"{self.what} gave no answer within {seconds:g} s") from None
        except (ClientError, OSError, ValueError) as error:
            why = str(error) if isinstance(error, OSError) else ""
            raise OutsideError(f"{self.what} cannot be reached", why or type(error).__name__) from error
        except asyncio.CancelledError:
            result = "late"
            raise
        finally:
            self._observe(result, time.monotonic() - began)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: Mapping[str, Any]) -> Any:
        async with self._open().post(self.url, data=orjson.dumps(body), allow_redirects=False) as response:
            if response.status != 200:
                raise _refusal(self.what, response, await read_body(response, _SMALL))
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise self.invalid("it is compressed, which was not asked for")
            data = await read_body(response, MAX_BODY + 1)
        if len(data) > MAX_BODY:
            raise self.invalid(f"it has more than {MAX_BODY} bytes")
        try:
            return _parse(data) if len(data) <= _SMALL else await asyncio.to_thread(_parse, data)
        except (ValueError, RecursionError):
            raise self.invalid(f"{len(data)} bytes that are not JSON") from None

    def invalid(self, why: str) -> OutsideError:
        """Return the error for an answer that is not as expected."""
        return OutsideError(f"{self.what} gives invalid answers", why)

    def _open(self) -> ClientSession:
        if self._closed:
            raise OutsideError(f"{self.what} is not asked any more")
        if self._session is None:
            headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
            if self._key is not None:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = ClientSession(
                connector=TCPConnector(limit=_CONNECTIONS),
                headers=headers,
                cookie_jar=DummyCookieJar(),
                auto_decompress=False,
            )
        return self._session


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        # Servers in Python write NaN, which is no JSON; whoever reads the numbers has to see it.
        return json.loads(data)


def _refusal(what: str, response: ClientResponse, body: bytes) -> OutsideError:
    status, detail = response.status, _error_names(body)
    if status in _REFUSES_INPUT:
        return OutsideRefusedError(f"{what} refuses the input with HTTP {status}", detail)
    if status >= 500 or status in _TEMPORARY:
        return OutsideError(
            f"{what} answers HTTP {status}", detail, _retry_after(response.headers.get("Retry-After", ""))
        )
    return OutsideSettingsError(f"{what} answers HTTP {status}, so its URL, model or key is wrong", detail)


def _retry_after(value: str) -> float:
    """Return the seconds of a ``Retry-After`` (RFC 9110 §10.2.3), from 0 to :data:`MAX_RETRY_AFTER`."""
    try:
        seconds = float(value) if value[:1].isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER)


def _error_names(body: bytes) -> str:
    """Return what kind of error a body names, as OpenAI's and text-embeddings-inference's do, and its length.

    Its text is left out: it may repeat what was sent.
    """
    try:
        told = orjson.loads(body)
    except ValueError:
        told = None
    fields = told if isinstance(told, dict) else {}
    fields = fields["error"] if isinstance(fields.get("error"), dict) else fields
    names = (str(fields[name]) for name in ("type", "error_type", "code") if isinstance(fields.get(name), str | int))
    return ", ".join([*filter(_ERROR_NAME.fullmatch, names), f"{len(body)} bytes"])
