"""Configures the documentation site: Sphinx with furo, from the Markdown of docs/ and of the repository's root."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "mediator"
copyright = "the authors of agent-mediator, Apache-2.0"
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
release = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
# The source folder is the root of the repository, so links such as ../SECURITY.md mean the same on the site.
root_doc = "docs/index"
include_patterns = [
    "docs/**.md", "examples/README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
]  # fmt: skip
exclude_patterns = [".venv*", "**/node_modules", "build", "dist", "tests", "benchmarks", "mediator-data"]
# Anchors of headings are those of GitHub, down to the depth that pages link to.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True
# The reference of the client names types of Python and of modules that have no page.
nitpick_ignore_regex = [(r"py:.*", r".*")]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Prompts, and what a command prints, are not copied.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"mediator {release}"
html_extra_path = ["site"]
html_copy_source = False
html_show_sphinx = False
# Each page links to its source, to be edited, once the project has a public repository.
if "Repository" in _PROJECT.get("urls", {}):
    html_theme_options = {
        "source_repository": _PROJECT["urls"]["Repository"],
        "source_branch": "main",
        "source_directory": "",
    }
