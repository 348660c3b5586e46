"""What operators ask of the registry through the control socket."""

from typing import Any

from mediator.operators.control import ControlServer
from registry.following import Following
from registry.meanings import Meanings


class RegistryOperating:
    """The command ``registry``: how far the index and the vectors are."""

    def __init__(self, following: Following, meanings: Meanings | None) -> None:
        self._following = following
        self._meanings = meanings

    def register(self, control: ControlServer) -> None:
        """Teach the control socket."""
        control.register("registry", self._status)

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
                "runs": meanings.encoder.model,
                "space": meanings.encoder.space,
                "problem": meanings.encoder.problem,
                "embedded": await meanings.embedded(),
            },
        }
