"""What ``mediator verify`` checks of the registry: agents, their cards, counts and vectors."""

import hashlib

from mediator.ops.verify.checks import DamageKind, RowCheck, VerifyCheck, orphans
from mediator.store.rows import Row
from registry.embedding.space import EmbeddingSpace

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
