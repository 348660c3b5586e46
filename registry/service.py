"""Composes the registry: its core, as the service and an evaluation run it, and what a service adds around it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from pathlib import Path

import structlog
from pydantic import SecretStr

from mediator.announcer import Announcer
from mediator.broker import Broker
from mediator.host import Host
from mediator.http.guard import Guard
from registry.api.console import add_pages
from registry.api.doors import RegistryApi, add_verbs
from registry.api.operations import EXAMPLES, RegistryOperations
from registry.directory import Directory
from registry.embedding.switching import EmbeddingModels
from registry.index.updater import IndexUpdater
from registry.maintenance import examine
from registry.metrics import RegistryMetrics
from registry.outside import OutsideService
from registry.records import NO_MEMORY, Liveness, MemoryPolicy
from registry.search.feedback import RecentSearches, WeakSigns
from registry.search.reranking import Reranker
from registry.search.searcher import Searcher
from registry.settings import RegistrySettings
from registry.tables import RegistryTables

MODELS = "models"
"""Name of the folder for exported models, in the data folder."""

log = structlog.get_logger("registry")


@dataclass(frozen=True, slots=True)
class RegistryServices:
    """A running registry."""

    updater: IndexUpdater
    models: EmbeddingModels | None
    directory: Directory


@asynccontextmanager
async def run_registry(
    broker: Broker,
    liveness: Liveness,
    max_agents: int,
    model: str | None,
    models_dir: Path,
    metrics: RegistryMetrics,
    announcer: Announcer | None = None,
    embeddings: OutsideService | None = None,
    policy: MemoryPolicy = NO_MEMORY,
    recent: RecentSearches | None = None,
    reranker: Reranker | None = None,
) -> AsyncIterator[RegistryServices]:
    """Run the core of a registry inside this block; without ``model`` keywords answer alone.

    ``models_dir`` keeps exported models, ``announcer`` reaches the instances that share the database, ``embeddings``
    has the model, ``reranker`` orders the best agents again. Nothing here waits for a model or for the index.
    """
    async with AsyncExitStack() as stack:
        last_seen = await broker.read(lambda tx, _: tx.table(RegistryTables).agents.last_seen())
        liveness = liveness.ignoring_downtime(last_seen, broker.clock())
        updater = IndexUpdater(broker, liveness)
        shared = announcer is not None
        models = None
        if model is not None:
            models = EmbeddingModels(broker, updater, model, models_dir, shared=shared, server=embeddings)
        searcher = Searcher(broker, liveness, updater, models, metrics, announcer, policy, recent, reranker)
        await searcher.open()
        if reranker is not None:
            await reranker.start()
            stack.push_async_callback(reranker.stop)
        stack.callback(searcher.close)
        stack.push_async_callback(updater.stop)
        if models is None:
            await updater.start("")
        else:
            stack.push_async_callback(models.stop)
            await models.start()
        directory = Directory(broker, liveness, max_agents, updater, searcher, models, policy)
        stack.callback(directory.close)
        yield RegistryServices(updater, models, directory)


@dataclass(frozen=True, slots=True)
class OutsideServices:
    """The servers elsewhere that the settings name."""

    embeddings: OutsideService | None
    reranker: Reranker | None


@asynccontextmanager
async def outside_services(chosen: RegistrySettings, metrics: RegistryMetrics) -> AsyncIterator[OutsideServices]:
    """Make the clients of outside services, and say in the log what is sent to whom; nothing is sent yet."""
    async with AsyncExitStack() as stack:

        def service(what: str, url: str | None, key: SecretStr | None, name: str, done: str) -> OutsideService | None:
            if url is None or not chosen.semantic:
                return None
            secret = None if key is None else key.get_secret_value()
            made = OutsideService(f"the {what} server", url, secret, metrics.outside(name))
            stack.push_async_callback(made.close)
            log.info(f"texts of cards and requests are sent out, to be {done}", to=made.host)
            return made

        embeddings = service("embedding", chosen.embeddings_url, chosen.embeddings_key, "embeddings", "embedded")
        ranking = service("re-ranking", chosen.rerank_url, chosen.rerank_key, "rerank", "re-ranked")
        reranker = None
        if ranking is not None:
            reranker = Reranker(ranking, chosen.rerank_model, chosen.rerank_depth, chosen.rerank_ms / 1000)
        yield OutsideServices(embeddings, reranker)


@asynccontextmanager
async def open_registry(host: Host) -> AsyncIterator[Directory]:
    """Run the registry inside this block: its NATS verbs, its REST API, its commands and checks.

    Nothing here waits for a model or for the index: both are loaded while the service already answers.
    """
    chosen = host.settings.section(RegistrySettings)
    metrics = RegistryMetrics(host.metrics.registry)
    model = chosen.embedding_model if chosen.semantic else None
    announcer = host.announcer("found")
    guard = Guard([ip_network(network) for network in chosen.outbound_networks])
    models_dir = host.settings.data_dir / MODELS
    policy = chosen.memory_policy(host.tenants.parties)
    recent = RecentSearches(host.announcer("asked"))
    async with (
        outside_services(chosen, metrics) as outside,
        run_registry(
            host.broker,
            chosen.liveness,
            chosen.max_agents,
            model,
            models_dir,
            metrics,
            announcer,
            outside.embeddings,
            policy,
            recent,
            outside.reranker,
        ) as made,
    ):
        updater, models = made.updater, made.models
        metrics.agents.set_function(lambda: updater.agents)
        if models is not None:
            metrics.watch_model(lambda: models.unembedded, lambda: models.encoder.ready)
        host.add_health_check("registry", updater.check)
        host.operations.add_methods(RegistryOperations(host.broker, made.directory, updater, models))
        host.operations.examples |= EXAMPLES
        host.add_doctor_check(partial(examine, updater, models, outside.reranker))
        signs = WeakSigns(made.directory.record_sign)
        signs.start()
        add_verbs(host, made.directory, policy, signs)
        add_pages(host.console)
        RegistryApi(made.directory, host.callers, guard).add_routes(host.app)
        try:
            yield made.directory
        finally:
            await signs.stop()
            await guard.close()
