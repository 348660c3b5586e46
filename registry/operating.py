"""What operators ask of the registry: how far the index and the vectors are, and what is wrong with them."""

from typing import Any

from mediator.operators.control import ControlServer
from mediator.operators.diagnosis import Finding, Level
from mediator.operators.spans import show_count
from registry.embedding.models import lacking
from registry.following import Following
from registry.meanings import Meanings


class RegistryOperating:
    """The command ``registry``, and what the doctor says."""

    def __init__(self, following: Following, meanings: Meanings | None) -> None:
        self._following = following
        self._meanings = meanings

    def register(self, control: ControlServer) -> None:
        """Teach the control socket."""
        control.register("registry", self._status)

    async def examine(self) -> list[Finding]:
        """Say how the registry is; that the index does not follow is for the health checks to say."""
        findings = [self._index()]
        if self._meanings is None:
            findings.append(Finding(Level.OK, "Search by meaning is turned off: sentences are answered by keywords."))
        elif self._meanings.encoder.problem is not None:
            findings.append(_lame(self._meanings))
        else:
            findings += await self._vectors(self._meanings)
        return findings

    def _index(self) -> Finding:
        if not self._following.loaded:
            return Finding(Level.NOTE, "The registry is being read into memory; searches wait for it.")
        return Finding(Level.OK, f"The registry holds {_agents(self._following.agents)}.")

    async def _vectors(self, meanings: Meanings) -> list[Finding]:
        following, encoder = self._following, meanings.encoder
        if not following.loaded:
            return []
        if following.space != str(encoder.space):
            return [_rereading(meanings, await meanings.embedded(), following.agents)]
        missing = following.agents - following.embedded
        runs = Finding(Level.OK, f"The model {meanings.model} reads sentences, {_RUNS[encoder.model]}.")
        if not missing:
            return [runs]
        return [
            runs,
            Finding(
                Level.NOTE,
                f"{_agents(missing)} without vectors, found by keywords alone until the model has read the cards.",
                "Should that not get fewer, the log says why.",
            ),
        ]

    async def _status(self, _request: dict[str, Any]) -> dict[str, Any]:
        following, meanings = self._following, self._meanings
        return {
            "loaded": following.loaded,
            "problem": await following.check(),
            "agents": following.agents,
            "embedded": following.embedded,
            "space": following.space,
            "model": None
            if meanings is None
            else {
                "name": meanings.model,
                "runs": meanings.encoder.model,
                "space": None if meanings.encoder.space is None else str(meanings.encoder.space),
                "problem": meanings.encoder.problem,
                "embedded": await meanings.embedded(),
            },
        }


_RUNS = {
    "onnx": "exported to onnx",
    "reference": "as sentence-transformers, which is slower: the log says why it cannot be exported",
    "": "but does not run",
}


def _lame(meanings: Meanings) -> Finding:
    """Say why the configured model does not answer, and who does."""
    instead = "Keywords answer meanwhile." if meanings.problem else "The former model answers meanwhile."
    encoder = meanings.encoder
    if lacking(meanings.model):
        # As the service was installed, which may be meant.
        return Finding(
            Level.NOTE,
            f"No search by meaning: {encoder.problem}.",
            "Keywords answer. If that is meant, set registry.semantic = false.",
        )
    if encoder.failed:
        return Finding(Level.PROBLEM, f"The model does not work: {encoder.problem}.", f"See registry.model. {instead}")
    return Finding(Level.NOTE, f"The model {meanings.model} is not ready: {encoder.problem}.", instead)


def _rereading(meanings: Meanings, done: int, agents: int) -> Finding:
    return Finding(
        Level.NOTE,
        f"The model {meanings.model} reads all cards anew: {done} of {agents} are done.",
        "Keywords answer until then." if meanings.problem else "The vectors of the former model are used until then.",
    )


def _agents(count: int) -> str:
    return show_count(count, "agent")
