"""Fetches the libraries that the console's pages load: htmx, uPlot for plots, Swagger UI.

PyPI has them inside of packages whose requirements nobody wants here, so pip downloads those without requirements. The
files are those that the projects publish themselves on npm, byte for byte. Run it with ``python -m weblib.pack``.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = ["pip>=23"]
FOLDER: Final = "mediator/console/static/lib"

_SOURCES: Final = {
    "django-htmx==1.29.0 --hash=sha256:0ec5be1645ed71e6787bd75e0250624f00274ac3bb1730f07b6629a95688929b": {
        "htmx.min.js": "django_htmx/static/django_htmx/htmx-2.min.js",
    },
    "youplot==1.0.0 --hash=sha256:31fe55753a3a073ba1bf2979708443d87d11bb9e0250a0c1ab23118e1e70fb94": {
        "uplot.min.js": "youplot/vendor/uplot.iife.min.js",
        "uplot.min.css": "youplot/vendor/uplot.min.css",
    },
    "swagger-ui-py==25.7.1 --hash=sha256:3a6b14952d5714bdfce66d7de405e80cbe9e311d7aed4ef6c190e006d1dbb545": {
        "swagger-ui.js": "swagger_ui/static/swagger-ui-bundle.js",
        "swagger-ui.css": "swagger_ui/static/swagger-ui.css",
    },
}
_NOTICE: Final = f"""\
htmx 2.0.10, https://htmx.org, under the Zero-Clause BSD licence.
uPlot 1.6.31, https://github.com/leeoniya/uPlot, under the MIT licence, Copyright (c) 2022 Leon Sorokin.
Swagger UI 5.24.2, https://github.com/swagger-api/swagger-ui, under the Apache License 2.0, SmartBear Software.
Unchanged, from these packages of PyPI:
{chr(10).join(_SOURCES)}
"""


def is_packed(root: Path) -> bool:
    """Return whether the files are there, from the packages that this version of the code names."""
    notice = root / FOLDER / "NOTICE"
    return notice.exists() and notice.read_text() == _NOTICE


def pack(root: Path) -> None:
    """Make the folder; raises SystemExit with the reason when pip cannot get the packages."""
    folder = root / FOLDER
    folder.mkdir(exist_ok=True)
    for requirement, files in _SOURCES.items():
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(_download(Path(scratch), requirement)) as wheel:
            for name, source in files.items():
                (folder / name).write_bytes(wheel.read(source))
    (folder / "NOTICE").write_text(_NOTICE)


def _download(scratch: Path, requirement: str) -> Path:
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{requirement}\n")
    options = ["--quiet", "--no-deps", "--requirement", str(wanted), "--dest", str(scratch)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options], check=False).returncode:
        raise SystemExit(
            f"the console's libraries cannot be packed: pip could not download {requirement.partition(' ')[0]}"
        )
    return next(scratch.glob("*.whl"))


if __name__ == "__main__":
    pack(Path(__file__).parents[1])
