"""Hatchling's hook: an sdist, a wheel or an editable install of a checkout first gets what is not in git."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from minilm import pack as model
from weblib import pack as libraries


class PackHook(BuildHookInterface[Any]):
    """Makes the default model and the console's libraries, unless that was done before: an sdist has them."""

    def dependencies(self) -> list[str]:
        """Return what is needed to make what is missing."""
        return [
            name for made in (model, libraries) if not made.is_packed(Path(self.root)) for name in made.REQUIREMENTS
        ]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make it; pyproject.toml says that the folders are part of the build."""
        for made in (model, libraries):
            if not made.is_packed(Path(self.root)):
                made.pack(Path(self.root))
