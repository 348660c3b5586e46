"""Checks of coordinate-mediation 1.0, 2.0 and 3.0: grants, keylists and their pages."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from conformance.checks import CannotTryError, Level, expect
from conformance.didcomm.session import (
    SUITE,
    V1,
    V2,
    DidcommSession,
    Mailbox,
    eventually,
    written,
)
from pickup.client import Holder, ProblemError
from pickup.client.plaintext import Json, Plaintext
from pickup.rules.names import canonical
from pickup.rules.records import Generation

MUST, SHOULD, OWN = Level.MUST, Level.SHOULD, Level.OWN
RESULTS = ("client_error", "server_error", "no_change", "success")


@dataclass(frozen=True, slots=True)
class Mediation:
    """A version of the protocol."""

    id: str
    generation: Generation
    version: str
    source: str

    def type(self, name: str) -> str:
        """Return the type of a message; in 3.0 keylists are lists of recipients."""
        if self.version == "3.0":
            name = name.replace("keylist", "recipient")
        return f"coordinate-mediation/{self.version}/{name}"

    @property
    def recipient(self) -> str:
        """The field that names a key or a DID."""
        return "recipient_key" if self.generation is V1 else "recipient_did"

    async def mailbox(self, session: DidcommSession, *, queue: bool = False) -> Mailbox:
        """Make a wallet with mediation by this version; with ``queue`` one that can pick up."""
        pickup = "2.0" if self.generation is V1 else "3.0"
        return await session.mailbox(self.generation, mediation=self.version, pickup=pickup if queue else None)

    async def wallet(self, session: DidcommSession) -> Holder:
        """Make a wallet without mediation."""
        wallet = await session.wallet(self.generation, mediation=self.version)
        await session.offered(wallet, f"coordinate-mediation/{self.version}")
        return wallet

    def new_key(self, wallet: Holder) -> str:
        """Make a key or a DID that is not registered."""
        return wallet.wallet.new_key() if self.generation is V1 else wallet.wallet.new_did()

    async def update(self, wallet: Holder, *changes: tuple[str, str]) -> list[Json]:
        """Update the keylist by pairs of key and action, and return what the answer says of each."""
        updates = [{self.recipient: key, "action": action} for key, action in changes]
        answer = await wallet.ask(self.type("keylist-update"), {"updates": updates})
        expect(answer.type == self.type("keylist-update-response"), f"answered with {answer.type}")
        return list(answer.body["updated"])

    async def query(self, wallet: Holder, paginate: Json | None = None) -> Plaintext:
        """Ask for the keylist, or a page of it."""
        body = {} if paginate is None else {"paginate": paginate}
        answer = await wallet.ask(self.type("keylist-query"), body)
        expect(answer.type == self.type("keylist"), f"answered with {answer.type}")
        return answer

    def keys(self, answer: Plaintext) -> list[str | None]:
        """Return the keys of a keylist, in canonical form."""
        return [canonical(item[self.recipient]) for item in answer.body["dids" if self.version == "3.0" else "keys"]]


MEDIATION_1 = Mediation("mediation1", V1, "1.0", "RFC 0211")
MEDIATION_2 = Mediation("mediation2", V2, "2.0", "Coordinate Mediation 2.0")
MEDIATION_3 = Mediation("mediation3", V2, "3.0", "Coordinate Mediation 3.0")
ALL = (MEDIATION_1, MEDIATION_2, MEDIATION_3)

MediationCheck = Callable[[DidcommSession, Mediation], Awaitable[None]]


def each(
    name: str, level: Level, section: str, sentence: str, *, of: Sequence[Mediation] = ALL
) -> Callable[[MediationCheck], MediationCheck]:
    """Add a check for several versions; the source of an own rule is ``section`` alone."""

    def decorate(run: MediationCheck) -> MediationCheck:
        for version in of:
            source = section if level is OWN else f"{version.source} §{section}"
            SUITE.check(f"didcomm.{version.id}.{name}", level, source, sentence)(_of_version(run, version))
        return run

    return decorate


def _of_version(run: MediationCheck, version: Mediation) -> Callable[[DidcommSession], Awaitable[None]]:
    return lambda session: run(session, version)


@each(
    "request-is-granted",
    MUST,
    "Mediation Request",
    "If the mediator is willing to route messages, it will respond with a mediate-grant message.",
)
async def request_is_granted(session: DidcommSession, version: Mediation) -> None:
    wallet = await version.wallet(session)
    answer = await wallet.ask(version.type("mediate-request"))
    expect(answer.name == "mediate-grant", f"answered with {answer.type}")
    match version:
        case Mediation(version="1.0"):
            keys = answer.body["routing_keys"]
            expect(isinstance(answer.body["endpoint"], str), f"endpoint is {answer.body['endpoint']}")
            expect(keys and all(canonical(key) for key in keys), f"routing_keys is {keys}")
        case Mediation(version="2.0"):
            did = answer.body["routing_did"]
            expect(isinstance(did, str) and did.startswith("did:"), f"routing_did is {did}")
        case _:
            dids = answer.body["routing_did"]
            listed = isinstance(dids, list) and dids and all(str(did).startswith("did:") for did in dids)
            expect(listed, f"routing_did is {dids}")


@each(
    "keys-are-did-keys",
    MUST,
    "Encoding of keys",
    "All keys are encoded using the did:key method as per RFC 0360.",
    of=(MEDIATION_1,),
)
async def keys_are_did_keys(session: DidcommSession, version: Mediation) -> None:
    wallet = await version.wallet(session)
    grant = await wallet.ask(version.type("mediate-request"))
    updated = await version.update(wallet, (version.new_key(wallet), "add"))
    for key in (*grant.body["routing_keys"], *(item["recipient_key"] for item in updated)):
        expect(str(key).startswith("did:key:"), f"the mediator writes a key as {key}")


@each("add-is-confirmed", MUST, "Keylist Update Response", "Confirmation of requested keylist updates.")
async def add_is_confirmed(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    keys = [version.new_key(mailbox.holder) for _ in range(3)]
    updated = await version.update(mailbox.holder, *((key, "add") for key in keys))
    expect(len(updated) == 3, f"3 updates were sent, {len(updated)} confirmed")
    for key, item in zip(keys, updated, strict=False):
        expect(canonical(item[version.recipient]) == canonical(key), f"{key[:40]} is confirmed as {item}")
        expect(item["action"] == "add", f"the action add is confirmed as {item['action']}")
        expect(item["result"] == "success", f"the result is {item['result']}")


@each(
    "result-is-one-of-four",
    MUST,
    "Keylist Update Response",
    "result: One of client_error, server_error, no_change, success; describes the resulting state of the keylist "
    "update.",
)
async def result_is_one_of_four(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    key = version.new_key(mailbox.holder)
    for action, expected in (
        ("add", ("success",)),
        ("add", ("no_change", "success")),
        ("remove", ("success",)),
        ("remove", ("no_change", "success", "client_error")),
    ):
        (item,) = await version.update(mailbox.holder, (key, action))
        expect(item["result"] in RESULTS, f"{action} has the result {item['result']}")
        expect(item["result"] in expected, f"{action} has the result {item['result']}, not {' or '.join(expected)}")


@each(
    "repeated-update-is-no-change",
    SHOULD,
    "Keylist Update Response",
    "no_change describes the resulting state of the keylist update.",
)
async def repeated_update_is_no_change(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    key = version.new_key(mailbox.holder)
    for action in ("add", "remove"):
        await version.update(mailbox.holder, (key, action))
        (item,) = await version.update(mailbox.holder, (key, action))
        expect(item["result"] == "no_change", f"a second {action} has the result {item['result']}")


@each(
    "unknown-action",
    OWN,
    "docs/protocol.md Mediation",
    "Each update is done for itself: another action than add and remove is client_error for that one.",
)
async def unknown_action(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    key = version.new_key(mailbox.holder)
    updated = await version.update(mailbox.holder, (key, "replace"), (key, "add"))
    results = [item["result"] for item in updated]
    expect(results == ["client_error", "success"], f"replace, add have the results {results}")


@each(
    "query-lists-the-keys",
    MUST,
    "Key List",
    "Response to key list query, containing retrieved keys.",
)
async def query_lists_the_keys(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    key, removed = version.new_key(mailbox.holder), version.new_key(mailbox.holder)
    await version.update(mailbox.holder, (key, "add"), (removed, "add"))
    await version.update(mailbox.holder, (removed, "remove"))
    listed = set(version.keys(await version.query(mailbox.holder)))
    expect(
        listed == {canonical(mailbox.key), canonical(key)}, f"of 3 keys, one of them removed, {len(listed)} are listed"
    )


@each(
    "query-lists-no-others",
    MUST,
    "Key List Query",
    "Query mediator for a list of keys registered for this connection.",
)
async def query_lists_no_others(session: DidcommSession, version: Mediation) -> None:
    mailbox, other = await version.mailbox(session), await version.mailbox(session)
    try:
        listed = version.keys(await version.query(other.holder))
    except ProblemError as error:
        raise CannotTryError(f"it lists no keys: {error}") from error
    expect(canonical(mailbox.key) not in listed, "the key of another connection is listed")


@each("pages", SHOULD, "Key List Query", "paginate: limit and offset; pagination: count, offset and remaining.")
async def pages(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session)
    keys = [version.new_key(mailbox.holder) for _ in range(4)]
    await version.update(mailbox.holder, *((key, "add") for key in keys))
    found: list[str | None] = []
    for offset, remaining in ((0, 3), (2, 1), (4, 0)):
        answer = await version.query(mailbox.holder, {"limit": 2, "offset": offset})
        page = version.keys(answer)
        expect(len(page) <= 2, f"with limit 2, a page has {len(page)} keys")
        pagination = answer.body.get("pagination")
        expect(isinstance(pagination, dict), f"pagination is {pagination}")
        said = (pagination or {}).get("remaining")
        expect(said == remaining, f"of 5 keys, after offset {offset} and a page of 2, remaining is {said}")
        found += page
    expect(
        sorted(map(str, found)) == sorted(str(canonical(key)) for key in (mailbox.key, *keys)), "pages leave keys out"
    )


@each(
    "removed-key-gets-no-mail",
    SHOULD,
    "Flow",
    "The keylist-update and keylist-query methods are used over time to identify and remove keys that are no longer in "
    "use.",
)
async def removed_key_gets_no_mail(session: DidcommSession, version: Mediation) -> None:
    mailbox = await version.mailbox(session, queue=True)
    key = await mailbox.add_key()
    await version.update(mailbox.holder, (key, "remove"))
    await mailbox.try_to_send("to the removed key", key)
    await mailbox.send("to the other")
    await eventually(mailbox, 1)
    texts = await mailbox.texts(await mailbox.holder.fetch())
    expect(texts == ["to the other"], f"the queue holds {texts}")


@each(
    "key-of-another-connection",
    OWN,
    "docs/protocol.md D8",
    "A key that another connection holds cannot be registered (client_error).",
)
async def key_of_another_connection(session: DidcommSession, version: Mediation) -> None:
    mailbox, thief = await version.mailbox(session, queue=True), await version.mailbox(session, queue=True)
    (item,) = await version.update(thief.holder, (mailbox.key, "add"))
    expect(item["result"] == "client_error", f"a key of somebody else is registered with the result {item['result']}")
    await mailbox.send("note")
    await eventually(mailbox, 1)
    count = (await thief.holder.status()).count
    expect(count == 0, f"{count} of somebody else's messages are in the queue")


@each(
    "strangers-get-nothing",
    OWN,
    "docs/protocol.md D12",
    "Bad input is answered with a problem report where the sender is known.",
)
async def strangers_get_nothing(session: DidcommSession, version: Mediation) -> None:
    wallet = await version.wallet(session)
    update = {"updates": [{version.recipient: version.new_key(wallet), "action": "add"}]}
    for name, body in (("keylist-update", update), ("keylist-query", {})):
        answer = await session.request(wallet, written(wallet, version.type(name), body))
        expect(answer is not None and answer.name == "problem-report", f"{name} without mediation: {answer}")
