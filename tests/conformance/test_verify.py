"""Each kind of damage to rows is found by ``mediator verify``, and none where there is none."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mediator.mailboxes import sending
from mediator.mailboxes.fetching import Deliver
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import Retention
from mediator.mailboxes.message import Draft
from mediator.mailboxes.sending import Send
from mediator.mailboxes.session import SHARE_FROM
from mediator.mailboxes.transaction import Transaction
from mediator.store.base import Store
from registry.index.vectors import pack_rows
from registry.records import CardVectors
from tests.harness.agents import Agency
from tests.harness.broker import HOUR
from tests.harness.mediation import Mediation, key
from tests.harness.stores import undone
from tests.harness.verified import StoreSnapshots, damage_in

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "verify.md"
SPACE = "model@fingerprint/float32/4/1"
DAMAGE = [
    ("orphan_rows", "DELETE FROM mailbox WHERE address = 'task'"),
    ("orphan_rows", "UPDATE lease SET group_no = 99"),
    ("orphan_rows", "UPDATE delayed SET mailbox_no = 99"),
    ("orphan_rows", "UPDATE pushed SET mailbox_no = 99"),
    ("mailbox_counters", "UPDATE mailbox SET messages = messages + 1 WHERE address = 'task'"),
    ("mailbox_counters", "UPDATE mailbox SET bytes = 0 WHERE address = 'task'"),
    ("mailbox_counters", "DELETE FROM message WHERE msg_id = 0"),
    ("next_id", "UPDATE message SET msg_id = 5000 WHERE msg_id = 3"),
    ("id_ahead", "UPDATE dedup SET msg_id = 5000"),
    ("id_ahead", "UPDATE pushed SET msg_id = 5000"),
    ("id_ahead", "UPDATE lease SET msg_id = msg_id + 5000"),
    ("dedup_count", "DELETE FROM dedup"),
    ("held_counters", "UPDATE held SET bytes = bytes + 1"),
    ("held_counters", "DELETE FROM held"),
    ("message_values", "UPDATE message SET lane = 7 WHERE msg_id = 1"),
    ("message_values", "UPDATE delayed SET due_at = 0"),
    ("payload_missing", "UPDATE message SET payload = NULL WHERE msg_id = 1"),
    ("payload_missing", "DELETE FROM body"),
    ("payload_size", "UPDATE message SET size = size + 1 WHERE key IS NULL AND extra IS NULL AND tags IS NULL"),
    ("payload_size", "UPDATE outbox SET size = 1"),
    ("message_details", "UPDATE message SET extra = {junk} WHERE extra IS NOT NULL"),
    ("message_details", "UPDATE message SET key = 'another key' WHERE key IS NOT NULL"),
    ("message_order", "UPDATE message SET created_at = created_at - 9000 WHERE msg_id = 2"),
    ("shared_payloads", "UPDATE body SET refs = refs + 1"),
    ("group_state", "UPDATE consumer SET state = {junk} WHERE push = 0"),
    ("lease_values", "UPDATE lease SET lane = 3 - lane"),
    ("lease_values", "UPDATE lease SET deliveries = 0 WHERE dead = 1"),
    ("secret_rows", "DELETE FROM send_only_key"),
    ("connection_state", "UPDATE connection SET state = {junk}"),
    ("connection_mailbox", "UPDATE mailbox SET kind = 'standard' WHERE kind = 'mediation'"),
    ("keylist", "UPDATE route SET connection_no = 99"),
    ("keylist", "UPDATE route SET mailbox_no = 1"),
    ("keylist", "UPDATE route_key SET route = 'gone'"),
    ("key_count", "UPDATE connection SET routes = routes + 1"),
    ("callers", "UPDATE caller SET connection_no = 99"),
    ("callers", "DELETE FROM caller"),
    ("identities", "UPDATE identity SET dids = {junk}"),
    ("agent_cards", "DELETE FROM agent_card"),
    ("agent_cards", "DELETE FROM agent"),
    ("agent_names", "UPDATE agent_card SET name = {junk}"),
    ("agent_count", "UPDATE agent_count SET agents = 5"),
    ("agent_count", "DELETE FROM agent_count"),
    ("agent_revisions", "UPDATE registry_clock SET revision = 0"),
    ("agent_vectors", "UPDATE agent_vectors SET agent_no = 99"),
    ("agent_vectors", "UPDATE agent_vectors SET card_revision = 99"),
    ("vector_shape", "UPDATE agent_vectors SET vectors = {junk}"),
]


class OneSnapshot(StoreSnapshots):
    """A transaction that is not committed, in place of all snapshots."""

    def __init__(self, store: Store, tx: Transaction) -> None:
        super().__init__(store)
        self._ask = tx.session.dialect.execute

    @contextmanager
    def open(self) -> Iterator[object]:
        yield self._ask


def furnish(store: Store) -> None:
    """Use everything there is, by the rules."""
    mail = Mediation(store)
    mail.create()
    mail.create("other", retention=Retention.UNTIL_ACK)
    for number, lane in enumerate((*Lane, *Lane)):
        mail.advance(1000)
        more = {"key": "k", "tags": ("a", "b")} if number == 2 else {"headers": {"a": "ü"}} if number == 5 else {}
        assert mail.send(b"x" * number, lane=lane, **more) == number
    mail.send(dedup_id="once", reply_to="reply", ttl=HOUR)
    mail.send(b"later", delay=HOUR)
    mail.send(b"archived", archive=True, to="other")
    large = b"x" * SHARE_FROM
    shared = [Send("default", box, Draft(large)) for box in ("task", "other")]
    mail.run(lambda tx: [sending.send(tx, mail.bounds, mail.quotas, each, mail.now) for each in shared])
    mail.fetch(deliver=Deliver.EARLIEST, num_msgs=5, ack_wait=1000, max_deliver=1)
    mail.advance(2000)
    mail.fetch(num_msgs=1, ack_wait=1000)
    mail.run(lambda tx: tx.pushed.raise_to(tx.mailboxes.find("default", "task"), [0, 1, 2, 3]))
    holder = mail.holder(1, key(2), key(3))
    mail.run(lambda tx: tx.routes.add_keys(tx.routes.find("default", key(2)), ["did:key:z6LSinside"]))
    mail.forward([key(2)], b"sealed", b"mail")
    assert mail.mailbox_of(holder).messages == 2
    mail.run(lambda tx: tx.identities.add("default", b"sealed", ["did:example:me"], mail.now))
    agency = Agency(store, now=mail.now)
    agent = agency.register("task", "name", "text")
    vectors = pack_rows(np.ones((2, 4), np.float32))
    agency.run(lambda tx: tx.vectors.save(SPACE, [CardVectors(agent.id, agent.card_revision, vectors)]))
    agency.register("other")
    agency.unregister("other")


def test_counters_are_mended_as_the_guide_says(store: Store):
    furnish(store)
    statements = re.search(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1].split(";")[:-1]
    with undone(store) as tx:
        run = tx.session.dialect.execute
        for sql in ("UPDATE mailbox SET messages = 9, bytes = 9, dedup_ids = 9", "UPDATE held SET messages = 9"):
            run(sql)
        run("UPDATE connection SET routes = 9")
        run("UPDATE agent_count SET agents = 9")
        assert damage_in(OneSnapshot(store, tx))
        for sql in statements:
            run(sql.strip())
        assert damage_in(OneSnapshot(store, tx)) == []


def test_every_kind_of_damage_to_rows_is_found(store: Store):
    furnish(store)
    assert damage_in(store) == []
    junk = "decode('ff00', 'hex')" if not store.quick else "x'ff00'"
    for code, sql in DAMAGE:
        with undone(store) as tx:
            tx.session.dialect.execute(sql.replace("{junk}", junk) + " RETURNING 1")
            found = damage_in(OneSnapshot(store, tx))
        assert any(text.startswith(f"{code}: ") for text in found), (code, sql, found)
    assert damage_in(store) == []
