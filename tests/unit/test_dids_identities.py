"""The mediator's own identities: made once, kept sealed, moved and rotated without anybody losing them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import did_peer_2
import did_peer_4
import pydid
import pytest
from nacl.signing import SigningKey

from mediator.broker import Broker
from mediator.errors import EnvelopeError, SetupError, UnresolvedDidError
from mediator.mailboxes.bounds import Bounds
from mediator.store.base import Transaction
from pickup.broker import MediationBroker
from pickup.dids.identities import OwnIdentities, Vault
from pickup.dids.material import multibase, peer_2_fragments
from pickup.dids.own_dids import MAX_DIDS, IdentityIndex
from pickup.dids.resolver import read as read_did
from pickup.envelope.reading import V1Envelope, read
from pickup.envelope.v1 import V1Library
from pickup.rules.names import canonical, from_verkey, unbase58
from pickup.rules.records import Generation, Invitation, MediationRules, NewConnection, StoredIdentity
from pickup.rules.tables import MediationTransaction
from tests.harness.old_identity import OLD_DID, OLD_SECRET, OLD_URL
from tests.harness.stores import ram_store

KEY = bytes(range(32))
URL = "https://mediator.example.com/didcomm"
TENANT = "default"
SEED = bytes(range(100, 132))
INVITED = from_verkey(SigningKey(SEED).verify_key.encode())


class Counting(Broker):
    """Counts the looks at the store."""

    looks = 0

    async def read(self, look: Callable[[Transaction, int], Any]) -> Any:
        self.looks += 1
        return await super().read(look)


@pytest.fixture
async def broker() -> AsyncIterator[Counting]:
    one = Counting(ram_store(), Bounds())
    yield one
    await one.close()


async def opened(broker: Broker, url: str = URL, tenants: tuple[str, ...] = (TENANT,)) -> OwnIdentities:
    return await OwnIdentities.open(MediationBroker(broker, MediationRules()), Vault(KEY), tenants, url)


async def kept(broker: Broker) -> list[StoredIdentity]:
    return await broker.read(lambda tx, _now: tx.table(MediationTransaction).identities.all())


async def test_a_restart_finds_the_same_identity(broker: Counting) -> None:
    first = await opened(broker)
    again = await opened(broker)
    assert again.current(TENANT) == first.current(TENANT)
    assert len(await kept(broker)) == 1


@pytest.mark.rule("D8")
async def test_all_names_of_all_tenants_are_known_for_our_own(broker: Counting) -> None:
    identities = await opened(broker, tenants=(TENANT, "acme"))
    retired = identities.current(TENANT)
    await identities.rotate(TENANT)
    for one in (retired, identities.current(TENANT), identities.current("acme")):
        names_of = [one.key, one.v2_did, canonical(one.v1_did), f"did:sov:{one.sov_did}"]
        assert all(name is not None and identities.owns(name) for name in names_of)
        document = identities.document(one.v2_did)
        for key in (*document.key_agreement, *document.authentication):
            assert identities.owns(f"did:key:{multibase(key.jwk)}")
    assert not identities.owns("did:web:elsewhere.example")
    assert not identities.owns("")


async def test_every_tenant_has_keys_of_its_own(broker: Counting) -> None:
    identities = await opened(broker, tenants=(TENANT, "acme"))
    one, other = identities.current(TENANT), identities.current("acme")
    assert not {one.key, one.v2_did, one.v1_did, one.sov_did, one.web_did} & {
        other.key,
        other.v2_did,
        other.v1_did,
        other.sov_did,
        other.web_did,
    }
    assert await identities.tenant_of(other.key) == "acme"
    assert await identities.tenant_of(f"{one.v2_did}#key-1") == TENANT


async def test_instances_that_start_at_once_are_one_mediator(broker: Counting) -> None:
    all_of_them = await asyncio.gather(*(opened(broker) for _ in range(5)))
    for one in all_of_them:
        await one.renew()
    assert len({one.current(TENANT) for one in all_of_them}) == 1
    for one in all_of_them:
        for other in all_of_them:
            assert await one.tenant_of(other.current(TENANT).key) == TENANT


async def test_the_v2_document_as_the_libraries_of_others_read_it(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    for did, urls in ((me.v2_did, [URL]), (me.socket_did, [URL, "wss://mediator.example.com/didcomm"])):
        theirs = did_peer_2.resolve(did)
        ours = identities.document(did)
        assert [key.curve for key in ours.key_agreement] == ["X25519"]
        assert [key.curve for key in ours.authentication] == ["Ed25519"]
        assert [key.kid for key in ours.key_agreement] == [did + kid for kid in theirs["keyAgreement"]]
        assert [service.endpoint for service in ours.services] == urls
        # DIDComm v2.1 §service-endpoint: an object, or several; most libraries read one only.
        assert [service["serviceEndpoint"]["uri"] for service in theirs["service"]] == urls
        # pydid reads it as it stands in the DID, and as our resolver gives it to the envelope library.
        for document in (theirs, ours.raw):
            read = pydid.deserialize_document(dict(document))
            assert len(read.key_agreement) == 1
        assert [type(service).__name__ for service in pydid.deserialize_document(theirs).service] == [
            "DIDCommV2Service"
        ] * len(urls)
        assert len(did) < 500


PEER_DID = re.compile(r"did:peer:2(\.[AEVID]z[1-9a-km-zA-HJ-NP-Z]{46,47})+(\.S[0-9a-zA-Z]*)?")
"""The strictest of what readers match a did:peer:2 with: the JVM's org.dif and ``peerdid`` 0.5.2."""


@pytest.mark.parametrize("url", [URL, "http://127.0.0.1:8080/didcomm", "https://a.example:8443/~x/%C3%BC?/didcomm"])
async def test_the_v2_did_is_of_the_form_that_all_readers_match(broker: Counting, url: str) -> None:
    assert PEER_DID.fullmatch((await opened(broker, url)).current(TENANT).v2_did)


async def test_an_old_database_is_shown_in_the_new_form(broker: Counting) -> None:
    def add(tx: Transaction, _now: int) -> None:
        stored = Vault(KEY).seal(OLD_SECRET)
        tx.table(MediationTransaction).identities.add(TENANT, stored, (OLD_DID,), 0)

    await broker.write(add)
    identities = await opened(broker, OLD_URL)
    (one,) = await kept(broker)
    me = identities.current(TENANT)
    assert PEER_DID.fullmatch(me.v2_did)
    assert {OLD_DID, me.v2_did, me.socket_did} <= set(one.dids)
    # Who knows the old DID is served on by all its keys, and nobody else needs its long keys.
    old = identities.document(OLD_DID)
    assert [key.curve for key in old.key_agreement] == ["X25519", "P-256", "P-384"]
    assert identities.known_as(OLD_DID) == me
    for key in (*old.key_agreement, *old.authentication):
        assert identities.kid(key.kid).curve == key.curve
        assert await identities.tenant_of(key.kid) == TENANT
    assert await opened(broker, OLD_URL) is not identities
    assert await kept(broker) == [one]
    # New keys have the new form only.
    new = await identities.rotate(TENANT)
    assert identities.known_as(OLD_DID) == me != new
    assert len(identities.document(new.web_did).key_agreement) == 1


async def test_the_v1_document_as_the_libraries_of_others_read_it(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    read = pydid.deserialize_document(did_peer_4.resolve(me.v1_did))
    assert [type(service).__name__ for service in read.service] == ["DIDCommV1Service"] * 2
    assert [service.service_endpoint for service in read.service] == [URL, "wss://mediator.example.com/didcomm"]
    (method,) = read.verification_method[:1]
    assert (method.type, from_verkey(unbase58(method.public_key_base58))) == ("Ed25519VerificationKey2018", me.key)
    for did in (me.v1_did, canonical(me.v1_did)):
        ours = identities.document(did or "")
        assert ours.did == did
        assert [service.recipient_keys for service in ours.services] == [(me.key,)] * 2
    assert len(me.v1_did) < 1500


async def test_every_key_id_that_a_peer_may_use_has_its_secret(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    for did in (me.v2_did, me.v1_did, canonical(me.v1_did) or "", me.web_did or ""):
        document = identities.document(did)
        for key in (*document.key_agreement, *document.authentication):
            secret = identities.kid(key.kid)
            assert (secret.kid, {**secret.jwk, "d": ""}) == (key.kid, {**key.jwk, "d": ""})
            assert await identities.tenant_of(key.kid) == TENANT
    # Older readers of did:peer:2 name a key by its multibase: whole, without its z, or eight characters of that.
    for did in (me.v2_did, me.socket_did):
        fragment = did.partition(".E")[2].partition(".")[0]
        for kid in (fragment, fragment[1:], fragment[1:9]):
            assert identities.kid(f"{did}#{kid}") is not None
            assert await identities.tenant_of(f"{did}#{kid}") == TENANT
    assert identities.kid(f"{me.v2_did}#key-9") is None


@pytest.mark.rule("D8")
async def test_the_did_of_an_invitation_is_opened_for_good(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    dids = identities.invitation_dids(TENANT, INVITED)
    assert PEER_DID.fullmatch(dids[0])
    await identities.rotate(TENANT)
    again = await opened(broker, "https://moved.example.com/didcomm")
    for did in dids:
        assert again.known_as(did).key == me.key
        assert again.owns(did)
        (key,) = read_did(did).key_agreement
        for kid in (key.kid, *(f"{did}#{fragment}" for fragment in peer_2_fragments(multibase(key.jwk)))):
            secret = again.kid(kid)
            assert (secret.kid, {**secret.jwk, "d": ""}) == (kid, {**key.jwk, "d": ""})
            assert await again.tenant_of(kid) == TENANT
        assert again.kid(f"{did}#key-2") is None
    # Without a key of ours it is somebody else's.
    other = dids[0].replace(".Ez6LS", ".Ez6LT")
    assert again.find(other) is None
    assert not again.owns(other)
    assert again.kid(f"{other}#key-1") is None


async def test_the_v1_key_is_the_seed_of_its_name(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    seed = await identities.seed(me.key)
    assert seed is not None
    assert from_verkey(SigningKey(seed).verify_key.encode()) == me.key
    assert await identities.seed(INVITED) is None


async def test_an_invitations_key_opens_while_the_invitation_is_there(broker: Counting) -> None:
    identities = await opened(broker)
    invitation = Invitation("i", "acme", INVITED, Vault(KEY).seal(SEED), "label", 0)
    await broker.write(lambda tx, _now: tx.table(MediationTransaction).invitations.put(invitation))
    assert await identities.seed(INVITED) == SEED
    assert await identities.tenant_of(INVITED) == "acme"
    await broker.write(lambda tx, _now: tx.table(MediationTransaction).invitations.remove(invitation))
    assert await identities.seed(INVITED) is None
    with pytest.raises(EnvelopeError):
        await identities.tenant_of(INVITED)


async def test_after_a_rotation_the_old_still_opens_and_is_known(broker: Counting) -> None:
    identities = await opened(broker)
    old = identities.current(TENANT)
    new = await identities.rotate(TENANT)
    assert identities.current(TENANT) == new
    assert not {old.key, old.v2_did, old.v1_did} & {new.key, new.v2_did, new.v1_did}
    assert await identities.seed(old.key) is not None
    assert identities.kid(f"{old.v2_did}#key-1") is not None
    for did in (old.v2_did, old.v1_did, canonical(old.v1_did) or "", old.sov_did, old.key):
        assert identities.known_as(did) == old
    assert await identities.tenant_of(old.key) == TENANT
    retired = [one.retired_at is not None for one in await kept(broker)]
    assert retired == [True, False]


async def test_the_did_web_stays_through_a_rotation_with_new_keys(broker: Counting) -> None:
    identities = await opened(broker)
    old = identities.current(TENANT)
    assert old.web_did is not None
    before = identities.document(old.web_did)
    new = await identities.rotate(TENANT)
    after = identities.document(old.web_did)
    assert before is not None
    assert after is not None
    assert new.web_did == old.web_did
    assert identities.known_as(old.web_did) == new
    assert {key.kid for key in before.key_agreement}.isdisjoint(key.kid for key in after.key_agreement)
    # What was sealed while the old document was cached somewhere is opened.
    assert all(identities.kid(key.kid) for key in (*before.key_agreement, *after.key_agreement))


async def test_an_unknown_key_reveals_a_rotation_elsewhere(broker: Counting) -> None:
    here, there = await opened(broker), await opened(broker)
    new = await there.rotate(TENANT)
    assert here.kid(f"{new.v2_did}#key-1") is None
    assert await here.renew()
    assert here.kid(f"{new.v2_did}#key-1") is not None
    assert here.current(TENANT) == new


async def test_a_v1_key_of_a_rotation_elsewhere_is_found_by_itself(broker: Counting) -> None:
    here, there = await opened(broker), await opened(broker)
    sender = V1Library(there)
    for _ in range(3):
        # Also when the store was read a moment before.
        assert not await here.renew()
        new = await there.rotate(TENANT)
        sealed = await sender.seal(b"{}", [INVITED, new.key], None)
        envelope = read(sealed, len(sealed))
        assert isinstance(envelope, V1Envelope)
        opened_here = await asyncio.gather(*(V1Library(here).open(envelope) for _ in range(10)))
        assert {one.recipient for one in opened_here} == {new.key}
        assert await here.tenant_of(new.key) == TENANT


@pytest.mark.rule("D12")
async def test_unknown_keys_make_the_store_looked_at_now_and_then(broker: Counting) -> None:
    identities = await opened(broker)
    assert not await identities.renew()
    before = broker.looks
    assert await asyncio.gather(*(identities.renew() for _ in range(100))) == [False] * 100
    assert broker.looks - before <= 1


async def test_a_rotation_right_after_a_look_is_seen_by_all_who_ask(broker: Counting) -> None:
    here, there = await opened(broker), await opened(broker)
    for _ in range(3):
        assert not await here.renew()
        new = await there.rotate(TENANT)
        assert await asyncio.gather(*(here.renew() for _ in range(10))) == [True] * 10
        assert here.current(TENANT) == new


async def test_after_a_move_the_old_dids_resolve_and_open(broker: Counting) -> None:
    old = (await opened(broker, "http://127.0.0.1:8080/didcomm")).current(TENANT)
    identities = await opened(broker, URL)
    new = identities.current(TENANT)
    assert (new.id, new.key) == (old.id, old.key)
    assert new.v2_did != old.v2_did
    assert identities.document(old.v2_did).services[0].endpoint == "http://127.0.0.1:8080/didcomm"
    for did in (old.v2_did, old.v1_did, canonical(old.v1_did) or ""):
        assert identities.known_as(did) == new
    assert identities.kid(f"{old.v2_did}#key-2") is not None
    assert identities.kid(f"{new.v2_did}#key-2") is not None


async def test_what_an_identity_is_known_by_is_bounded(broker: Counting) -> None:
    for port in range(1, MAX_DIDS):
        identities = await opened(broker, f"http://127.0.0.1:{port}/didcomm")
    (one,) = await kept(broker)
    assert len(one.dids) == MAX_DIDS
    me = identities.current(TENANT)
    assert {me.v2_did, me.v1_did} <= set(one.dids)
    assert identities.known_as(me.v1_did) == me


async def test_another_key_does_not_open_what_is_kept(broker: Counting) -> None:
    await opened(broker)
    with pytest.raises(SetupError, match=r"didcomm\.key"):
        await OwnIdentities.open(MediationBroker(broker, MediationRules()), Vault(bytes(32)), [TENANT], URL)
    assert len(await kept(broker)) == 1


@pytest.mark.parametrize(
    ("url", "did", "path"),
    [
        (URL, "did:web:mediator.example.com:didcomm", "/didcomm/did.json"),
        ("https://mediator.example.com", "did:web:mediator.example.com", "/.well-known/did.json"),
        ("https://mediator.example.com/", "did:web:mediator.example.com", "/.well-known/did.json"),
        ("https://a.example:8443/x/y", "did:web:a.example%3A8443:x:y", "/x/y/did.json"),
        ("http://a.example/didcomm", None, "/didcomm/did.json"),
        ("https://10.1.2.3/didcomm", None, "/didcomm/did.json"),
        ("https://[::1]:8443/didcomm", None, "/didcomm/did.json"),
    ],
)
async def test_the_did_web_is_where_its_document_is_served(broker: Counting, url, did, path) -> None:
    identities = await opened(broker, url)
    me = identities.current(TENANT)
    assert me.web_did == did
    document = identities.web_document(path)
    assert (document and document["id"]) == did
    if document is not None:
        read = pydid.deserialize_document(json.loads(json.dumps(document)))
        assert len(read.key_agreement or []) == 1
        assert identities.web_document("/other/did.json") is None


async def test_the_did_webs_of_tenants_are_below_each_other(broker: Counting) -> None:
    identities = await opened(broker, tenants=(TENANT, "acme"))
    assert identities.current("acme").web_did == "did:web:mediator.example.com:didcomm:acme"
    assert identities.web_document("/didcomm/acme/did.json")["id"] == "did:web:mediator.example.com:didcomm:acme"


async def test_what_is_not_ours(broker: Counting) -> None:
    identities = await opened(broker)
    assert identities.document("did:web:somebody.else") is None
    for name in ("", "did:web:somebody.else", INVITED):
        with pytest.raises(UnresolvedDidError):
            identities.known_as(name)
    for recipient in (INVITED, f"{INVITED}#{INVITED[8:]}", "did:web:somebody.else#key", ""):
        with pytest.raises(EnvelopeError):
            await identities.tenant_of(recipient)


async def test_the_long_form_of_whoever_is_connected(broker: Counting) -> None:
    identities = await opened(broker)
    other = Broker(ram_store(), Bounds())
    long = (await opened(other)).current(TENANT).v1_did
    await other.close()
    short = canonical(long) or ""
    assert await identities.long_form(short) is None
    new = NewConnection(TENANT, Generation.V2, long, identities.current(TENANT).v2_did, (short,), 0)
    await broker.write(lambda tx, _now: tx.table(MediationTransaction).connections.add(new))
    assert await identities.long_form(short) == long


async def test_secrets_are_in_no_text_and_not_in_the_store(broker: Counting) -> None:
    identities = await opened(broker)
    me = identities.current(TENANT)
    seed = await identities.seed(me.key)
    secret = identities.kid(f"{me.v2_did}#key-2")
    assert seed is not None
    assert secret is not None
    (one,) = await kept(broker)
    (index,) = [value for value in vars(identities).values() if isinstance(value, IdentityIndex)]
    for text in (repr(me), repr(secret), repr(identities), repr(vars(identities)), repr(index), repr(index.secrets)):
        assert secret.jwk["d"] not in text
        assert repr(seed)[2:-1] not in text
    assert seed not in one.sealed
    assert secret.jwk["d"].encode() not in one.sealed
