"""A mailbox and what was fixed when it was created (A1, A5, M1)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

MailboxKey = tuple[str, str]
"""Tenant and address: how a mailbox is found."""


class Retention(StrEnum):
    """When a message leaves: by TTL, key or DELETE only, or with the first ACK (A5)."""

    KEEP = "keep"
    UNTIL_ACK = "until_ack"


class Kind(StrEnum):
    """What it is for: first-edition type ``latest`` keeps one message (M1), the last two are never made by CREATE."""

    STANDARD = "standard"
    LATEST = "latest"
    MEDIATION = "mediation"
    """Made by a grant; takes DIDComm envelopes only (D1, D11)."""
    BROADCAST = "broadcast"
    """Holds what a tenant's broadcasts are to be replayed from; no client can name it (E9)."""


@dataclass(slots=True)
class NewMailbox:
    """A mailbox to be created. Times are milliseconds since the epoch, spans milliseconds."""

    tenant: str
    address: str
    created_at: int
    expire_at: int | None = None
    desc: str = ""
    tags: tuple[str, ...] = ()
    public: bool = False
    kind: Kind = Kind.STANDARD
    retention: Retention = Retention.KEEP
    archive: bool = False
    ack_wait: int | None = None
    """Lease for every group that does not say otherwise; None: the configured default (F8)."""
    token_hash: bytes = b""


@dataclass(slots=True)
class Mailbox:
    """A mailbox that exists, with its counters. ``id`` is never used again, so it names one generation (A3)."""

    id: int
    tenant: str
    address: str
    """Empty once retired: the address is free again, what is inside waits to be collected."""
    created_at: int
    expire_at: int | None
    desc: str
    tags: tuple[str, ...]
    public: bool
    kind: Kind
    retention: Retention
    archive: bool
    ack_wait: int | None
    token_hash: bytes
    next_id: int = 0
    messages: int = 0
    bytes: int = 0
    last_at: int = 0
    """create_time of the newest message; never goes back, whatever the clock does (N5)."""

    @classmethod
    def made(cls, id: int, new: NewMailbox) -> Self:
        """Return a new mailbox as it is once the store has given it a number."""
        return cls(
            id=id,
            tenant=new.tenant,
            address=new.address,
            created_at=new.created_at,
            expire_at=new.expire_at,
            desc=new.desc,
            tags=new.tags,
            public=new.public,
            kind=new.kind,
            retention=new.retention,
            archive=new.archive,
            ack_wait=new.ack_wait,
            token_hash=new.token_hash,
        )

    @property
    def removed(self) -> int:
        """How many messages have left it so far, for whatever reason."""
        return self.next_id - self.messages

    @property
    def key(self) -> MailboxKey:
        """Its tenant and its address."""
        return self.tenant, self.address

    def is_live(self, now: int) -> bool:
        """Whether it can be reached: expiry counts from its moment, not from the collection (M1)."""
        return self.address != "" and (self.expire_at is None or self.expire_at > now)


class MailboxRow(NamedTuple):
    """A mailbox as lists of many show it."""

    id: int
    tenant: str
    address: str
    kind: Kind
    retention: Retention
    messages: int
    bytes: int
    next_id: int
    expire_at: int | None
    last_at: int
    oldest_at: int | None
    """When its oldest message came, expired or not."""
