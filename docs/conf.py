"""Configures the documentation site: Sphinx with furo, from the Markdown of docs/ and of the repository's root."""

import tomllib
from pathlib import Path

project = "mediator"
author = copyright = "the authors of agent-mediator, Apache-2.0"
release = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
# The source folder is the root of the repository, so links such as ../SECURITY.md mean the same on the site.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".venv*", "**/node_modules", "build", "dist", "tests", "benchmarks", "mediator-data"]
# Anchors are those of GitHub, for headings of every depth that pages link to.
myst_heading_anchors = 4
nitpicky = True

html_theme = "furo"
html_title = f"mediator {release}"
html_baseurl = ""
html_copy_source = False
html_show_sphinx = False
