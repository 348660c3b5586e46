"""The mailboxes in SQL."""

from collections.abc import Iterable, Sequence
from hmac import compare_digest

from mediator.mailboxes import rows
from mediator.mailboxes.address import PUBLIC, is_send_only
from mediator.mailboxes.mailbox import Kind, Mailbox, MailboxRow, NewMailbox, Retention
from mediator.mailboxes.message import MAX_EXPIRED, Usage
from mediator.mailboxes.rows import KeptMailbox, Row
from mediator.mailboxes.session import Table, send_only_addresses
from mediator.mailboxes.tables.messages import EXPIRED

MAILBOXES = "mailboxes"
"""What the mailboxes of a tenant are counted under, with its name."""


class Mailboxes(Table):
    """The mailboxes themselves."""

    def find(self, tenant: str, address: str) -> Mailbox | None:
        """Return the mailbox that holds the address, expired or not, locked until the transaction ends."""
        known = self._session.mailboxes.at(tenant, address)
        if known is not None:
            return known
        sql = f"SELECT {rows.MAILBOX} FROM mailbox WHERE tenant = ? AND address = ? {self._dialect.lock()}"
        row = self._dialect.first(sql, (tenant, address))
        return None if row is None else self._take(row)

    def find_to_send(self, tenant: str, address: str) -> Mailbox | None:
        """Do as :meth:`find`; the address may be a mailbox's send-only address too (A10)."""
        cache = self._session.mailboxes
        known = cache.at(tenant, address) or cache.at_send_only(tenant, address)
        if known is not None:
            return known
        if not is_send_only(address):
            return self.find(tenant, address)
        mailbox_id = send_only_addresses(self._dialect).number(address)
        mailbox = None if mailbox_id is None else self.by_id([mailbox_id]).get(mailbox_id)
        if not isinstance(mailbox, KeptMailbox) or not mailbox.address or mailbox.tenant != tenant:
            return None
        if not compare_digest(self.send_only(mailbox), address):
            return None
        cache.found_by_send_only(mailbox)
        return mailbox

    def send_only(self, mailbox: Mailbox) -> str:
        """Return the send-only address of a mailbox that is not retired (A10)."""
        assert isinstance(mailbox, KeptMailbox)
        if not mailbox.send_only:
            mailbox.send_only = send_only_addresses(self._dialect).of(mailbox)
        return mailbox.send_only

    def send_only_of(self, tenant: str, addresses: Sequence[str], now: int) -> dict[str, str]:
        """Return by their addresses the send-only addresses of those of these mailboxes that live, locking none."""
        if not addresses:
            return {}
        found = self._execute(
            f"SELECT no, address, created_at FROM mailbox WHERE tenant = ? AND address IN ({_places(addresses)})"
            " AND (expire_at IS NULL OR expire_at > ?)",
            (tenant, *addresses, now),
        )
        made = send_only_addresses(self._dialect)
        return {address: made.make(mailbox_id, tenant, address, at) for mailbox_id, address, at in found}

    def by_id(self, numbers: Iterable[int]) -> dict[int, Mailbox]:
        """Return the mailboxes that are there, retired ones too, locked in order of their numbers."""
        found: dict[int, Mailbox] = {}
        missing = []
        for mailbox_id in sorted(numbers):
            known = self._session.mailboxes.by_id(mailbox_id) or self._session.changed_mailboxes.get(mailbox_id)
            if known is None:
                missing.append(mailbox_id)
            else:
                found[mailbox_id] = known
        sql = f"SELECT {rows.MAILBOX} FROM mailbox WHERE {{among}} ORDER BY no {self._dialect.lock()}"
        return found | {row[0]: self._take(row) for row in self._for_each(sql, "no", missing)}

    def _take(self, row: Row) -> KeptMailbox:
        mailbox = rows.mailbox(row)
        self._dialect.settle_counters(mailbox)
        if mailbox.address:
            self._session.mailboxes.add(mailbox)
        else:
            self._session.changed_mailboxes[mailbox.id] = mailbox
        return mailbox

    def add(self, new: NewMailbox) -> Mailbox | None:
        """Store a new mailbox; None when its address was taken in the meantime."""
        row = self._dialect.first(
            "INSERT INTO mailbox (tenant, address, created_at, expire_at, description, tags, public, kind, retention,"
            " archive, ack_wait, token_hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO NOTHING RETURNING no",
            (
                new.tenant,
                new.address,
                new.created_at,
                new.expire_at,
                new.desc,
                rows.join_tags(new.tags) or "",
                int(new.public),
                new.kind.value,
                new.retention.value,
                int(new.archive),
                new.ack_wait,
                new.token_hash,
            ),
        )
        if row is None:
            return None
        self._session.add_count((MAILBOXES, new.tenant), int(new.kind is Kind.STANDARD))
        mailbox = KeptMailbox.made(row[0], new)
        self._session.mailboxes.add(mailbox)
        self._session.mark_changed(mailbox)
        return mailbox

    def describe(self, mailbox: Mailbox, desc: str, tags: tuple[str, ...], ack_wait: int | None) -> None:
        """Change what describes a mailbox."""
        kept = self._session.mark_changed(mailbox)
        kept.desc, kept.tags, kept.ack_wait = desc, tags, ack_wait
        self._execute(
            "UPDATE mailbox SET description = ?, tags = ?, ack_wait = ? WHERE no = ?",
            (desc, rows.join_tags(tags) or "", ack_wait, mailbox.id),
        )

    def retire(self, mailbox: Mailbox) -> None:
        """Free the address at once; what is inside is collected later (M1, M4)."""
        kept = self._session.mark_changed(mailbox)
        self._session.mailboxes.forget(kept)
        kept.address = ""
        self._execute("UPDATE mailbox SET address = NULL WHERE no = ?", (mailbox.id,))

    def expired(self, now: int, limit: int) -> list[Mailbox]:
        """Return mailboxes whose TTL is over and whose address is not yet freed, oldest expiry first."""
        found = self._execute(
            "SELECT no FROM mailbox WHERE expire_at <= ? AND address IS NOT NULL ORDER BY expire_at LIMIT ?",
            (now, limit),
        )
        numbers = [row[0] for row in found]
        mailboxes = self.by_id(numbers)
        # Another instance may have been first while this one waited for the lock.
        return [
            mailboxes[mailbox_id] for mailbox_id in numbers if mailbox_id in mailboxes and mailboxes[mailbox_id].address
        ]

    def retired(self, limit: int) -> list[Mailbox]:
        """Return mailboxes that wait to be collected."""
        found = self._execute("SELECT no FROM mailbox WHERE address IS NULL ORDER BY no LIMIT ?", (limit,))
        return list(self.by_id(row[0] for row in found).values())

    def drop(self, mailbox: Mailbox) -> None:
        """Remove a retired mailbox, whose messages are gone already."""
        self._session.mailboxes.forget(mailbox)
        self._session.changed_mailboxes.pop(mailbox.id, None)
        self._session.flush_recipient_counts()
        for table in ("held", "pushed"):
            self._execute(f"DELETE FROM {table} WHERE mailbox_no = ?", (mailbox.id,))
        self._execute("DELETE FROM mailbox WHERE no = ?", (mailbox.id,))

    def public(self, tenant: str, after: str, tags: Sequence[str], skip: int, limit: int, now: int) -> list[Mailbox]:
        """Do as :meth:`list` for public ones that have all of ``tags``, and leave the first ``skip`` out (E10)."""
        tagged = f" AND {self._dialect.has_tag()}" * len(tags)
        found = self._execute(
            "SELECT no FROM mailbox WHERE tenant = ? AND address > ? AND public = 1"
            f" AND (expire_at IS NULL OR expire_at > ?){tagged} ORDER BY address LIMIT ? OFFSET ?",
            (tenant, after, now, *tags, limit, skip),
        )
        return sorted(self.by_id(row[0] for row in found).values(), key=lambda mailbox: mailbox.address)

    def list(self, tenant: str, after: str, limit: int, now: int) -> list[Mailbox]:
        """Return living mailboxes of a tenant in order of address, those behind ``after``; not that of broadcasts."""
        found = self._execute(
            "SELECT no FROM mailbox WHERE tenant = ? AND address > ? AND (expire_at IS NULL OR expire_at > ?)"
            " AND kind <> ? ORDER BY address LIMIT ?",
            (tenant, after, now, Kind.BROADCAST.value, limit),
        )
        return sorted(self.by_id(row[0] for row in found).values(), key=lambda mailbox: mailbox.address)

    def list_rows(self, tenant: str, prefix: str, limit: int, now: int) -> Sequence[MailboxRow]:
        """Return the first living mailboxes of a tenant whose addresses begin so, in order, each with few look-ups."""
        where = (
            "tenant = ? AND address >= ? AND address < ? AND (mailbox.expire_at IS NULL OR mailbox.expire_at > ?)"
            " AND kind <> ?"
        )
        parameters = tenant, prefix, f"{prefix}\x7f", now, Kind.BROADCAST.value
        found = self._execute(
            "SELECT no, address, kind, retention, messages, bytes, next_id, last_at, expire_at,"
            " (SELECT created_at FROM message WHERE mailbox_no = mailbox.no ORDER BY msg_id LIMIT 1)"
            f" FROM mailbox WHERE {where} ORDER BY address LIMIT ?",
            (*parameters, limit),
        )
        if found:
            # Up to the last of them, in order of the same index.
            uncounted = self._dialect.uncounted(f"{where} AND address <= ?", (*parameters, found[-1][1]))
            behind = {mailbox_id: rest for mailbox_id, *rest in uncounted}
        return [
            MailboxRow(
                id=row[0],
                tenant=tenant,
                address=row[1],
                kind=Kind(row[2]),
                retention=Retention(row[3]),
                messages=row[4] + count,
                bytes=row[5] + size,
                next_id=max(row[6], next_id),
                last_at=max(row[7], last_at),
                expire_at=row[8],
                oldest_at=row[9],
            )
            for row in found
            for count, size, next_id, last_at in [behind.get(row[0], _NOTHING_MORE)]
        ]

    def tenants(self) -> Sequence[str]:
        """Return the tenants that have a mailbox, living or expired, in order."""
        found: list[str] = []
        # From one to the next in the index, instead of through all mailboxes.
        question = "SELECT tenant FROM mailbox WHERE tenant > ? AND address IS NOT NULL ORDER BY tenant LIMIT 1"
        while (row := self._dialect.first(question, (found[-1] if found else "",))) is not None:
            found.append(row[0])
        return sorted(found)

    def count(self, tenant: str, now: int) -> int:
        """Return how many living mailboxes a tenant's clients have; about, if that was counted seconds ago."""

        def count() -> int:
            found = self._session.one(
                "SELECT count(*) FROM mailbox WHERE tenant = ? AND address IS NOT NULL AND address <> ? AND kind = ?"
                " AND (expire_at IS NULL OR expire_at > ?)",
                (tenant, PUBLIC, Kind.STANDARD.value, now),
            )
            return int(found[0])

        return self._session.count((MAILBOXES, tenant), count)

    def held(self, tenant: str, limit: int) -> Sequence[Mailbox]:
        """Return mailboxes of a tenant, of any kind and expired ones too, whose address is not yet freed."""
        found = self._execute(
            "SELECT no FROM mailbox WHERE tenant = ? AND address IS NOT NULL ORDER BY no LIMIT ?", (tenant, limit)
        )
        return [mailbox for mailbox in self.by_id(row[0] for row in found).values() if mailbox.address]

    def usage(self, tenant: str, now: int = 0) -> Usage:
        """Return what all mailboxes of a tenant hold, delayed messages too; may read every one of them.

        What has expired by ``now`` is left out, as far as it is among the first :data:`MAX_EXPIRED` messages that did.
        """
        self._session.flush()
        self._dialect.save_mailboxes(list(self._session.changed_mailboxes.values()))
        messages, size = self._dialect.usage(tenant, now)
        delayed = self._session.one(
            "SELECT count(*), coalesce(sum(size), 0) FROM delayed JOIN mailbox ON mailbox_no = no WHERE tenant = ?"
            " AND (delayed.expire_at IS NULL OR delayed.expire_at > ?)"
            " AND (mailbox.expire_at IS NULL OR mailbox.expire_at > ?)",
            (tenant, now, now),
        )
        expired = self._session.one(
            f"SELECT count(*), coalesce(sum(size), 0) FROM ({EXPIRED}) AS gone JOIN mailbox ON mailbox_no = no"
            " WHERE tenant = ? AND (expire_at IS NULL OR expire_at > ?)",
            (now, MAX_EXPIRED, tenant, now),
        )
        return Usage(int(messages + delayed[0] - expired[0]), int(size + delayed[1] - expired[1]))


_NOTHING_MORE = (0, 0, 0, 0)


def _places(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
