"""Operations on the rules by which mail is copied, their metrics, and what the doctor finds in them (C1–C6)."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from mediator.broker import Broker
from mediator.errors import MailboxExistsError, NoSuchTenantError, NotAllowedError
from mediator.fields import Fields
from mediator.mailboxes import copying
from mediator.mailboxes.address import DEFAULT_TENANT
from mediator.mailboxes.bounds import MAX_TAG, MAX_TAGS
from mediator.mailboxes.copy_rule import EVERY, CopyCounts, CopyRule, CopyRuleCache, WhenFull
from mediator.mailboxes.creating import Create
from mediator.mailboxes.lanes import LANES, parse_lane
from mediator.mailboxes.message import Door
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.operations import (
    ADDRESS,
    FLAG,
    LANE,
    MAIL_ADDRESS,
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
    operation,
    or_null,
    whole,
)
from mediator.operate.records import COPY_WORDS, CopyRuleView
from mediator.store.base import Transaction

MAX_TTL_SECONDS: Final = 100 * 366 * 86400
_OUTCOMES: Final = ("matched", "copied", "dropped", "refused")


class CopyOperations:
    """The operations."""

    def __init__(self, broker: Broker, tenants: Sequence[str]) -> None:
        """``tenants``: the names of all living ones, kept up to date by their owner."""
        self._broker = broker
        self._tenants = tenants

    async def configure(self, rules: Sequence[CopyRule]) -> None:
        """Take over the rules of the settings, and make the mailboxes that they copy to and that are missing."""
        self._broker.copy_rules.configure(rules)
        for rule in rules:
            with suppress(MailboxExistsError):
                desc = f"copies by rule {rule.name}"
                await self._broker.create(Create(rule.tenant, rule.to_address, ttl=0, desc=desc))

    @operation(
        "copy-rule-list",
        Right.READ,
        "The rules by which mail is copied to another mailbox, and how often they did",
        object_schema(rules=many(CopyRuleView.schema())),
        fields={"tenant": about(TEXT, "Of this tenant alone.")},
        path="/copy-rules",
    )
    async def _list(self, request: OperationRequest) -> Answer:
        wanted = request.get("tenant", "")
        found = [each for each in await self._look() if wanted in ("", each[0].tenant)]
        return {"rules": [self._show(rule, problem).to_json() for rule, problem in found]}

    async def _look(self) -> list[tuple[CopyRule, str]]:
        """Return all rules, each with why it has nowhere to copy to, if it has not."""
        rules = CopyRuleCache(self._broker.copy_rules.configured)

        def look(tx: Transaction, now: int) -> list[tuple[CopyRule, str]]:
            rules.load(0, tx.copy_rules.stored())
            found = [(rule, copying.find_target(tx, rule, now)) for some in rules.by_tenant.values() for rule in some]
            return [(rule, target if isinstance(target, str) else "") for rule, target in found]

        return await self._broker.read(look)

    def _show(self, rule: CopyRule, problem: str) -> CopyRuleView:
        counts = self._broker.copy_rules.counts.get((rule.tenant, rule.name), CopyCounts())
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
            state=problem or "ok",
            **{outcome: getattr(counts, outcome) for outcome in _OUTCOMES},
        )

    @operation(
        "copy-rule-add",
        Right.OPERATE,
        "Copy mail by rule to another mailbox of the tenant, from now on; needs the right read-payload too",
        object_schema(tenant=TEXT, name=TEXT, address=ADDRESS, to_address=ADDRESS),
        fields={
            "tenant": TENANT,
            "name": about(TEXT, "What the rule is called."),
            "address": about(ADDRESS, COPY_WORDS["address"], default=EVERY),
            "tags": about(TEXTS, COPY_WORDS["tags"]),
            "priorities": about(many(LANE), COPY_WORDS["priorities"]),
            "doors": about(many({"type": "string", "enum": [*Door]}), COPY_WORDS["doors"]),
            "to_address": about(MAIL_ADDRESS, "The other mailbox: an address, or `id:` and its number."),
            "headers_only": about(FLAG, COPY_WORDS["headers_only"], default=False),
            "when_full": about({"type": "string", "enum": [*WhenFull], "default": "refuse"}, COPY_WORDS["when_full"]),
            "ttl_seconds": or_null(whole("How long a copy is kept; 0, null or absent: for ever.", 0, MAX_TTL_SECONDS)),
        },
        required=("name", "to_address"),
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
        rule = CopyRule(
            tenant,
            request["name"],
            request["to_address"],
            request["address"] or EVERY,
            fields.words("tags", MAX_TAGS, MAX_TAG) or (),
            tuple(lane for lane in LANES if lane in lanes),
            tuple(door for door in Door if door in doors),
            request["headers_only"],
            WhenFull(request["when_full"]),
            ttl * 1000 if ttl else None,
        )
        made = await self._broker.write(
            lambda tx, now: copying.add_rule(tx, rule, now), (tenant, rule.to_address), even_when_full=True
        )
        return {"tenant": tenant, "name": made.name, "address": made.address, "to_address": made.to_address}

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
        """Say which rules have nowhere to copy to: with `refuse`, what they match is refused."""
        return [
            Finding(
                Level.PROBLEM if rule.when_full is WhenFull.REFUSE else Level.NOTE,
                f"Rule {rule.name} of tenant {rule.tenant} cannot copy mail: {problem}.",
                f"Create the mailbox, or end the rule: mediator copy remove {rule.name} --tenant {rule.tenant}",
                "/copies",
                f"copy_rule_{rule.tenant}_{rule.name}",
            )
            for rule, problem in await self._look()
            if problem
        ]


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
            "Messages that a rule matched, and what became of their copies: copied, dropped, or both refused.",
            labels=["tenant", "rule", "outcome"],
        )
        for (tenant, rule), counts in list(self._rules.counts.items()):
            for outcome in _OUTCOMES:
                series.add_metric([tenant, rule, outcome], getattr(counts, outcome))
        yield series
