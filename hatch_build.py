"""Hatchling's hook: an sdist, a wheel or an editable install of a checkout first gets what is not in git.

What is released, the sdist and the wheel that is built from it, leaves the client to ``agent-mediator-client`` and
depends on it, so that no file is in two distributions. A checkout is installed whole.
"""

import sys
import tomllib
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
        if self.target_name == "wheel" and version == "standard":
            docs = Path(self.root) / "docs"
            # The console shows them.
            for path in (*docs.rglob("*.md"), *(docs / "pictures").iterdir()):
                build_data["force_include"][str(path)] = f"mediator/_docs/{path.relative_to(docs)}"
        from_sdist = (Path(self.root) / "PKG-INFO").exists()
        if self.target_name == "sdist" or (from_sdist and version == "standard"):
            client = tomllib.loads((Path(self.root) / "packages" / "client" / "pyproject.toml").read_text())
            build_data["dependencies"].append(f"{client['project']['name']}=={self.metadata.version}")
            if self.target_name == "wheel":
                theirs = client["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"].values()
                self.build_config.target_config["exclude"] = [f"/{path}" for path in theirs]
