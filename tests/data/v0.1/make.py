"""Makes the data of an older version, for tests/slow/test_upgrade.py.

    git worktree add --detach OLD b224eb4        (and again with f9d8045)
    PYTHONPATH=OLD .venv/bin/python tests/data/v0.1/make.py OLD tests/data/v0.1/b224eb4.tar.xz

It runs the service of the checkout OLD, uses it as clients do, stops it, and packs its data directory, the files of two
wallets that it served, and `facts.json` with what is in neither. The keys in there open nothing but this data.
"""

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import nats

from pickup.client import Holder, Sender, Wallet

HTTP = "127.0.0.1:18999"
NATS = "127.0.0.1:18998"
CENTURY = 3_155_760_000
"""The longest delay, in seconds."""
CARD = {"name": "Translator", "description": "Translates contracts into French", "mailbox": "mq9://host/translator.in"}


def main(old: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "PYTHONPATH": str(old),
            "MEDIATOR_INSTANCE": "old",
            "MEDIATOR_REGISTRY__SEMANTIC": "false",
            "MEDIATOR_DIDCOMM__PUBLIC_URL": f"http://{HTTP}",
        }
        data = str(folder / "data")
        command = [sys.executable, "-m", "mediator"]
        serve = [*command, "serve", "--data-dir", data, "--nats", NATS, "--http", HTTP]
        # The folder in which it is started comes before PYTHONPATH.
        service = subprocess.Popen(serve, env=environment, cwd=old)
        try:
            wait_until_ready()
            said = subprocess.check_output([*command, "invite", "--json", "--data-dir", data], env=environment, cwd=old)
            facts = asyncio.run(use(folder, json.loads(said)))
        finally:
            service.terminate()
            service.wait()
        (folder / "facts.json").write_text(json.dumps(facts, indent=2))
        with tarfile.open(out, "w:xz") as packed:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not path.name.endswith((".lock", ".reserve")) and "nats" not in path.name:
                    packed.add(path, str(path.relative_to(folder)))


def wait_until_ready() -> None:
    """Wait until /readyz says 200."""
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://{HTTP}/readyz")
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the service is not ready")


async def use(folder: Path, invitation: dict[str, str]) -> dict[str, Any]:
    """Do what clients do, and return what is needed to go on."""
    return await use_nats() | await use_wallets(folder, invitation)


async def use_nats() -> dict[str, Any]:
    """Mailboxes, messages in lanes, groups, delayed mail, an agent."""
    client = await nats.connect(f"nats://{NATS}")

    async def ask(subject: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = json.loads((await client.request(f"$mq9.AI.{subject}", data, 10, headers=headers)).data)
        if answer.get("error"):
            raise SystemExit(f"{subject}: {answer}")
        return answer

    await ask("MAILBOX.CREATE", {"name": "orders", "desc": "Orders of all shops", "tags": ["shop"]})
    await ask("MAILBOX.CREATE", {"name": "jobs", "retention": "until_ack", "ack_wait_ms": 1000})
    for lane in ("normal", "low", "urgent", "critical"):
        await ask("MSG.SEND.orders", f"{lane} order".encode(), {"mq9-priority": lane, "shop": "Zürich"})
    await ask("MSG.SEND.orders", b"price 1", {"mq9-key": "price"})
    await ask("MSG.SEND.orders", b"price 2", {"mq9-key": "price", "mq9-tags": "news", "mq9-dedup-id": "p2"})
    await ask("MSG.SEND.orders", bytes(range(256)))
    await ask("MSG.SEND.orders", b"due while the service was off", {"mq9-delay": "60"})
    await ask("MSG.SEND.orders", b"not due", {"mq9-delay": str(CENTURY)})
    config = {"num_msgs": 2}
    for group in ("position", "begun"):
        fields = {"group_name": group, "deliver": "earliest", "config": config}
        first = await ask("MSG.FETCH.orders", fields)
        if group == "position":
            ids = [message["msg_id"] for message in first["messages"]]
            await ask("MSG.ACK.orders", {"group_name": group, "mail_address": "orders", "msg_ids": ids})
    for number in range(4):
        await ask("MSG.SEND.jobs", f"job {number}".encode())
    fetched = await ask("MSG.FETCH.jobs", {"group_name": "workers", "deliver": "earliest", "config": {"num_msgs": 3}})
    ids = [message["msg_id"] for message in fetched["messages"]]
    # The first and the third are done; the second is leased, and its lease ends while the service is off.
    await ask("MSG.ACK.jobs", {"group_name": "workers", "mail_address": "jobs", "msg_ids": [ids[0], ids[2]]})
    await ask("AGENT.REGISTER", CARD)
    newest = (await ask("MSG.SEND.orders", b"last"))["msg_id"]
    await client.close()
    return {"newest": newest}


async def use_wallets(folder: Path, invitation: dict[str, str]) -> dict[str, Any]:
    """A wallet of each generation with queued mail; of the one of v1 some was acknowledged."""
    keys = {}
    async with Sender() as sender:
        for generation in ("v1", "v2"):
            wallet = Wallet(folder / f"wallet-{generation}.json")
            async with await Holder.connect(invitation[f"{generation}_url"], wallet=wallet) as holder:
                await holder.mediate()
                keys[generation] = key = await holder.add_key()
                for number in range(3):
                    text = f"queued {number}"
                    if generation == "v1":
                        message = {"@type": "https://didcomm.org/basicmessage/1.0/message", "@id": f"before-{number}"}
                        message["content"] = text
                        await sender.send_v1(key, holder.link.routing, holder.link.endpoint or "", message)
                    else:
                        type = "https://didcomm.org/basicmessage/2.0/message"
                        message_v2 = {"id": f"before-{number}", "type": type, "body": {"content": text}}
                        await sender.send_v2(key, holder.link.routing[0], holder.link.url("http"), message_v2)
                (first,) = await holder.fetch(limit=1)
                await holder.received([first.id])
    return {"keys": keys}


main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
