"""Exports a model to ONNX: `python -m registry.embedding.export FOLDER TARGET`.

The worker runs it once and waits for it. The vectors of the export are compared with the reference's before it is kept.
"""

import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from registry.embedding.models import find_model
from registry.embedding.worker import (
    FLOAT32,
    MIXED,
    MODEL,
    TOKENIZER,
    OnnxModel,
    SentenceTransformersModel,
    describe,
    export_folder,
)

MIN_COSINE: Final = 0.98
"""Of each vector to that of the reference."""
SENTENCES: Final = (
    "Translates letters.",
    "What is the weather in Oslo tomorrow, and do I need an umbrella on the way to work?",
    "invoice_parser: reads PDF invoices, extracts VAT numbers, line items and totals; returns JSON.",
    "Find me an agent that books trains and hotels, then tells my calendar.",
    "Prüft Verträge auf Kündigungsfristen und fasst sie in einfacher Sprache zusammen.",
    "SQL, dashboards, anomaly detection\nSkills: forecast sales; explain outliers; export to CSV",
    "把会议录音整理成纪要。",
    "x",
    "Plans routes for lorries past low bridges, with rests, tolls and the hours when ferries go. " * 30,
)


def main() -> int:
    """Return 0 when the files exist; after a failure the last line on standard error says why."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    # One export at a time, across instances: so unfinished folders are left over from one that was killed.
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in target.parent.glob(".making-*"):
            shutil.rmtree(left, ignore_errors=True)
        if _is_complete(target):
            return 0
        made = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
        try:
            _export(folder, made)
            found = find_model(str(folder))
            if found is None or export_folder(target.parent, found.fingerprint) != target:
                raise ValueError(f"the model in {folder} has changed")
            if target.exists():
                shutil.rmtree(target)
            made.rename(target)
        except Exception as error:
            sys.stderr.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n")
            return 1
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return 0


def _is_complete(target: Path) -> bool:
    try:
        OnnxModel(target)
    except Exception:  # of any type: the files are made again
        return False
    return True


def _export(folder: Path, made: Path) -> None:
    reference = SentenceTransformersModel(folder)
    model = reference.model
    kinds = [type(module).__name__ for module in model]
    pooling = model[1].pooling_mode if kinds[1:2] == ["Pooling"] else None
    if kinds[0] != "Transformer" or kinds[2:] not in ([], ["Normalize"]) or pooling != "mean":
        raise ValueError(f"only a Transformer with mean pooling can be exported, this is {kinds}, {pooling}")
    wanted = reference.encode(list(SENTENCES))
    model.tokenizer.backend_tokenizer.save(str(made / TOKENIZER))
    plain = made / "plain.onnx"
    _trace(model, plain)
    tried = []
    for precision in _candidates(plain, made / MODEL):
        describe(made, model.max_seq_length, precision)
        cosine = float((OnnxModel(made).encode(list(SENTENCES)) * wanted).sum(axis=1).min())
        if cosine >= MIN_COSINE:
            plain.unlink(missing_ok=True)
            return
        tried.append(f"{precision} {cosine:.3f}")
    raise ValueError(f"the vectors are too far from the reference's: {', '.join(tried)}, wanted {MIN_COSINE}")


def _trace(model: Any, path: Path) -> None:
    import torch

    transformer = model[0].auto_model.eval()
    transformer.set_attn_implementation("eager")
    typed = "token_type_ids" in model.tokenizer.model_input_names

    class Whole(torch.nn.Module):
        """The transformer with pooling and normalization."""

        def __init__(self) -> None:
            super().__init__()
            self.transformer = transformer

        def forward(self, ids: Any, mask: Any) -> Any:
            types = {"token_type_ids": torch.zeros_like(ids)} if typed else {}
            states = self.transformer(input_ids=ids, attention_mask=mask, **types).last_hidden_state
            weights = mask.unsqueeze(-1).to(states.dtype)
            mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, p=2, dim=1)

    sample = model.tokenizer(list(SENTENCES[:2]), padding=True, return_tensors="pt")
    shapes = {name: {0: "texts", 1: "tokens"} for name in ("ids", "mask")} | {"vectors": {0: "texts"}}
    with torch.no_grad():
        torch.onnx.export(
            Whole(),
            (sample["input_ids"], sample["attention_mask"]),
            str(path),
            input_names=["ids", "mask"],
            output_names=["vectors"],
            dynamic_axes=shapes,
            opset_version=17,
            dynamo=False,  # the other exporter needs another library
        )


def _candidates(plain: Path, path: Path) -> Iterator[str]:
    """Write the model to ``path`` in one precision after the other; the caller takes the first that is exact enough.

    The first, quantized one gives the same vectors on every processor: without VNNI two products of 8 bits are added in
    16 bits and may overflow, but with weights of 7 bits they cannot (2 x 255 x 64 < 2**15). Not quantized is what would
    lose most: the products of attention, and the second matrix of each feed-forward, whose inputs vary widely in size.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(plain).graph
    narrowing = {
        matrix.name for matrix in graph.initializer if len(matrix.dims) == 2 and matrix.dims[0] > matrix.dims[1]
    }
    # One scale per column: with one per matrix the cosine to the reference falls from .99 to .95.
    quantize_dynamic(
        str(plain),
        str(path),
        weight_type=QuantType.QInt8,
        per_channel=True,
        reduce_range=True,
        nodes_to_exclude=[node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] in narrowing],
    )
    yield MIXED
    plain.replace(path)
    yield FLOAT32


if __name__ == "__main__":
    sys.exit(main())
