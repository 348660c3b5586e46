"""A rule by which mail is copied: what it matches and where its copies go; what a store remembers of all rules (C1)."""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from mediator.errors import BadRequestError
from mediator.mailboxes.address import bare_address, is_send_only, writable_address
from mediator.mailboxes.bounds import MAX_TAGS
from mediator.mailboxes.lanes import Lane
from mediator.mailboxes.mailbox import MailboxKey
from mediator.mailboxes.message import Door

COPY_OF: Final = "mq9-copy-of"
"""The header of a copy with address and msg_id of its original; clients cannot set it."""
COPY_KEY: Final = "mq9-copy-key"
"""The header of a copy with the key of its original: a copy has none itself, so that it replaces no other (S2)."""
COPY_HEADERS: Final = frozenset({COPY_OF, COPY_KEY})
EVERY: Final = ">"
"""The pattern that every address matches."""
MAX_RULES: Final = 100
"""Rules of one tenant."""
MAX_PATTERN: Final = 256
FORWARDER: Final = "copy."
"""What the names of the groups begin with by which rules forward; the name of the rule follows (C7)."""
MAX_URL: Final = 2048
MIN_KEY: Final = 24
MAX_KEY: Final = 64
"""Bytes of a secret, as Standard Webhooks has them."""
UNREAD: Final = -1
"""The revision of rules that were not read yet."""
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_SECRET: Final = "whsec_"
_SUBJECT: Final = re.compile(r"(?!_|mq9)(?:(?!\$)[!-)+-\-/-=?-~]+\.)*(?!\$)[!-)+-\-/-=?-~]+")
"""Tokens of printable ASCII without ``.``, ``*`` and ``>``, none of which begins with ``$``."""
_PATTERN: Final = re.compile(r"(?!id:)(?:[^\s.*>]+\.)*(?:[^\s.*>]+|>)")


class WhenFull(StrEnum):
    """What happens to a message whose copy the target does not take."""

    REFUSE = "refuse"
    """It is refused: it is stored in both mailboxes or in none."""
    DROP = "drop"
    """It is stored without the copy."""


@dataclass(frozen=True, slots=True)
class CopyRule:
    """A rule of one tenant; all that is given must match, an empty list matches everything."""

    tenant: str
    name: str
    to_address: str
    """The mailbox that gets the copies."""
    address: str = EVERY
    """An address, or the beginning of addresses in whole parts, ``billing.>``; of a broadcast its subject."""
    tags: tuple[str, ...] = ()
    """All of these."""
    lanes: tuple[Lane, ...] = ()
    """One of these."""
    doors: tuple[Door, ...] = ()
    """One of these."""
    headers_only: bool = False
    """Whether copies have no payload."""
    when_full: WhenFull = WhenFull.REFUSE
    ttl: int | None = None
    """Milliseconds that a copy is kept; None: until it is acknowledged or removed."""
    configured: bool = False
    """Whether it is in the settings."""
    to_subject: str = ""
    """The NATS subject to which the copies are forwarded (C7)."""
    to_url: str = field(default="", repr=False)
    """The URL to which the copies are posted (C8); a part of it may be a secret."""
    secret: str = field(default="", repr=False)
    """What they are signed with: ``whsec_`` and base64, as Standard Webhooks has it."""

    @property
    def forwards(self) -> bool:
        """Whether the copies go on, out of the service (C7)."""
        return bool(self.to_subject or self.to_url)

    @property
    def group(self) -> str:
        """The group by which the copies are read that go on."""
        return FORWARDER + self.name

    def matches(self, address: str, tags: Sequence[str], lane: Lane, door: Door) -> bool:
        """Whether a message that came by a door to an address is copied."""
        pattern = self.address
        if pattern != address and not (pattern[-1] == ">" and address.startswith(pattern[:-1])):
            return False
        if self.doors and door not in self.doors:
            return False
        return (not self.lanes or lane in self.lanes) and (not self.tags or set(self.tags) <= set(tags))


def check(rule: CopyRule) -> CopyRule:
    """Return a rule with its addresses as they are kept; :class:`BadRequestError` names the field that is wrong."""
    if not _NAME.fullmatch(rule.name):
        raise BadRequestError("name", "expected 1 to 63 of a-z, 0-9, - and _, beginning with a letter or digit")
    to, pattern = writable_address(rule.to_address, "to_address"), bare_address(rule.address)
    if is_send_only(to):
        raise BadRequestError("to_address", "expected the mailbox's own address, got its send-only address")
    if len(pattern) > MAX_PATTERN or not _PATTERN.fullmatch(pattern) or not pattern.isprintable():
        raise BadRequestError(
            "address", "expected an address, the beginning of addresses such as billing.>, or > for all"
        )
    if is_send_only(pattern):
        raise BadRequestError("address", "expected the mailbox's own address, got its send-only address")
    if pattern == to:
        raise BadRequestError("to_address", "expected another mailbox than the one that is copied")
    if len(rule.tags) > MAX_TAGS or any(not tag or "," in tag for tag in rule.tags):
        raise BadRequestError("tags", f"expected at most {MAX_TAGS}, none empty or with a comma")
    if rule.to_subject and not is_forwarding_subject(rule.to_subject):
        raise BadRequestError(
            "to_subject",
            f"expected a subject without wildcards and spaces, of {MAX_PATTERN} characters at most; "
            "not one of a server's or the service's own ($…, _…, mq9…)",
        )
    if rule.to_url:
        if rule.to_subject:
            raise BadRequestError("to_url", "expected one of to_subject and to_url")
        origin_of(rule.to_url)
        signing_key(rule.secret)
    return replace(rule, to_address=to, address=pattern)


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL; :class:`BadRequestError` where copies cannot be posted to it (C8)."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        sound = sound and "@" not in parts.netloc and len(url) <= MAX_URL and url.isprintable() and " " not in url
    except ValueError:
        sound = False
    if not sound:
        raise BadRequestError("to_url", f"expected https://HOST/PATH without a login, {MAX_URL} characters at most")
    return f"{parts.scheme}://{parts.netloc}"


def new_secret(random: Callable[[int], bytes]) -> str:
    """Make a secret to sign with."""
    return _SECRET + base64.b64encode(random(32)).decode()


def signing_key(secret: str) -> bytes:
    """Return the bytes of a secret; :class:`BadRequestError` where it is none."""
    try:
        key = base64.b64decode(secret.removeprefix(_SECRET), validate=True) if secret.startswith(_SECRET) else b""
    except ValueError:
        key = b""
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise BadRequestError("secret", f"expected whsec_ and {MIN_KEY} to {MAX_KEY} bytes in base64")
    return key


def is_forwarding_subject(subject: str) -> bool:
    """Whether copies may be published there: what begins with ``$``, ``_`` or ``mq9`` is read by servers (C7)."""
    return len(subject) <= MAX_PATTERN and _SUBJECT.fullmatch(subject) is not None


def encode(rule: CopyRule) -> str:
    """Write what is kept of a rule beside its tenant and its name."""
    return json.dumps(_state(rule))


def _state(rule: CopyRule) -> dict[str, Any]:
    return {name: value for name, value in asdict(rule).items() if name not in ("tenant", "name", "configured")}


def decode(tenant: str, name: str, state: str) -> CopyRule:
    """Read a rule; fields that a newer version wrote are passed over."""
    known = {one.name for one in fields(CopyRule)}
    kept = {name: value for name, value in json.loads(state).items() if name in known}
    kept["tags"], kept["lanes"] = tuple(kept["tags"]), tuple(map(Lane, kept["lanes"]))
    kept["doors"], kept["when_full"] = tuple(map(Door, kept["doors"])), WhenFull(kept["when_full"])
    return CopyRule(tenant, name, **kept)


@dataclass(slots=True)
class CopyCounts:
    """What became of the messages that a rule matched at this instance."""

    matched: int = 0
    copied: int = 0
    dropped: int = 0
    """Stored without the copy, since the target did not take it."""
    refused: int = 0
    """Not stored, for the same reason."""


@dataclass(slots=True)
class ForwardState:
    """How this instance forwards what a rule copies (C7)."""

    forwarded: int = 0
    failed: int = 0
    """Attempts that nobody confirmed."""
    problem: str = ""
    """Why it does not go on; empty if it does."""
    lag: int = 0
    """For how long the oldest copy has waited that is not confirmed; milliseconds."""


@dataclass(slots=True)
class CopyRuleCache:
    """The rules as of the last time that they were read, and what they did since this instance started.

    Read and changed inside transactions, by one thread at a time.
    """

    configured: Sequence[CopyRule] = ()
    """Those of the settings, which come before others of the same name."""
    revision: int = UNREAD
    by_tenant: Mapping[str, Sequence[CopyRule]] = field(default_factory=dict)
    counts: defaultdict[tuple[str, str], CopyCounts] = field(default_factory=lambda: defaultdict(CopyCounts))
    """By tenant and name."""
    forwarding: defaultdict[tuple[str, str], ForwardState] = field(default_factory=lambda: defaultdict(ForwardState))
    """The same; changed on the event loop."""

    def configure(self, rules: Sequence[CopyRule]) -> None:
        """Set the rules of the settings; those of the database are read again with the next transaction."""
        self.configured, self.revision = rules, UNREAD

    def load(self, revision: int, stored: Iterable[CopyRule]) -> None:
        """Remember the rules of the database, together with those of the settings, in order of their names."""
        rules = {(rule.tenant, rule.name): rule for rule in (*stored, *self.configured)}
        by_tenant: defaultdict[str, list[CopyRule]] = defaultdict(list)
        for _, rule in sorted(rules.items()):
            by_tenant[rule.tenant].append(rule)
        self.by_tenant, self.revision = by_tenant, revision

    def targets(self, keys: Iterable[MailboxKey]) -> set[MailboxKey]:
        """Return the mailboxes that may get copies of what is sent to these."""
        return {
            (tenant, rule.to_address)
            for tenant, address in keys
            for rule in self.by_tenant.get(tenant, ())
            if rule.address == address or rule.address[-1] == ">"
        }
