"""The options of the registry: the model that reads cards and questions, signs of life, and its bounds."""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from yarl import URL

from mediator.mailboxes.bounds import DAY
from mediator.settings.types import PartSettings, Whole, network
from registry.embedding.models import DEFAULT_MODEL, UNTUNED_MODEL, join_models
from registry.records import Liveness, MemoryPolicy

_MAX_TTL = 365 * 24 * 3600
_MAX_MODELS = 4
_MAX_URL = 2048


def _joinable(models: list[str]) -> list[str]:
    if len(models) > _MAX_MODELS:
        raise ValueError(f"expected at most {_MAX_MODELS} models, got {len(models)}")
    join_models(models or ["none"])
    return models


def _url(value: str) -> str:
    try:
        url = URL(value)
        valid = url.scheme in ("http", "https") and bool(url.host) and url.path != "/" and len(value) <= _MAX_URL
    except ValueError:
        valid = False
    if not valid or url.user is not None or url.fragment:
        raise ValueError("expected http://HOST:PORT/PATH or https://HOST/PATH, the key in an option of its own")
    return value


ServiceUrl = Annotated[str, AfterValidator(_url)]
"""The URL of a service that the operator chose; it may be in the operator's own network."""


class RegistrySettings(PartSettings):
    """The registry: agents publish AgentCards, others find them by keyword and by meaning."""

    enabled: bool = Field(default=True, description="Open the registry. Disable it if you don't need agent discovery.")
    semantic: bool = Field(
        default=True,
        description="Search by meaning, where `agent-mediator[search]` is installed. Disable it to save the memory "
        "of the model, about 130 MB; keywords then answer, with a note.",
    )
    model: str = Field(
        default=DEFAULT_MODEL,
        min_length=1,
        max_length=512,
        description="The model: the default one, tuned for agents and tools, or the same untuned, `all-MiniLM-L6-v2`, "
        "which both come with `agent-mediator[search]`; or any other of sentence-transformers, by folder or by name, "
        "which needs `agent-mediator[models]`. With `registry.embeddings_url` the name of a model there, "
        "`all-MiniLM-L6-v2` by default. After a change all cards are embedded again in the background. Compare models "
        "on your own cards with `mediator agent eval` first.",
    )
    models: Annotated[list[str], AfterValidator(_joinable)] = Field(
        default_factory=list,
        description="Two to four models in place of `registry.model`, each `NAME` or `NAME=WEIGHT`: the weighted mean "
        "of their cosines counts. Slower and larger than one; measure first whether they find more.",
        examples=[["all-MiniLM-L6-v2-agents=0.3", "/srv/models/all-mpnet-base-v2=0.7"]],
    )
    embeddings_url: ServiceUrl | None = Field(
        default=None,
        description="Embed with a server that speaks OpenAI's `/v1/embeddings`, such as Ollama, vLLM, infinity, "
        "text-embeddings-inference or a hosted one, in place of a model here. `registry.model` is then its name there. "
        "The texts of all cards, and of requests by meaning, are sent to it. While it is away, keywords answer.",
        examples=["http://127.0.0.1:11434/v1/embeddings"],
        json_schema_extra={"secret": True},
    )
    embeddings_key: SecretStr | None = Field(
        default=None,
        description="The API key for `registry.embeddings_url`, sent as a bearer token.",
        examples=["change me"],
    )
    rerank_url: ServiceUrl | None = Field(
        default=None,
        description="Re-rank the first agents of a search by meaning with a server that speaks `/rerank`, such as "
        "infinity, text-embeddings-inference, vLLM, Jina or Cohere. The texts of these agents' cards and of the "
        "request are sent to it. Where it is late or away, the first order stands, with a note.",
        examples=["http://127.0.0.1:7997/rerank"],
        json_schema_extra={"secret": True},
    )
    rerank_key: SecretStr | None = Field(
        default=None,
        description="The API key for `registry.rerank_url`, sent as a bearer token.",
        examples=["change me"],
    )
    rerank_model: str = Field(
        default="",
        max_length=512,
        description="The model's name at `registry.rerank_url`; empty where the server has only one.",
    )
    rerank_depth: Whole = Field(
        default=20, ge=2, le=50, description="How many agents of a search are re-ranked; more take longer."
    )
    rerank_ms: Whole = Field(
        default=300,
        ge=1,
        le=10_000,
        description="Milliseconds that a search waits to be re-ranked. Protects DISCOVER from a slow server.",
    )
    default_ttl: Whole = Field(
        default=0,
        ge=0,
        le=_MAX_TTL,
        description="Seconds between two signs of life of an agent whose card has no `ttl`; 0 expects none, and such "
        "agents are always alive. Set it if your agents send AGENT.REPORT.",
    )
    grace_seconds: Whole = Field(
        default=Liveness().grace // 1000,
        ge=0,
        le=_MAX_TTL,
        description="Seconds for which an agent that missed its sign of life is stale, and still found, before it is "
        "gone; its own ttl if that is longer. Protects slow agents from being taken for dead.",
    )
    keep_days: Whole = Field(
        default=Liveness().keep // DAY,
        ge=0,
        le=3650,
        description="Days after which the clean-up removes an agent that is gone; 0 never removes one. Protects the "
        "catalog from agents that no longer exist; until then a report brings an agent back.",
    )
    max_agents: Whole = Field(
        default=1_000_000,
        ge=0,
        description="Agents that one tenant may register; 0 is no limit. Protects memory: search needs about 6 kB per "
        "agent.",
    )
    memory: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Remember which agents served which requests (AGENT.FEEDBACK), and lift them for requests alike. "
        "`auto`: for tenants with at most one user and one API token; where several parties share a tenant each could "
        "praise its own agents, so it must be turned on.",
    )
    memory_tenants: list[str] = Field(
        default_factory=list,
        description="Tenants for which this is turned on in any case.",
        examples=[["acme"]],
    )
    memory_signs: list[str] = Field(
        default_factory=list,
        description="Tenants for which a message to an agent is a weak sign that it served, a quarter of a vote, "
        "if the same NATS connection found the agent within ten minutes before.",
        examples=[["default"]],
    )
    memory_requests: Whole = Field(
        default=MemoryPolicy().max_requests,
        ge=1,
        le=10_000_000,
        description="Requests of one tenant that are remembered; then those that were not asked for longest are "
        "forgotten. Protects memory: each takes about 1.5 kB.",
    )
    memory_days: Whole = Field(
        default=MemoryPolicy().keep // DAY,
        ge=1,
        le=3650,
        description="Days after which a remembered request is forgotten, unless it is asked again.",
    )
    outbound_networks: list[Annotated[str, AfterValidator(network)]] = Field(
        default_factory=list,
        description="Private networks (10.1.0.0/16) that cards may be fetched from when an agent is registered by "
        "URL. Protects your own network: the caller chooses the URL, so other private addresses are refused.",
        examples=[["10.1.0.0/16"]],
    )

    @property
    def embedding_model(self) -> str:
        """The model, or one name for all of ``models``."""
        if self.models:
            return join_models(self.models)
        # No server has the tuned one.
        untuned = self.embeddings_url is not None and "model" not in self.model_fields_set
        return UNTUNED_MODEL if untuned else self.model

    def memory_policy(self, count_credentials: Callable[[str], int] = lambda _tenant: 0) -> MemoryPolicy:
        """Return for whom is remembered what; ``count_credentials`` returns how many credentials a tenant has."""
        return MemoryPolicy(
            self.memory,
            frozenset(self.memory_tenants),
            frozenset(self.memory_signs),
            count_credentials,
            self.memory_requests,
            self.memory_days * DAY,
        )

    @property
    def liveness(self) -> Liveness:
        """When agents are alive, in milliseconds. While the registry is closed, agents cannot report and are kept."""
        keep_days = self.keep_days if self.enabled else 0
        return Liveness(self.default_ttl * 1000, self.grace_seconds * 1000, keep_days * DAY)
