"""The bounds that hold for every request; what is configurable has its default here (N7, S6, S7)."""

from dataclasses import dataclass

SECOND = 1000
DAY = 24 * 3600 * SECOND

MAX_DESC = 4096
MAX_TAGS = 64
MAX_TAG = 128
MAX_KEY = 512
MAX_DEDUP_ID = 512
MAX_GROUP_NAME = 256
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024

MAX_FETCH = 1000
DEFAULT_FETCH = 100
MAX_WAIT = 4500
DEFAULT_WAIT = 500
MIN_ACK_WAIT = 1000
MAX_ACK_WAIT = 12 * 3600 * 1000
MAX_DELIVER = 1_000_000
MAX_IDS = 10_000

DEDUP_SPAN = DAY
MAX_DEDUP_IDS = 100_000


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on one mailbox or one tenant; 0 is off (S7)."""

    messages: int = 0
    bytes: int = 0
    rate: int = 0
    """Messages a second."""
    burst: int = 0
    """Messages that may come at once; 0: as many as in a second."""
    mailboxes: int = 0
    """Of a tenant only, as the two below."""
    sockets: int = 0
    """Connections to this instance's gateway, and WebSockets."""
    subscriptions: int = 0
    """Open subscriptions to stored mail at this instance."""

    @property
    def on_sending(self) -> bool:
        """Whether it bounds what is sent."""
        return bool(self.messages or self.bytes or self.rate)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an operator may set. Spans are milliseconds."""

    max_message: int = 10 * 1024 * 1024
    """Bytes of one message with its headers (N7)."""
    default_ttl: int = 0
    """Lifetime of a mailbox whose CREATE names none; 0: for ever (M1)."""
    default_ack_wait: int = 0
    """Lease for groups and mailboxes that name none; 0: no lease (F8)."""
    claim: int = 30 * SECOND
    """How long what a connection was handed without a lease is passed over on others; 0: not at all (F9)."""
    latest_is_last: bool = False
    """Whether ``latest`` begins with the newest message that is there, instead of behind it (F1)."""
    archive_limit: int = 1_000_000
    mailbox: Quota = Quota()
    tenant: Quota = Quota()
