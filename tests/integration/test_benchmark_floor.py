"""The floor that SEND is compared with keeps what it promises: what it answered is stored where a SEND would be."""

from pathlib import Path

from benchmarks import counting, prefill
from benchmarks.servers import BareServer


def test_floor_answers_after_the_message_is_stored(tmp_path: Path):
    folder = tmp_path / "floor"
    prefill.add_mailboxes(folder, ["send"])
    server = BareServer(folder)
    try:
        sent = counting.keep(server.url, "$mq9.AI.MSG.SEND.send", prefill.PAYLOAD, b'"error":""', 10, 0.1)
    finally:
        server.process.kill()
        server.process.wait()
    with prefill.store(folder) as store, store.reading() as tx:
        mailbox = tx.mailboxes.find(prefill.TENANT, "send")
        assert mailbox is not None
        assert mailbox.messages == mailbox.next_id == sent.count > 0
        assert mailbox.bytes == sent.count * len(prefill.PAYLOAD)
