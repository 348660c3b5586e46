"""What no request shows: whether the public URL leads here, when certificates expire, and how clocks differ."""

import asyncio
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
)
from cryptography import x509
from yarl import URL

from mediator.broker import Broker
from mediator.errors import MediatorError
from mediator.http.bodies import read_body
from mediator.metrics import Metrics
from mediator.operate.diagnosis import Finding, Level

LOOK_SECONDS: Final = 30
EXPIRES_SOON: Final = timedelta(days=14)
SKEW_SECONDS: Final = 5.0
"""From here on leases and expiry are visibly off; control messages are refused from two minutes on."""
_TIMEOUT: Final = ClientTimeout(total=5.0)
_AGAIN_SECONDS: Final = 2.0
_MAX_BODY: Final = 1 << 16


@dataclass(slots=True)
class PublicUrl:
    """A URL under which others reach this service."""

    option: str
    url: str
    proof: Callable[[], str]
    """Returns what the answer to a GET of the URL contains if it comes from this service or one like it."""
    problem: str = ""
    """Why it was not reached at the last check."""
    certificate_ends: datetime | None = None


class Surroundings:
    """Looks each :data:`LOOK_SECONDS`. Used on the event loop."""

    def __init__(self, broker: Broker, metrics: Metrics, certificates: Mapping[str, Path | None]) -> None:
        """``certificates`` are files by the options that name them."""
        self._broker = broker
        self._metrics = metrics
        self._certificates = certificates
        self._urls: list[PublicUrl] = []
        self._skew = 0.0
        self._checked = False
        self._checking = asyncio.Lock()

    def watch_url(self, option: str, url: str, proof: Callable[[], str]) -> None:
        """Check from now on that a URL of the settings leads here; see :class:`PublicUrl`."""
        self._urls.append(PublicUrl(option, url, proof))

    async def check(self) -> None:
        """Check everything once."""
        async with self._checking:
            await self._check()

    async def _check(self) -> None:
        await asyncio.gather(self._compare_clocks(), *(self._try(each) for each in self._urls))
        now = datetime.now(UTC)
        files = await asyncio.to_thread(lambda: dict(read_certificates(self._certificates)))
        ends = {option: end for option, end in files.items() if end is not None}
        for each in self._urls:
            self._metrics.public_url_up.labels(each.option).set(not each.problem)
            if each.certificate_ends is not None:
                ends[each.option] = each.certificate_ends
        for option, end in ends.items():
            self._metrics.certificate_seconds.labels(option).set((end - now).total_seconds())
        self._checked = True

    async def _compare_clocks(self) -> None:
        # What is wrong with the store is for the health check to say.
        with suppress(MediatorError):
            began = time.time()
            at = await self._broker.read(lambda tx, _now: tx.session.dialect.clock())
            if at is not None:
                self._skew = (began + time.time()) / 2 - at / 1000
                self._metrics.clock_skew.set(self._skew)

    async def _try(self, watched: PublicUrl) -> None:
        problem = await _reach(watched)
        if problem:
            # One connection may fail for many reasons.
            await asyncio.sleep(_AGAIN_SECONDS)
            problem = await _reach(watched)
        watched.problem = problem

    async def examine(self) -> list[Finding]:
        """Return what the last check found; waits for the first one, 22 s at most."""
        if not self._checked:
            async with self._checking:
                if not self._checked:
                    await self._check()
        return [*self._examine_urls(), *self._examine_clock()]

    def _examine_urls(self) -> Iterator[Finding]:
        for each in self._urls:
            if each.problem:
                yield Finding(
                    Level.PROBLEM,
                    f"{each.option}: {each.url} does not lead here: {each.problem}.",
                    "Look at DNS, the proxy in front and its certificate: wallets and agents use this URL. If only "
                    "this machine cannot reach it, give it a way, such as a line in /etc/hosts.",
                    "/settings",
                    f"unreachable_{each.option}",
                )
            elif each.certificate_ends is not None:
                yield from expiry_findings(each.option, each.certificate_ends, "Renew it in the proxy in front.")

    def _examine_clock(self) -> Iterator[Finding]:
        if abs(self._skew) >= SKEW_SECONDS:
            way = "ahead of" if self._skew > 0 else "behind"
            yield Finding(
                Level.PROBLEM,
                f"This machine's clock is {abs(self._skew):.0f} s {way} the database server's.",
                "Synchronise both clocks (NTP): leases, delays and expiry follow the clock of each instance.",
                code="clock_differs",
            )


async def _reach(watched: PublicUrl) -> str:
    """Return why a URL does not lead here, empty if it does."""
    try:
        trusted = await asyncio.to_thread(ssl.create_default_context)
        async with (
            ClientSession(timeout=_TIMEOUT) as session,
            session.get(watched.url, allow_redirects=False, ssl=trusted) as answer,
        ):
            if answer.status != 200:
                return f"expected status 200, got {answer.status}"
            if watched.proof() not in (await read_body(answer, _MAX_BODY)).decode(errors="replace"):
                return "another service answers there"
        watched.certificate_ends = await _certificate_end(URL(watched.url), trusted)
    except TimeoutError:
        return f"no answer within {_TIMEOUT.total:g} s"
    except ClientConnectorCertificateError as error:
        return str(error.certificate_error)
    except ClientConnectorError as error:
        return error.os_error.strerror or str(error.os_error)
    except (ClientError, OSError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


async def _certificate_end(url: URL, trusted: ssl.SSLContext) -> datetime | None:
    """Return when the certificate expires that a server shows."""
    if url.scheme != "https":
        return None
    async with asyncio.timeout(_TIMEOUT.total):
        _, writer = await asyncio.open_connection(url.host, url.port, ssl=trusted)
    try:
        certificate = writer.get_extra_info("peercert")
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    finally:
        # To close politely would wait for the server's part of it, which some never send.
        writer.transport.abort()


def read_certificates(files: Mapping[str, Path | None]) -> Iterator[tuple[str, datetime | None]]:
    """Yield for each option that names a file when its certificate expires; None: it cannot be read."""
    for option, file in files.items():
        if file is not None:
            end = None
            with suppress(OSError, ValueError):
                end = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
            yield option, end


def certificate_findings(files: Mapping[str, Path | None], now: datetime | None = None) -> Iterator[Finding]:
    """Report certificates that have expired or will soon; ``files`` by the option that names each."""
    for option, end in read_certificates(files):
        if end is None:
            name = file.name if (file := files[option]) else ""
            text = f"{option}: {name} cannot be read as a certificate."
            yield Finding(Level.PROBLEM, text, "Put a PEM file there.", code=f"certificate_{option}")
        else:
            advice = "Replace the file by a renewed one; new connections use it at once."
            yield from expiry_findings(option, end, advice, now)


def expiry_findings(option: str, end: datetime, advice: str, now: datetime | None = None) -> Iterator[Finding]:
    """Report a certificate that has expired or will soon."""
    now = now or datetime.now(UTC)
    if end - now < EXPIRES_SOON:
        when = "has expired" if end <= now else "expires"
        text = f"{option}: the certificate {when} on {end:%Y-%m-%d %H:%M} UTC."
        yield Finding(Level.PROBLEM, text, advice, "/settings", f"certificate_{option}")
