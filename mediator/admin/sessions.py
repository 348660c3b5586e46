"""Sessions of the console: sealed cookies, with a key that is never in the database."""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from cryptography.fernet import Fernet, InvalidToken

SESSION_SECONDS = 12 * 3600


@dataclass(frozen=True, slots=True)
class OperatorSession:
    """Whoever signed in, either by a token or through the provider; what that allows now, the settings say."""

    name: str
    csrf: str
    """What its forms send back."""
    token: str = ""
    """The fingerprint of the token."""
    provider: str = ""
    """The fingerprint of the provider and its client."""
    claims: tuple[str, ...] = ()
    """The values of the claim that gives roles."""
    ends_at: int = 0
    """When it ends by itself, in milliseconds since the epoch."""

    @property
    def digest(self) -> str:
        """Names it where others may read."""
        return hashlib.sha256(self.csrf.encode()).hexdigest()


class CookieSealer:
    """Encrypts and authenticates what browsers keep for the console."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        """``key`` must not be in the database, whose readers could make sessions; ``clock`` returns Unix seconds."""
        self._key = hashlib.sha256(b"operators' sessions " + key).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(self._key))
        self._clock = clock

    def seal(self, value: Any) -> str:
        """Return a value of JSON as a cookie."""
        return self._fernet.encrypt_at_time(orjson.dumps(value), int(self._clock())).decode()

    def open(self, cookie: str, seconds: int) -> Any:
        """Return the value of a cookie that was sealed at most so many seconds ago; None if it is none."""
        try:
            return orjson.loads(self._fernet.decrypt_at_time(cookie, seconds, int(self._clock())))
        except (InvalidToken, ValueError):
            return None

    def seal_session(self, **fields: Any) -> str:
        """Return the cookie of a new session."""
        return self.seal({"csrf": secrets.token_urlsafe(24), **fields})

    def open_session(self, cookie: str) -> OperatorSession | None:
        """Return the session of a cookie; None when its time is over, or it is none of ours.

        Whether a sign-out ended it, :class:`mediator.ops.ended_sessions.EndedSessions` knows.
        """
        value = self.open(cookie, SESSION_SECONDS)
        if not isinstance(value, dict) or "csrf" not in value:
            return None
        ends_at = (self._fernet.extract_timestamp(cookie) + SESSION_SECONDS) * 1000
        return OperatorSession(**{**value, "claims": tuple(value.get("claims", ())), "ends_at": ends_at})

    def fingerprint(self, *secret: str) -> str:
        """Return what stands for a secret: equal for equal ones, and useless without the key."""
        return hmac.new(self._key, "\0".join(secret).encode(errors="surrogateescape"), "sha256").hexdigest()
