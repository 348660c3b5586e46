"""Hatchling's hook: an sdist, a wheel or an editable install of a checkout has the default model packed first."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parents[1]))
from minilm.pack import REQUIREMENTS, is_packed, pack


class ModelHook(BuildHookInterface[Any]):
    """Packs the model unless that was done before: an sdist has it."""

    def dependencies(self) -> list[str]:
        """Return what is needed to pack it."""
        return [] if is_packed(Path(self.root)) else REQUIREMENTS

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Pack it; pyproject.toml says that the folder is part of the build."""
        if not is_packed(Path(self.root)):
            pack(Path(self.root))
