"""What ``mediator doctor`` says of the registry: the state of its index and of its models."""

from mediator.ops.diagnosis import Finding, Level
from mediator.ops.units import format_count
from mediator.system.extras import install_command
from registry.embedding.models import missing_extra
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


async def examine(
    updater: IndexUpdater, models: EmbeddingModels | None, reranker: Reranker | None = None
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
        findings.append(Finding(Level.PROBLEM, f"Nothing is re-ranked: {why}.", "See registry.rerank_url."))
    return findings


async def _examine_models(updater: IndexUpdater, models: EmbeddingModels | None) -> list[Finding]:
    if models is None:
        return [Finding(Level.OK, "Search by meaning is turned off: sentences are answered by keywords.")]
    return [*map(_sent_out, models.servers), *await _examine_model(updater, models)]


def _sent_out(model: RemoteModel) -> Finding:
    """Say what leaves the machine."""
    text = f"Texts of cards and requests are sent to {model.host}, to be embedded by {model.name}."
    if not model.shortened:
        return Finding(Level.OK, text)
    cut = format_count(model.shortened, "text")
    return Finding(Level.NOTE, f"{text} {cut} were longer than the model takes and were cut.", "See registry.model.")


async def _examine_model(updater: IndexUpdater, models: EmbeddingModels) -> list[Finding]:
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


def _not_running(models: EmbeddingModels) -> Finding:
    """Say why the configured model does not answer, and what answers instead."""
    instead = "Keywords answer meanwhile." if models.problem else "The former model answers meanwhile."
    encoder = models.encoder
    if details := [server.detail for server in models.servers if server.detail]:
        return Finding(Level.PROBLEM, f"No vectors are made: {details[0]}.", f"{instead} New cards wait.")
    if not models.servers and (extra := missing_extra(models.model)):
        # The service may have been installed without it on purpose.
        return Finding(
            Level.NOTE,
            f"No search by meaning with {models.model}: {encoder.problem}. {instead}",
            f"{install_command(extra)}, or, if that is meant, set registry.semantic = false.",
        )
    if encoder.failed:
        return Finding(Level.PROBLEM, f"The model does not work: {encoder.problem}.", f"See registry.model. {instead}")
    return Finding(Level.NOTE, f"The model {models.model} is not ready: {encoder.problem}.", instead)


def _switching(models: EmbeddingModels, done: int, agents: int) -> Finding:
    return Finding(
        Level.NOTE,
        f"The model {models.model} reads all cards anew: {done} of {agents} are done.",
        "Keywords answer until then." if models.problem else "The vectors of the former model are used until then.",
    )


def _agents(count: int) -> str:
    return format_count(count, "agent")
