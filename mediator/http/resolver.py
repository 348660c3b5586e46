"""Looks up names that strangers chose, on threads that nothing else waits for.

A name server may let a look-up hang for half a minute, and the system's resolver cannot be interrupted. On the threads
of the event loop, of which there are few, such names would hold up whatever else needs a thread, and the end of the
process.
"""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult

MAX_LOOKUPS: Final = 32
"""Names that are looked up at a time, a thread each; more wait for a free slot, or until they time out."""

_FLAGS: Final = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
_NAME_FLAGS: Final = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_Name = tuple[str, int, socket.AddressFamily]
_Found = list[ResolveResult] | Exception


class ThreadedResolver(AbstractResolver):
    """Asks the system's resolver; callers that ask for the same name at the same time share one look-up.

    So a name that hangs occupies one thread, however often it is tried again.
    """

    def __init__(self) -> None:
        """To be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(MAX_LOOKUPS)
        self._lookups: dict[_Name, asyncio.Future[_Found]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host; raises what :func:`socket.getaddrinfo` raises."""
        name = host, port, family
        if name not in self._lookups:
            await self._slots.acquire()
            if name in self._lookups:
                # Another caller started it meanwhile.
                self._slots.release()
            else:
                self._start(name)
        # Shielded: others may wait for the same look-up when one caller is cancelled.
        found = await asyncio.shield(self._lookups[name])
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        """Do nothing: the threads end by themselves, or with the process."""

    def _start(self, name: _Name) -> None:
        try:
            threading.Thread(target=self._run, args=(name,), name="name-lookup", daemon=True).start()
        except RuntimeError:
            self._slots.release()
            raise
        self._lookups[name] = self._loop.create_future()

    def _run(self, name: _Name) -> None:
        found: _Found
        try:
            found = _look_up(*name)
        except Exception as error:
            found = error
        # The loop may have been closed by now.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, name, found)

    def _end(self, name: _Name, found: _Found) -> None:
        self._slots.release()
        self._lookups.pop(name).set_result(found)


def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    found = []
    for kind, _, proto, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
    ):
        # Writes the scope of a link-local address too, without which nobody can connect to it.
        numeric, service = socket.getnameinfo(address, _NAME_FLAGS)
        found.append(
            ResolveResult(hostname=host, host=numeric, port=int(service), family=kind, proto=proto, flags=_FLAGS)
        )
    return found
