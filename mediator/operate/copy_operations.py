"""Operations on the rules by which mail is copied, their metrics, and what the doctor finds in them (C1–C8)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mediator.broker import Broker
from mediator.errors import BadRequestError, MailboxExistsError, MediatorError, NoSuchTenantError, NotAllowedError
from mediator.fields import Fields
from mediator.mailboxes import copying, creating, forwarding
from mediator.mailboxes.address import DEFAULT_TENANT, new_address
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from mediator.mailboxes.copy_rule import (
    EVERY,
    CopyCounts,
    CopyRule,
    CopyRuleCache,
    ForwardState,
    WhenFull,
    new_secret,
    origin_of,
)
from mediator.mailboxes.creating import Create
from mediator.mailboxes.lanes import LANES, parse_lane
from mediator.mailboxes.mailbox import Mailbox, Retention
from mediator.mailboxes.message import Door
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.operations import (
    ADDRESS,
    FLAG,
    LANE,
    MAIL_ADDRESS,
    REDACTED,
    TENANT,
    TEXT,
    TEXTS,
    Answer,
    OperationRequest,
    Right,
    about,
    is_allowed,
    many,
    object_schema,
    once,
    operation,
    or_null,
    whole,
)
from mediator.operate.records import COPY_WORDS, CopyRuleView
from mediator.store.base import Transaction

MAX_TTL_SECONDS: Final = 100 * 366 * 86400
log = structlog.get_logger("copies")
_OUTCOMES: Final = ("matched", "copied", "dropped", "refused")


class CopyOperations:
    """The operations."""

    def __init__(self, broker: Broker, tenants: Sequence[str], has_nats: bool) -> None:
        """``tenants``: the names of all living ones, kept up to date by their owner.

        ``has_nats``: whether there is a server to which copies can be published.
        """
        self._broker = broker
        self._tenants = tenants
        self._has_nats = has_nats

    async def configure(self, rules: Sequence[CopyRule]) -> None:
        """Take over the rules of the settings, and make the mailboxes that they copy to and that are missing.

        What cannot be made is told, here and by :meth:`examine`, and does not keep the service from its other mail.
        """
        self._broker.copy_rules.configure(rules)
        for rule in rules:
            try:
                await self._broker.write(
                    partial(self._set_up, rule), (rule.tenant, rule.to_address), even_when_full=True
                )
            except MediatorError as error:
                log.error(
                    "a copy rule of the settings has no mailbox", rule=rule.name, tenant=rule.tenant, reason=str(error)
                )

    def _set_up(self, rule: CopyRule, tx: Transaction, now: int) -> None:
        broker = self._broker
        with suppress(MailboxExistsError):
            creating.create(tx, broker.bounds, os.urandom, _target(rule, rule.to_address), now, broker.quotas)
        target = copying.find_target(tx, rule, now)
        if rule.forwards and isinstance(target, Mailbox):
            # What is copied from now on, unless it forwarded before.
            forwarding.open_group(tx, target, rule, target.next_id)

    @operation(
        "copy-rule-list",
        Right.READ,
        "The rules by which mail is copied to another mailbox, where it goes from there, and how often they did",
        object_schema(rules=many(CopyRuleView.schema())),
        fields={"tenant": about(TEXT, "Of this tenant alone.")},
        path="/copy-rules",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        wanted = request.get("tenant", "")
        found = [each for each in await self._read_rules() if wanted in ("", each[0].tenant)]
        return {"rules": [self._show(rule, problem).to_json() for rule, problem in found]}

    async def _read_rules(self) -> list[tuple[CopyRule, str]]:
        """Return all rules, each with why it has nowhere to copy to, if it has not."""
        rules = CopyRuleCache(self._broker.copy_rules.configured)

        def read(tx: Transaction, now: int) -> list[tuple[CopyRule, str]]:
            rules.load(0, tx.copy_rules.stored())
            found = [(rule, copying.find_target(tx, rule, now)) for some in rules.by_tenant.values() for rule in some]
            return [(rule, target if isinstance(target, str) else "") for rule, target in found]

        return await self._broker.read(read)

    def _show(self, rule: CopyRule, problem: str) -> CopyRuleView:
        counts = self._broker.copy_rules.counts.get((rule.tenant, rule.name), CopyCounts())
        forwarding = self._broker.copy_rules.forwarding.get((rule.tenant, rule.name), ForwardState())
        return CopyRuleView(
            tenant=rule.tenant,
            name=rule.name,
            address=rule.address,
            tags=rule.tags,
            priorities=[lane.name.lower() for lane in rule.lanes],
            doors=[door.value for door in rule.doors],
            to_address=rule.to_address,
            headers_only=rule.headers_only,
            when_full=rule.when_full.value,
            ttl_seconds=None if rule.ttl is None else rule.ttl // 1000,
            origin="settings" if rule.configured else "database",
            to_subject=rule.to_subject or None,
            # The rest of it may be a secret.
            to_url=origin_of(rule.to_url) if rule.to_url else None,
            state=problem or forwarding.problem or "ok",
            **{outcome: getattr(counts, outcome) for outcome in _OUTCOMES},
            forwarded=forwarding.forwarded,
            failed=forwarding.failed,
            lag_seconds=forwarding.lag / 1000 if rule.forwards else None,
        )

    @operation(
        "copy-rule-add",
        Right.OPERATE,
        "Copy mail by rule to another mailbox of the tenant, and from there to JetStream or a URL, from now on; needs"
        " the right read-payload too",
        object_schema(
            tenant=TEXT,
            name=TEXT,
            address=ADDRESS,
            to_address=ADDRESS,
            secret=once(about(TEXT, "With to_url: what the copies are signed with; empty without.")),
        ),
        fields={
            "tenant": TENANT,
            "name": about(TEXT, "What the rule is called."),
            "address": about(ADDRESS, COPY_WORDS["address"], default=EVERY),
            "tags": about(TEXTS, COPY_WORDS["tags"]),
            "priorities": about(many(LANE), COPY_WORDS["priorities"]),
            "doors": about(many({"type": "string", "enum": [*Door]}), COPY_WORDS["doors"]),
            "to_address": about(
                MAIL_ADDRESS,
                "The other mailbox: an address, or `id:` and its number. Absent for a rule that forwards: a new one "
                "with retention `until_ack`.",
            ),
            "to_subject": about(TEXT, COPY_WORDS["to_subject"]),
            "to_url": about({**TEXT, REDACTED: "read-payload"}, "The URL to which copies are posted, signed."),
            "headers_only": about(FLAG, COPY_WORDS["headers_only"], default=False),
            "when_full": about({"type": "string", "enum": [*WhenFull], "default": "refuse"}, COPY_WORDS["when_full"]),
            "ttl_seconds": or_null(whole("How long a copy is kept; 0, null or absent: for ever.", 0, MAX_TTL_SECONDS)),
        },
        required=("name",),
        method="POST",
        path="/copy-rules",
    )
    async def _add(self, request: OperationRequest) -> Answer:
        if not is_allowed(Right.READ_PAYLOAD):
            # Whoever reads the other mailbox reads there what is hidden here (A7).
            raise NotAllowedError(Right.READ_PAYLOAD)
        fields, tenant = Fields(request), request.get("tenant") or DEFAULT_TENANT
        if tenant not in self._tenants:
            raise NoSuchTenantError(tenant)
        lanes = {parse_lane(word, "priorities") for word in _given(request, "priorities")}
        doors = {Door(word) for word in _given(request, "doors")}
        ttl = request.get("ttl_seconds")
        to_address, to_subject, to_url = (request.get(name) or "" for name in ("to_address", "to_subject", "to_url"))
        if not (to_address or to_subject or to_url):
            raise BadRequestError("to_address", "expected a mailbox, unless the rule has to_subject or to_url")
        if to_subject and not self._has_nats:
            raise BadRequestError("to_subject", "expected forwarding.nats_url in the settings, a server with JetStream")
        rule = CopyRule(
            tenant,
            request["name"],
            to_address or new_address(os.urandom),
            request["address"] or EVERY,
            fields.words("tags", MAX_TAGS, MAX_TAG) or (),
            tuple(lane for lane in LANES if lane in lanes),
            tuple(door for door in Door if door in doors),
            request["headers_only"],
            WhenFull(request["when_full"]),
            ttl * 1000 if ttl else None,
            to_subject=to_subject,
            to_url=to_url,
            secret=new_secret(os.urandom) if to_url else "",
        )
        broker = self._broker

        def add(tx: Transaction, now: int) -> CopyRule:
            target = _target(rule, rule.to_address)
            make = partial(creating.create, tx, broker.bounds, os.urandom, target, now, broker.quotas)
            return copying.add_rule(tx, rule, now, None if to_address else make)

        made = await broker.write(add, (tenant, rule.to_address), even_when_full=True)
        answer = {"tenant": tenant, "name": made.name, "address": made.address, "to_address": made.to_address}
        return answer | {"secret": made.secret}

    @operation(
        "copy-rule-remove",
        Right.OPERATE,
        "End a rule; the copies that it made stay",
        object_schema(tenant=TEXT, name=TEXT),
        fields={"tenant": TENANT, "name": about(TEXT, "What the rule is called.")},
        method="DELETE",
        path="/copy-rules/{name}",
    )
    async def _remove(self, request: OperationRequest) -> Answer:
        tenant, name = request.get("tenant") or DEFAULT_TENANT, request["name"]
        await self._broker.write(lambda tx, _now: copying.remove_rule(tx, tenant, name), even_when_full=True)
        return {"tenant": tenant, "name": name}

    async def examine(self) -> list[Finding]:
        """Say which rules do not forward, or have nowhere to copy to: with `refuse`, what they match is refused."""
        found = await self._read_rules()
        return [
            Finding(
                Level.PROBLEM,
                f"Rule {rule.name} of tenant {rule.tenant} does not forward: {state.problem}.",
                "What it copied waits in its mailbox until it is confirmed. Mend where it goes, or end the rule: "
                f"mediator copy remove {rule.name} --tenant {rule.tenant}",
                "/copies",
                f"copy_forward_{rule.tenant}_{rule.name}",
            )
            for rule, problem in found
            if not problem and (state := self._broker.copy_rules.forwarding.get((rule.tenant, rule.name)))
            if state.problem
        ] + [
            Finding(
                Level.PROBLEM if rule.when_full is WhenFull.REFUSE else Level.NOTE,
                f"Rule {rule.name} of tenant {rule.tenant} cannot copy mail: {problem}.",
                f"Create the mailbox, or end the rule: mediator copy remove {rule.name} --tenant {rule.tenant}",
                "/copies",
                f"copy_rule_{rule.tenant}_{rule.name}",
            )
            for rule, problem in found
            if problem
        ]


def _target(rule: CopyRule, address: str) -> Create:
    """Return what makes the mailbox that a rule copies to; what is forwarded stays there only until then."""
    retention = Retention.UNTIL_ACK if rule.forwards else Retention.KEEP
    return Create(rule.tenant, address, ttl=0, desc=f"copies by rule {rule.name}", retention=retention)


def _given(request: OperationRequest, name: str) -> list[Any]:
    """Return a list of words; forms send an empty one for none."""
    return [word for word in request.get(name) or () if word]


class CopySeries(Collector):
    """What the rules did at this instance as series; may be collected on any thread."""

    def __init__(self, rules: CopyRuleCache) -> None:
        self._rules = rules

    def collect(self) -> Iterator[Metric]:
        """Return the series, for the library; of a rule from the first message on that it matches."""
        series = CounterMetricFamily(
            "mediator_copies",
            "Messages that a rule matched, and what became of their copies: copied, dropped, or both refused; then "
            "forwarded, and failed attempts to.",
            labels=["tenant", "rule", "outcome"],
        )
        for (tenant, rule), counts in list(self._rules.counts.items()):
            for outcome in _OUTCOMES:
                series.add_metric([tenant, rule, outcome], getattr(counts, outcome))
        lag = GaugeMetricFamily(
            "mediator_copy_lag_seconds",
            "How long the oldest copy of a rule that forwards has waited for its confirmation, as measured every 15 s.",
            labels=["tenant", "rule"],
        )
        for (tenant, rule), state in list(self._rules.forwarding.items()):
            series.add_metric([tenant, rule, "forwarded"], state.forwarded)
            series.add_metric([tenant, rule, "failed"], state.failed)
            lag.add_metric([tenant, rule], state.lag / 1000)
        yield series
        yield lag
