"""didcomm-rust seals for the mediator's own DIDs, given their documents, and the mediator opens it."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from mediator.broker import Broker
from mediator.http.guard import Guard
from mediator.mailboxes.bounds import Bounds
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities, Vault
from pickup.dids.resolver import CachingResolver, DidWebResolver
from pickup.envelope.library import DIDCOMM_MESSAGING, LibraryEnvelopes, load_library
from pickup.rules.names import canonical
from pickup.rules.records import MediationRules
from tests.harness.node import Rust
from tests.harness.old_identity import OLD_DID, OLD_SECRET, OLD_URL
from tests.harness.people import Person
from tests.harness.stores import ram_store

MESSAGE = {"id": "1", "type": "https://didcomm.org/trust-ping/2.0/ping", "body": {}}


@pytest.fixture
async def identities() -> AsyncIterator[OwnIdentities]:
    broker = Broker(ram_store(), Bounds())
    vault, mediation = Vault(bytes(32)), MediationBroker(broker, MediationRules())
    await mediation.write(lambda tx, now: tx.identities.add("default", vault.seal(OLD_SECRET), [OLD_DID], now))
    yield await OwnIdentities.open(mediation, vault, ["default"], OLD_URL)
    await broker.close()


class Documented:
    """Somebody of whom rust knows a document and nothing else, in the form that its users' resolvers hand it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.document = self
        self.raw = {**raw, "service": [_nested(service) for service in raw["service"]]}


def _nested(service: Mapping[str, Any]) -> dict[str, Any]:
    endpoint = {"uri": service["serviceEndpoint"], "accept": service["accept"], "routing_keys": service["routingKeys"]}
    return {"id": service["id"], "type": service["type"], "serviceEndpoint": endpoint}


@pytest.fixture
async def envelopes(identities: OwnIdentities) -> AsyncIterator[LibraryEnvelopes]:
    guard = Guard()
    yield LibraryEnvelopes(
        CachingResolver(identities, DidWebResolver(guard)),
        identities,
        max_bytes=1 << 20,
        v2=load_library(DIDCOMM_MESSAGING),
    )
    await guard.close()


def sealed(rust: Rust, did: str, to: str, raw: Mapping[str, Any]) -> bytes:
    return rust.pack({**MESSAGE, "to": [did]}, to, None, cast("list[Person]", [Documented(raw)]))


@pytest.mark.parametrize("name", ["v2_did", "socket_did", "v1_did", "short", "web_did"])
async def test_rust_seals_for_each_of_our_dids(rust: Rust, identities, envelopes, name) -> None:
    me = identities.current("default")
    did = canonical(me.v1_did) if name == "short" else getattr(me, name)
    document = identities.document(did)
    opened = await envelopes.open(sealed(rust, did, did, document.raw))
    assert (opened.recipient, opened.sender) == (document.key_agreement[0].kid, None)
    assert opened.plaintext["id"] == "1"
    assert identities.known_as(opened.recipient.partition("#")[0]) == me


# didcomm-rust has no P-384, and goes around such keys.
@pytest.mark.parametrize(("name", "at"), [("v2_did", 0), ("web_did", 0), ("web_did", 1), ("old", 0), ("old", 1)])
async def test_rust_seals_for_each_of_our_keys(rust: Rust, identities, envelopes, name, at) -> None:
    did = OLD_DID if name == "old" else getattr(identities.current("default"), name)
    document = identities.document(did)
    kid = document.key_agreement[at].kid
    opened = await envelopes.open(sealed(rust, did, kid, document.raw))
    assert opened.recipient == kid


async def test_rust_seals_for_the_did_that_a_rotation_retired(rust: Rust, identities, envelopes) -> None:
    old = identities.current("default")
    envelope = sealed(rust, old.v2_did, old.v2_did, identities.document(old.v2_did).raw)
    await identities.rotate("default")
    opened = await envelopes.open(envelope)
    assert identities.known_as(opened.recipient.partition("#")[0]) == old
