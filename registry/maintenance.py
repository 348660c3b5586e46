"""Keeps the registry in order: steps of the clean-up (G3), findings of ``mediator doctor``, checks of ``verify``."""

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from mediator.cleanup.collector import CleanupStep, SliceResult
from mediator.mailboxes.collecting import PlannedRemoval
from mediator.mailboxes.rows import Row
from mediator.operate.diagnosis import Finding, Level
from mediator.operate.units import format_count
from mediator.store.base import Transaction
from mediator.system.extras import install_command
from mediator.verify.checks import DamageKind, RowCheck, VerifyCheck, orphans
from registry import rules
from registry.embedding.models import EmbeddingSpace, missing_extra
from registry.records import Liveness
from registry.tables import RegistryTables

if TYPE_CHECKING:
    from registry.embedding.remote import RemoteModel
    from registry.embedding.switching import EmbeddingModels
    from registry.index.updater import IndexUpdater
    from registry.search.reranking import Reranker

_BACKENDS = {
    "onnx": "run by onnxruntime",
    "reference": "as sentence-transformers, which is slower: the log says why it cannot be exported",
    "remote": "on the server of registry.embeddings_url",
    "": "but does not run",
}


class SilentAgents(CleanupStep):
    """Removes agents that have given no sign of life for long."""

    name = "agents"

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Look at agents in the order in which they were last seen."""
        removed, after = rules.collect_agents(
            tx.table(RegistryTables), self._liveness, self.cursor or rules.FIRST_SEEN, now, limit
        )
        return SliceResult(removed.total, after is not None, asdict(removed), after)

    def plan(self, tx: Transaction, now: int, examples: int) -> list[PlannedRemoval]:
        """Say which agents would be removed."""
        return rules.plan_collecting(tx.table(RegistryTables), self._liveness, now, examples)


class UnusedRequests(CleanupStep):
    """Forgets requests that were not asked for long, and what was remembered of agents that are removed."""

    name = "remembered_requests"

    def __init__(self, keep: int) -> None:
        """``keep``: milliseconds."""
        self._keep = keep

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` requests, and votes on as many agents."""
        removed, more = rules.collect_requests(tx.table(RegistryTables), self._keep, now, limit)
        return SliceResult(removed, more)


class RemovedAgents(CleanupStep):
    """Forgets which agents were removed long ago; they are not counted, since every index has heard of it."""

    name = "removed_agents"

    def run(self, tx: Transaction, now: int, limit: int) -> SliceResult:
        """Forget at most ``limit`` removals."""
        forgotten = rules.forget_removed_agents(tx.table(RegistryTables), now, limit)
        return SliceResult(forgotten, forgotten >= limit)


async def examine(
    updater: "IndexUpdater", models: "EmbeddingModels | None", reranker: "Reranker | None" = None
) -> list[Finding]:
    """Return the findings on the index, then those on the models; the health checks say whether it is current."""
    if not updater.loaded:
        index = Finding(Level.NOTE, "The registry is being read into memory; searches wait for it.")
    else:
        index = Finding(Level.OK, f"The registry holds {_agents(updater.agents)}.")
    findings = [index, *await _examine_models(updater, models)]
    if reranker is not None:
        text = f"Texts of the first {reranker.depth} cards of a search are sent to {reranker.host}, to be re-ranked."
        findings.append(Finding(Level.OK, text))
    if reranker is not None and reranker.problem is not None:
        why = reranker.detail or reranker.problem
        text = f"Nothing is re-ranked: {why}."
        findings.append(Finding(Level.PROBLEM, text, "See registry.rerank_url.", code="reranker_down"))
    return findings


async def _examine_models(updater: "IndexUpdater", models: "EmbeddingModels | None") -> list[Finding]:
    if models is None:
        return [Finding(Level.OK, "Search by meaning is turned off: sentences are answered by keywords.")]
    return [*map(_sent_out, models.servers), *await _examine_model(updater, models)]


def _sent_out(model: "RemoteModel") -> Finding:
    """Say what leaves the machine."""
    text = f"Texts of cards and requests are sent to {model.host}, to be embedded by {model.name}."
    if not model.shortened:
        return Finding(Level.OK, text)
    cut = format_count(model.shortened, "text")
    return Finding(Level.NOTE, f"{text} {cut} were longer than the model takes and were cut.", "See registry.model.")


async def _examine_model(updater: "IndexUpdater", models: "EmbeddingModels") -> list[Finding]:
    if models.encoder.problem is not None:
        return [_not_running(models)]
    if not updater.loaded:
        return []
    if updater.space != str(models.encoder.space):
        return [_switching(models, await models.count_embedded(), updater.agents)]
    backend = _BACKENDS[models.encoder.model]
    findings = [Finding(Level.OK, f"The model {models.model} reads sentences, {backend}.")]
    if missing := updater.agents - updater.embedded:
        text = f"{_agents(missing)} without vectors, found by keywords alone until the model has read the cards."
        findings.append(Finding(Level.NOTE, text, "If the number does not fall, see the log."))
    return findings


def _not_running(models: "EmbeddingModels") -> Finding:
    """Say why the configured model does not answer, and what answers instead."""
    instead = "Keywords answer meanwhile." if models.problem else "The former model answers meanwhile."
    encoder = models.encoder
    if details := [server.detail for server in models.servers if server.detail]:
        text = f"No vectors are made: {details[0]}."
        return Finding(Level.PROBLEM, text, f"{instead} New cards wait.", code="model_down")
    if not models.servers and (extra := missing_extra(models.model)):
        # The service may have been installed without it on purpose.
        return Finding(
            Level.NOTE,
            f"No search by meaning with {models.model}: {encoder.problem}. {instead}",
            f"{install_command(extra)}, or, if that is meant, set registry.semantic = false.",
        )
    if encoder.failed:
        text = f"The model does not work: {encoder.problem}."
        return Finding(Level.PROBLEM, text, f"See registry.model. {instead}", code="model_down")
    return Finding(Level.NOTE, f"The model {models.model} is not ready: {encoder.problem}.", instead)


def _switching(models: "EmbeddingModels", done: int, agents: int) -> Finding:
    return Finding(
        Level.NOTE,
        f"The model {models.model} reads all cards anew: {done} of {agents} are done.",
        "Keywords answer until then." if models.problem else "The vectors of the former model are used until then.",
    )


def _agents(count: int) -> str:
    return format_count(count, "agent")


_AGAIN = "Register the agent again, or restore a backup."
CARDS = DamageKind("agent_cards", "Agents have no card, or cards have no agent.", _AGAIN)
NAMES = DamageKind("agent_names", "The name of agents is not the one they are found by.", _AGAIN)
COUNTS = DamageKind(
    "agent_count",
    "Tenants have other numbers of agents than the registry counts, which its limit goes by.",
    "Stop the service and count anew with the statements of docs/howto/verify.md; no agent is lost.",
)
REVISIONS = DamageKind("agent_revisions", "Changes of agents are ahead of the registry's clock: indexes miss them.")
_EMBED = "Stop the service and delete them: `DELETE FROM agent_vectors`; the model reads the cards again."
VECTORS = DamageKind("agent_vectors", "Vectors belong to no agent, or are of a card that it never had.", _EMBED)
SHAPES = DamageKind("vector_shape", "Vectors have another length than those of their model.", _EMBED)
VOTES = DamageKind(
    "request_votes",
    "Votes are on no remembered request.",
    "Stop the service and delete those whose `request_no` is no `no` of `past_request`.",
)


def registry_checks() -> list[VerifyCheck]:
    """Return the checks."""
    return [
        orphans(CARDS, "agent_card", "agent_no", "agent"),
        orphans(CARDS, "agent", "no", "agent_card", "agent_no"),
        RowCheck(
            NAMES,
            "agent.no",
            "SELECT no, name_hash, name FROM agent JOIN agent_card ON agent_no = no WHERE {no}",
            "agent {0}",
            judge=lambda row: hashlib.sha256(row[2]).digest() != row[1],
            slice_rows=5000,
        ),
        RowCheck(
            COUNTS,
            "agent.no",
            # All at once: the sum of the slices would not be of one moment.
            "SELECT counts.tenant, agents, (SELECT count(*) FROM agent WHERE agent.tenant = counts.tenant)"
            " FROM (SELECT tenant, agents FROM agent_count UNION ALL SELECT DISTINCT tenant, 0 FROM agent"
            " WHERE {no} AND tenant NOT IN (SELECT tenant FROM agent_count)) AS counts"
            " WHERE agents <> (SELECT count(*) FROM agent WHERE agent.tenant = counts.tenant)",
            "tenant {0} counts {1}, and has {2}",
            slice_rows=10_000_000,
            even_empty=True,
        ),
        RowCheck(
            REVISIONS,
            "agent.no",
            "SELECT no, agent.revision FROM agent WHERE {no} AND (card_revision > agent.revision"
            " OR agent.revision > (SELECT revision FROM registry_clock))",
            "agent {0} was changed at {1}",
        ),
        orphans(VECTORS, "agent_vectors", "agent_no", "agent"),
        orphans(VOTES, "request_vote", "request_no", "past_request"),
        RowCheck(
            VECTORS,
            "agent_vectors.agent_no",
            "SELECT agent_no, space FROM agent_vectors JOIN agent ON no = agent_no WHERE {agent_no}"
            " AND agent_vectors.card_revision > agent.card_revision",
            "agent {0} in {1}",
        ),
        RowCheck(
            SHAPES,
            "agent_vectors.agent_no",
            "SELECT agent_no, space, length(vectors) FROM agent_vectors WHERE {agent_no}",
            "agent {0} in {1}",
            judge=_misfit,
        ),
    ]


def _misfit(row: Row) -> bool:
    _, space, length = row
    try:
        dims = EmbeddingSpace.parse(space).dims
    except ValueError:
        return True
    # Two bytes for the dimensions, then rows of half precision.
    return length <= 2 or not dims or bool((length - 2) % (2 * dims))
