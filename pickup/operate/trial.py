"""The operation `didcomm-try`: a wallet of the service's own tries its door from outside, and leaves nothing behind."""

import asyncio
import time
from collections import deque
from typing import Final

from mediator.errors import BadRequestError, BusyError, MediatorError, NoSuchInvitationError
from mediator.operate.operations import (
    COUNT,
    FLAG,
    TENANT,
    TEXT,
    TIME,
    Answer,
    OperationRequest,
    Right,
    Schema,
    about,
    many,
    object_schema,
    operation,
)
from pickup.broker import MediationBroker
from pickup.client import ClientError, HttpStatusError, NoAnswerError, ProblemError, Wallet
from pickup.client.sender import TRY_LABEL, TRY_STEPS, attempt
from pickup.invitations import InvitationService
from pickup.operate.connections import OperationTenants
from pickup.rules.records import Generation, Invitation, Policy

TRY_SECONDS: Final = 15.0
"""For all steps; each answer may take a third of it."""
KEPT: Final = 10
"""Attempts that an instance remembers."""
_TTL: Final = 60_000
"""Milliseconds after which the invitation of an attempt ends, should it be left behind."""
_MS: Schema = {"type": "number", "minimum": 0, "description": "Milliseconds."}
_TRIAL = object_schema(
    tenant=TEXT,
    didcomm=TEXT,
    at=TIME,
    ok=FLAG,
    ms=_MS,
    summary=TEXT,
    advice=about(TEXT, "What to look at when it failed."),
    steps=many(object_schema(step=TEXT, what=TEXT, ms=_MS, ok=FLAG)),
)

_GENERATION: Schema = {"type": "string", "enum": [each.value for each in Generation], "default": "v1"}


class TrialOperations:
    """One attempt at a time, through the URL that wallets use."""

    def __init__(self, mediation: MediationBroker, invitations: InvitationService, tenants: OperationTenants) -> None:
        self._mediation = mediation
        self._invitations = invitations
        self._tenants = tenants
        self._trying = asyncio.Lock()
        self._trials: deque[Answer] = deque(maxlen=KEPT)

    @operation(
        "didcomm-tries",
        Right.READ,
        "The last trials of the DIDComm door on this instance",
        object_schema(tries=many(_TRIAL), most=COUNT),
        path="/didcomm/try",
    )
    async def _list(self, _request: OperationRequest) -> Answer:
        return {"tries": list(self._trials), "most": KEPT}

    @operation(
        "didcomm-try",
        Right.OPERATE,
        "Try the DIDComm door as a wallet would, through its public URL",
        _TRIAL,
        fields={"tenant": TENANT, "didcomm": _GENERATION},
        method="POST",
        path="/didcomm/try",
    )
    async def _try(self, request: OperationRequest) -> Answer:
        tenant, generation = await self._tenants.of(request), request.get("didcomm", "")
        if generation not in list(Generation):
            raise BadRequestError("didcomm", "expected v1 or v2")
        if self._trying.locked():
            raise BusyError("another attempt is running")
        async with self._trying:
            invitation = await self._invitations.make(tenant, label=TRY_LABEL, ttl=_TTL, uses=1)
            wallet, trial = Wallet(), _Trial()
            try:
                forms = self._invitations.written(invitation)
                url = forms.v1_url if generation == Generation.V1 else forms.v2_url
                async with asyncio.timeout(TRY_SECONDS):
                    await attempt(url, trial.done, wallet=wallet, seconds=TRY_SECONDS / 3)
            except TimeoutError:
                trial.fail(f"it took longer than {TRY_SECONDS:g} s", self._advise(None))
            except (ClientError, MediatorError) as error:
                trial.fail(str(error), self._advise(error))
            finally:
                try:
                    await self._clean_up(invitation, wallet)
                    trial.done("cleaned up", "the connection and the invitation are removed")
                except MediatorError as error:
                    trial.done("cleaned up", f"not all is removed: {error}", ok=False)
            answer = trial.written(tenant, generation)
            self._trials.appendleft(answer)
            return answer

    async def _clean_up(self, invitation: Invitation, wallet: Wallet) -> None:
        for name in wallet.names:
            connection = await self._mediation.find_connection(invitation.tenant, name)
            if connection is not None:
                await self._mediation.disconnect(connection.tenant, connection.id)
        try:
            await self._mediation.remove_invitation(invitation.tenant, invitation.id)
        except NoSuchInvitationError:
            # Many new ones made room by it.
            return

    def _advise(self, error: Exception | None) -> str:
        if isinstance(error, ProblemError) and self._mediation.rules.policy is Policy.ALLOW:
            return "didcomm.policy is allow: only wallets that it names get mediation, and this one is not."
        # It was reached, and refuses the address.
        refused = isinstance(error, HttpStatusError) and error.status in (403, 429)
        if error is None or (isinstance(error, HttpStatusError | NoAnswerError) and not refused):
            return (
                "Check that didcomm.public_url is where wallets reach this service, through its proxy, and that this"
                " machine reaches it, too."
            )
        return ""


class _Trial:
    """What came of each step, and how long it took."""

    def __init__(self) -> None:
        self._at = time.time()
        self._began = self._last = time.perf_counter()
        self._steps: list[Answer] = []
        self._failed = ""
        self._advice = ""

    def done(self, step: str, what: str, *, ok: bool = True) -> None:
        now = time.perf_counter()
        self._steps.append({"step": step, "what": what, "ms": round((now - self._last) * 1000, 3), "ok": ok})
        self._last = now

    def fail(self, why: str, advice: str) -> None:
        self._failed = TRY_STEPS[min(len(self._steps), len(TRY_STEPS) - 1)]
        self._advice = advice
        self.done(self._failed, why, ok=False)

    def written(self, tenant: str, generation: str) -> Answer:
        ms = (self._last - self._began) * 1000
        summary = f"It works: {len(TRY_STEPS)} steps and the clean-up took {ms:.0f} ms."
        return {
            "tenant": tenant,
            "didcomm": generation,
            "at": self._at,
            "ok": not self._failed,
            "ms": round(ms, 3),
            "summary": f"Failed before it was {self._failed}." if self._failed else summary,
            "advice": self._advice,
            "steps": self._steps,
        }
