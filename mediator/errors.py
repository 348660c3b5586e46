"""The tree of errors: each has a stable code, a message that names the field, and says whether a retry helps.

Every door maps the same tree: NATS sends the message as ``error`` and the code as ``error_code``, HTTP answers with
``status``, DIDComm sends a problem report with ``problem``. ``docs/errors.md`` lists all of them. A client raises the
error that the code names again (:func:`error_of_reply`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self


class MediatorError(Exception):
    """Anything the mediator refuses or cannot do; the text is safe to show to the caller."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retry: ClassVar[bool] = False
    problem: ClassVar[str] = "e.p.me"
    text: ClassVar[str] = "internal error"
    """What is said where the error is raised without a text."""

    reply: Mapping[str, Any] = {}
    """The reply that reported it to a client; empty where none did."""

    def __init_subclass__(
        cls, code: str | None = None, status: int | None = None, retry: bool | None = None, problem: str | None = None
    ) -> None:
        """Set what differs from the class above: ``class NoSuchRunError(MediatorError, code="run_not_found", …)``."""
        given = {"code": code, "status": status, "retry": retry, "problem": problem}
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, text: str | None = None) -> None:
        super().__init__(text or self.text)

    @classmethod
    def reported(cls, text: str) -> Self:
        """Return the error that somebody else raised and described by ``text``."""
        error = cls.__new__(cls)
        MediatorError.__init__(error, text)
        return error


class BadRequestError(MediatorError, code="bad_request", status=400, problem="e.p.msg"):
    """A field is wrong in type, range, encoding or size (N3); nothing was changed."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field

    @classmethod
    def reported(cls, text: str) -> Self:
        """Return the error, with the field that its text names."""
        error = super().reported(text)
        error.field = text.partition(":")[0]
        return error


class MessageTooLargeError(
    BadRequestError, code="message_too_large", status=413, problem="e.p.me.res.storage.message_too_big"
):
    """The message with its headers is above the limit that the text names (N7)."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__("payload", f"message_too_large, {size} bytes with headers, the limit is {limit}")


class UnknownSubjectError(MediatorError, code="unknown_subject", status=404):
    """A subject below ``$mq9.AI.`` that no edition of the protocol defines (N2)."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"unknown subject {subject[:200]}")


class NoSuchMailboxError(MediatorError, code="mailbox_not_found", status=404):
    """The mailbox was never created, has expired or was deleted."""

    def __init__(self, address: str) -> None:
        super().__init__(f"mailbox {address} does not exist")
        self.address = address


class SendOnlyError(MediatorError, code="send_only", status=403):
    """The address takes SEND and nothing else (A10)."""

    def __init__(self, address: str) -> None:
        super().__init__(f"mailbox {address} is send-only: this address takes SEND and nothing else")


class MailboxExistsError(MediatorError, code="mailbox_exists", status=409):
    """CREATE of an address that is taken (M2)."""

    def __init__(self, address: str) -> None:
        super().__init__(f"mailbox {address} already exists")


class AlreadyRunningError(MediatorError, code="already_running", status=409, retry=True):
    """A run was asked for while one like it runs, on an instance that runs one at a time."""

    def __init__(self, what: str) -> None:
        super().__init__(f"already running: {what}")


class NoSuchMessageError(MediatorError, code="message_not_found", status=404):
    """DELETE of a message that does not exist (Q2)."""

    text = "message not found"


class NoSuchRunError(MediatorError, code="run_not_found", status=404):
    """A run of the pipeline that is not kept."""

    text = "run not found"


class WrongTokenError(MediatorError, code="wrong_token", status=403):
    """The token is not the one CREATE handed out (M3)."""

    text = "token: does not match the one given at CREATE"


class TooManyGroupsError(MediatorError, code="too_many_groups", status=429):
    """The mailbox has as many consumer groups as it may (A4)."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"group_name: too_many_groups, a mailbox has at most {limit}")


class TooManyDelayedError(MediatorError, code="too_many_delayed", status=429, retry=True):
    """NACK of a group in which as many messages wait for their delay as may (F6)."""

    def __init__(self, limit: int, use: int) -> None:
        super().__init__(
            f"delay_ms: too_many_delayed, {use} messages of the group wait for their delay, at most {limit} may; "
            "give back without a delay, or acknowledge some"
        )


class QuotaExceededError(MediatorError, code="quota_exceeded", status=429, retry=True, problem="e.p.me.res.storage"):
    """A quota of the mailbox or the tenant is reached; the text names limit and use (S7)."""

    def __init__(self, what: str, limit: int, use: int) -> None:
        super().__init__(f"quota_exceeded: {what}, limit {limit}, in use {use}")


class RateLimitedError(MediatorError, code="rate_limited", status=429, retry=True, problem="e.p.me.res.rate"):
    """More messages a second than an address or a connection may send; HTTP says in Retry-After when to go on."""

    def __init__(self, what: str, seconds: int) -> None:
        super().__init__(f"rate_limited: too many messages from this {what}, retry after {seconds} s")
        self.seconds = seconds


class DeniedError(MediatorError, code="denied", status=403, problem="e.p.req.denied"):
    """The operator denies this sender, or the network it comes from."""

    text = "denied: the operator of this mediator refuses messages from here"


class ArchiveBacklogFullError(MediatorError, code="archive_backlog_full", status=503, retry=True):
    """Too many messages wait for the archive (S6)."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"archive_backlog_full: {limit} messages wait for the archive")


class CopyRefusedError(MediatorError, code="copy_refused", status=503, retry=True, problem="e.p.me.res.storage"):
    """A rule copies the message to a mailbox that does not take the copy, and says to refuse both (C3)."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(f"copy_refused: rule {rule} cannot copy this message: {why}")


class TenantRefusedError(MediatorError, code="tenant_refused", status=403):
    """The caller belongs to no tenant, and there is more than one (A6)."""

    text = "no tenant: this account is not mapped to one"


class NotAuthenticatedError(MediatorError, code="not_authenticated", status=401):
    """An HTTP request without the API token that it needs, or with an unknown one (A6)."""

    text = "expected the API token of a tenant, or on its own machine local.token, as Authorization: Bearer TOKEN"


class NotSignedInError(NotAuthenticatedError, code="not_signed_in"):
    """A request to the console or the admin API by nobody whom the settings know."""

    text = "expected the token of an operator, as Authorization: Bearer TOKEN, or a session of the console"


class ForgedRequestError(MediatorError, code="forged_request", status=403):
    """A browser sent a change in somebody's name from a page that is not the console's."""

    text = "this request did not come from a page of the console; reload the page and repeat it"


class TooManyAttemptsError(MediatorError, code="too_many_attempts", status=429, retry=True):
    """An address failed to sign in too often."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many wrong tokens from this address; try again in {seconds} s")


class SignInFailedError(MediatorError, code="sign_in_failed", status=403, retry=True):
    """The OpenID Connect provider did not say who somebody is, or the settings give that person no role."""

    def __init__(self, why: str) -> None:
        super().__init__(f"sign-in failed: {why}")


class NotAllowedError(MediatorError, code="not_allowed", status=403):
    """An operator without the right that the operation needs."""

    def __init__(self, right: str) -> None:
        super().__init__(f"this needs the right {right}")


class UnavailableError(MediatorError, code="unavailable", status=503, retry=True, problem="e.p.me.res"):
    """The store cannot be read or written now; nothing was changed (A9)."""

    _what = "unavailable"

    def __init__(self, why: str) -> None:
        super().__init__(f"{self._what}: {why}")


class UncertainError(UnavailableError, code="uncertain"):
    """The database did not confirm the commit, which may have happened; a dedup id makes a retry safe."""

    def __init__(self) -> None:
        super().__init__("the database did not confirm the commit, which may have happened")


class BusyError(UnavailableError, code="busy"):
    """More requests are in progress than the limit in the text allows; retry a little later."""

    _what = "server busy"


class StoreDamagedError(UnavailableError, code="store_damaged", retry=False):
    """The database file is damaged, so a retry fails as well (A9)."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the database is damaged ({why}); run mediator doctor to see where")


class StorageFullError(MediatorError, code="storage_full", status=507, retry=True, problem="e.p.me.res.storage"):
    """The database's disk is full (A9): what adds data is refused; FETCH, ACK, DELETE and clean-up work."""

    text = "unavailable: storage_full, the disk has no room; acknowledge or delete mail, or try later"


class EnvelopeError(BadRequestError, code="bad_envelope", problem="e.p.trust.crypto"):
    """Not a DIDComm envelope for one of our keys, or not what it claims to be (D8, D12)."""

    def __init__(self, problem: str) -> None:
        super().__init__("envelope", problem)


class UnresolvedDidError(MediatorError, code="did_unresolved", status=400, problem="e.p.did"):
    """A DID without a document: malformed, of a method that is not supported, or not available now."""


class UnsupportedMessageError(MediatorError, code="unsupported_message", status=400, problem="e.p.msg.unsupported"):
    """A DIDComm message of a protocol or version that is not supported (D12)."""

    def __init__(self, type: str) -> None:
        super().__init__(f"type: {type[:200]} is not supported")


class MediationDeniedError(MediatorError, code="mediation_denied", status=403, problem="e.p.req.denied"):
    """The mediator's policy does not give this peer mediation."""

    def __init__(self, why: str = "mediation is not granted") -> None:
        super().__init__(why)


class InvitationRequiredError(
    MediationDeniedError, code="invitation_required", status=403, problem="e.p.req.invitation"
):
    """The mediator's policy gives mediation to peers with an invitation only, and this one has none that is open."""

    def __init__(self) -> None:
        super().__init__("mediation needs an open invitation: ask the operator for one, and use the DID in it")


class NotEnrolledError(MediatorError, code="not_enrolled", status=403, problem="e.p.trust.not-enrolled"):
    """The sender of the message has no mediation here, or is anonymous (D8)."""

    def __init__(self, why: str = "the sender has no mediation here") -> None:
        super().__init__(why)


class LiveModeError(MediatorError, code="live_mode_not_supported", status=400, problem="e.m.live-mode-not-supported"):
    """Live mode was requested on a connection that cannot carry it (D6)."""

    text = "Connection does not support Live Delivery"


class NoSuchInvitationError(MediatorError, code="invitation_not_found", status=404, problem="e.p.req.invitation"):
    """The invitation was never made, is used up, or has expired."""

    text = "invitation: unknown, used up or expired"


class NoSuchConnectionError(MediatorError, code="connection_not_found", status=404):
    """The DIDComm connection that an operator names does not exist."""

    def __init__(self, connection_id: int) -> None:
        super().__init__(f"connection {connection_id} does not exist")


class NoSuchTenantError(MediatorError, code="tenant_not_found", status=404):
    """The tenant that an operator names does not exist, or was removed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"tenant {name} does not exist")


class NoSuchAgentError(MediatorError, code="agent_not_found", status=404):
    """The agent that the request names is not registered (G2)."""

    def __init__(self, who: str) -> None:
        super().__init__(f"agent {who} is not registered")


class StoreHeldError(MediatorError, code="store_held", status=503):
    """Another process owns the SQLite file; the text says which."""


class SchemaError(MediatorError, code="schema"):
    """The database was written by a newer program than this one, or a migration failed."""


class SetupError(MediatorError, code="setup"):
    """The service cannot start as configured; the text says what to change."""


class LostDataError(MediatorError, code="data_loss", status=410):
    """Data that a reader would get next is gone, in part or as a whole."""


class DamagedError(MediatorError, code="damaged"):
    """A line of the journal does not follow docs/journal.md; the text names the file and the byte."""


class UnreachableError(MediatorError, code="unreachable", status=502, retry=True, problem="e.p.me.res.net"):
    """A server of somebody else did not answer, or not correctly; a retry may help (D10)."""


class AddressRefusedError(UnreachableError, code="address_refused", status=400, retry=False, problem="e.p.msg"):
    """A stranger chose an address that the mediator never calls (D10)."""


class NoReplyError(UnreachableError, code="no_reply", status=504):
    """A client sent a request and got no answer in time; nobody knows whether it was carried out."""


class LoginRefusedError(MediatorError, code="login_refused", status=401):
    """The NATS server does not let a client in as whom it says it is."""


class PartlyRefusedError(MediatorError, code="partly_refused", status=207):
    """Some messages of a client's batch were refused; the others are on disk (S8)."""

    def __init__(self, refused: int, total: int, first: str) -> None:
        super().__init__(f"{refused} of {total} messages were refused, the first because of {first}")
        self.msg_ids: Sequence[int | None] = ()
        """Of each message, in their order; None for those that were refused."""
        self.errors: Mapping[int, MediatorError] = {}
        """Why a message was refused, by its place, counted from 0."""


def error_of_reply(text: str, reply: Mapping[str, Any]) -> MediatorError:
    """Return the error that a service reported, of the class that its ``error_code`` names."""
    code = reply.get("error_code")
    error = _classes(MediatorError).get(code, MediatorError).reported(text)
    if isinstance(code, str):
        # A newer service may send a code that is not in this tree.
        error.code = code  # type: ignore[misc]
    error.reply = reply
    return error


def _classes(root: type[MediatorError]) -> dict[Any, type[MediatorError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _classes(child)
    return found
