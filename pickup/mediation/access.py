"""Changes the operator's allow and deny lists: of DIDs and keys, as senders and as recipients, and of networks."""

from ipaddress import ip_network

from mediator.errors import BadRequestError, QuotaExceededError
from pickup.mediation.names import canonical
from pickup.mediation.ports import MediationTransaction
from pickup.mediation.records import AccessRule, MediationRules, NewConnection, Verdict

MAX_RULES = 10_000
"""Of both lists together; each instance keeps all of them in memory."""
MAX_NOTE = 200


def parse_name(text: str) -> str:
    """Return a DID or key in its canonical form, or a network; :class:`BadRequestError` when ``text`` is neither."""
    name = canonical(text)
    if name is not None:
        return name
    try:
        return str(ip_network(text, strict=False))
    except ValueError:
        raise BadRequestError("name", "expected a DID, a key (base58 or did:key), an IP address or a network") from None


def is_denied(rules: MediationRules, peer: NewConnection) -> bool:
    """Whether the operator denies a peer, connected or not."""
    return bool(rules.denied) and not rules.denied.isdisjoint((*peer.callers, canonical(peer.their_did)))


def add(tx: MediationTransaction, rule: AccessRule) -> None:
    """Put a name on a list, and take it off the other; :class:`QuotaExceededError` when the lists are full."""
    if len(rule.note) > MAX_NOTE or not rule.note.isprintable():
        raise BadRequestError("note", f"expected one line of at most {MAX_NOTE} characters")
    if (there := tx.access_rules.count()) >= MAX_RULES:
        raise QuotaExceededError("names on the allow and deny lists", MAX_RULES, there)
    tx.access_rules.put(rule)


def remove(tx: MediationTransaction, name: str, verdict: Verdict) -> None:
    """Take a name off a list; :class:`BadRequestError` when it is not there."""
    if not tx.access_rules.remove(name, verdict):
        raise BadRequestError("name", f"not on the {verdict} list")
