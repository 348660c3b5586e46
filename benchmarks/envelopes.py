"""CPU time of our layer around the DIDComm libraries: 1 kB forwards with keys and documents known."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import orjson
from nacl.bindings import crypto_sign_seed_keypair

from benchmarks.bench import Bench, ResultRow, below, number
from pickup.envelope.library import DIDCOMM, LibraryEnvelopes, load_library
from pickup.rules.names import verkey
from tests.harness.people import MemoryResolver, MemorySecrets, Person, b64, jwe, public_half

# isort: split
# After our envelope module, which suppresses the JOSE library's import warnings.
from didcomm.common.resolvers import ResolversConfig
from didcomm.common.types import VerificationMaterial, VerificationMaterialFormat, VerificationMethodType
from didcomm.did_doc.did_doc import DIDDoc
from didcomm.secrets.secrets_resolver import Secret
from didcomm.unpack import UnpackConfig, unpack
from didcomm_messaging.legacy import crypto

ADDED_US = 60
IN_FLIGHT = 16
WORKERS = 2

Opening = Callable[[], Awaitable[Any]]


class _Library:
    """Parsed DID documents and secrets in the form that ``didcomm`` wants."""

    def __init__(self, *people: Person) -> None:
        self._documents = {person.did: DIDDoc.deserialize(person.document.raw) for person in people}
        self._secrets = {
            secret.kid: Secret(
                secret.kid,
                VerificationMethodType.JSON_WEB_KEY_2020,
                VerificationMaterial(VerificationMaterialFormat.JWK, json.dumps(dict(secret.jwk))),
            )
            for person in people
            for secret in person.secrets
        }

    async def resolve(self, did: str) -> Any:
        return self._documents.get(did)

    async def get_key(self, kid: str) -> Any:
        return self._secrets.get(kid)

    async def get_keys(self, kids: list[str]) -> list[str]:
        return [kid for kid in kids if kid in self._secrets]


def run(bench: Bench) -> Iterator[ResultRow]:
    yield from asyncio.run(_measure(bench))


async def _measure(bench: Bench) -> list[ResultRow]:
    us, them = Person.make("us", "X25519"), Person.make("them", "X25519")
    ours = LibraryEnvelopes(
        MemoryResolver([us, them]), MemorySecrets([us]), max_bytes=1 << 20, v2=load_library(DIDCOMM)
    )
    public, secret = crypto_sign_seed_keypair(us.seed)
    library = _Library(us, them)
    config, options = ResolversConfig(library, library), UnpackConfig(unwrap_re_wrapping_forward=False)
    v1, v2, v2_from = _forwards(us, them)

    async def bare_v1() -> Any:
        return json.loads(crypto.unpack_message(v1, public, secret)[0])

    async def bare_v2() -> Any:
        return await unpack(config, v2.decode(), options)

    async def bare_v2_from() -> Any:
        return await unpack(config, v2_from.decode(), options)

    rows = []
    cases: list[tuple[str, bytes, Opening]] = [
        ("v1 anoncrypt", v1, bare_v1),
        ("v2 anoncrypt", v2, bare_v2),
        ("v2 authcrypt", v2_from, bare_v2_from),
    ]
    for name, envelope, bare in cases:
        bench.status(f"unwrap {name}, ours and the bare library")
        mine: list[float] = []
        theirs: list[float] = []
        for _ in range(bench.rounds):
            mine.append(await _microseconds(lambda envelope=envelope: ours.open(envelope), bench))  # type: ignore[misc]
            theirs.append(await _microseconds(bare, bench))
        added = [one - other for one, other in zip(mine, theirs, strict=True)]
        rows.append(
            ResultRow(f"unwrap a forward of 1 kB, {name}", number(median(mine), "µs"), number(median(theirs), "µs"))
        )
        rows.append(below(f"the same, what ours adds to the library, {name}", "µs", added, ADDED_US))
    for name, envelope in (("v1 anoncrypt", v1), ("v2 anoncrypt", v2)):
        bench.status(f"unwrap {name} on the loop and on {WORKERS} threads")
        on_loop: list[float] = []
        on_threads: list[float] = []
        for _ in range(bench.rounds):
            on_loop.append(await _rate(lambda envelope=envelope: ours.open(envelope), bench))  # type: ignore[misc]
            on_threads.append(await _rate_on_threads(ours, envelope, bench))
        ratio = median(on_threads) / median(on_loop)
        threads, loop = (number(median(rate), "/s") for rate in (on_threads, on_loop))
        rows.append(ResultRow(f"unwrap {name} on {WORKERS} threads / on the loop", threads, loop, f"{ratio:.2f}×"))
    return rows


def _forwards(us: Person, them: Person) -> tuple[bytes, bytes, bytes]:
    """Return forwards of the same 1 kB envelope: v1, anonymous v2, and authenticated v2."""
    inner = jwe(bytes(300), [public_half(them.agreement[0])])
    inner["ciphertext"] += "A" * max(0, 1000 - len(orjson.dumps(inner)))
    old = {"@type": "https://didcomm.org/routing/1.0/forward", "@id": "1", "to": them.key, "msg": inner}
    new = {
        "id": "1",
        "type": "https://didcomm.org/routing/2.0/forward",
        "from": them.did,
        "to": [us.did],
        "body": {"next": them.did},
        "attachments": [{"data": {"base64": b64(orjson.dumps(inner))}}],
    }
    to = [public_half(us.agreement[0])]
    v1 = orjson.dumps(crypto.pack_message(json.dumps(old), [verkey(us.key)]))
    return v1, orjson.dumps(jwe(new, to)), orjson.dumps(jwe(new, to, them.agreement[0]))


async def _microseconds(opening: Opening, bench: Bench) -> float:
    return 1e6 / await _rate(opening, bench)


async def _rate(opening: Opening, bench: Bench) -> float:
    done, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < bench.seconds / 3:
        for _ in range(50):
            await opening()
        done += 50
    return done / spent


async def _rate_on_threads(ours: LibraryEnvelopes, envelope: bytes, bench: Bench) -> float:
    """Return the rate with a thread pool and as many in flight as a busy door has."""
    loop = asyncio.get_running_loop()
    done = 0
    ends = time.perf_counter() + bench.seconds / 3

    async def one_after_the_other() -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await loop.run_in_executor(pool, _stepped, ours, envelope)
            done += 1

    started = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))
        return done / (time.perf_counter() - started)


def _stepped(ours: LibraryEnvelopes, envelope: bytes) -> None:
    """Run the coroutine without an event loop; with keys and documents in memory it never waits."""
    try:
        ours.open(envelope).send(None)
    except StopIteration:
        return
    raise RuntimeError("opening had to wait")
