"""Builds the ONNX graph of a BERT sentence encoder from its weights: quantized, and without torch.

The weights may be those of a published model with a difference added, which training made (:mod:`minilm.tune`).

The graph takes ``ids`` and ``mask``, (texts, tokens), and returns ``vectors``, (texts, dims): mean pooling and
normalization are part of it. The same weights always give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

Weights = Mapping[str, NDArray[np.float32]]

_SCALES: Final = ".scales"
"""What the name of a difference's scales ends with."""
_OPSET: Final = 17
_IR: Final = 8  # of the time of that opset, so that older runtimes read the file too
_LARGEST_FACTOR: Final = 64
"""Largest weight that is multiplied with 8-bit integers.

Without VNNI, processors add two products in 16 bits, which may overflow: 2 x 255 x 64 < 2**15 cannot. So vectors are
the same on every processor.
"""


def quantize_difference(difference: Weights) -> dict[str, NDArray[Any]]:
    """Return a difference in the form that is kept: ``NAME`` in 8 bits, and ``NAME.scales``, one for each row.

    A vector is one row.
    """
    made: dict[str, NDArray[Any]] = {}
    for name, values in difference.items():
        rows, scales = _quantize(np.atleast_2d(values), axis=1, largest=127)
        made[name], made[name + _SCALES] = rows.reshape(values.shape), scales[:, 0]
    return made


def add_difference(weights: Weights, difference: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Return weights with a difference added, one of :func:`quantize_difference` or in floating point.

    Raises ValueError when it is that of another model.
    """
    made = dict(weights)
    for name, values in difference.items():
        if name.endswith(_SCALES):
            continue
        if name not in weights or weights[name].shape != values.shape:
            raise ValueError(f"the difference is that of another model: {name}, {values.shape}")
        scales = difference.get(name + _SCALES, np.ones(1, np.float32))
        rows = np.atleast_2d(values).astype(np.float32) * scales[:, None]
        made[name] = weights[name] + rows.reshape(values.shape)
    return made


def build(weights: Weights, config: Mapping[str, Any]) -> ModelProto:
    """Return the graph; ``config`` is the model's ``config.json``. Raises ValueError for another kind of model."""
    wanted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    if found := {key: config.get(key) for key, value in wanted.items() if config.get(key) != value}:
        raise ValueError(f"only a BERT model with {wanted} can be built, this one has {found}")
    graph = _Graph(weights, float(config["layer_norm_eps"]))
    states = graph.embed()
    attention_mask = graph.attention_mask()
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        mixed = graph.attend(states, attention_mask, f"{name}.attention", config["num_attention_heads"])
        states = graph.normalize(graph.add("Add", states, mixed), f"{name}.attention.output.LayerNorm")
        widened = graph.gelu(graph.multiply(states, f"{name}.intermediate.dense"))
        narrowed = graph.multiply_precisely(widened, f"{name}.output.dense")
        states = graph.normalize(graph.add("Add", states, narrowed), f"{name}.output.LayerNorm")
    graph.pool(states)
    return graph.model(dims=config["hidden_size"])


@dataclass
class _Graph:
    """Nodes and constants of the graph, each named by its place."""

    weights: Weights
    epsilon: float
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its output, or a list of several."""
        names = [f"{kind}.{len(self.nodes)}.{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant once; return its name."""
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def embed(self) -> str:
        """Add up the embeddings of tokens, positions and the first token type."""
        table = self.weights["embeddings.word_embeddings.weight"]
        rows, scales = _quantize(table, axis=1, largest=127)
        tokens = self.add("Gather", self.constant("tokens", rows), "ids")
        token_scales = self.add("Gather", self.constant("tokens.scales", scales), "ids")
        words = self.add("Mul", self.add("Cast", tokens, to=TensorProto.FLOAT), token_scales)
        length = self.add("Slice", self.add("Shape", "ids"), *map(self.integers, ([1], [2])))
        places = (
            self.weights["embeddings.position_embeddings.weight"]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        positions = self.add("Slice", self.constant("positions", places), self.integers([0]), length)
        return self.normalize(self.add("Add", words, positions), "embeddings.LayerNorm")

    def attention_mask(self) -> str:
        """Return what is added to attention: 0 for tokens, and the least number for padding."""
        mask = self.add("Cast", self.add("Unsqueeze", "mask", self.integers([1, 2])), to=TensorProto.FLOAT)
        padding = self.add("Sub", self.number(1), mask)
        return str(self.add("Mul", padding, self.number(float(np.finfo(np.float32).min))))

    def attend(self, states: str, mask: str, name: str, heads: int) -> str:
        """Add multi-head attention and the product after it."""
        dims = self.weights[f"{name}.self.query.weight"].shape[0]
        split = self.integers([0, 0, heads, dims // heads])
        orders = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
        query, key, value = (
            self.add("Transpose", self.add("Reshape", self.multiply(states, f"{name}.self.{part}"), split), perm=order)
            for part, order in orders.items()
        )
        scores = self.add("Mul", self.add("MatMul", query, key), self.number((dims // heads) ** -0.5))
        shares = self.add("Softmax", self.add("Add", scores, mask), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", shares, value), perm=[0, 2, 1, 3])
        return self.multiply(self.add("Reshape", mixed, self.integers([0, 0, dims])), f"{name}.output.dense")

    def multiply(self, states: str, name: str) -> str:
        """Multiply with a matrix, both quantized to integers, and add its bias."""
        matrix, scales = _quantize(self.weights[f"{name}.weight"].T, axis=0, largest=_LARGEST_FACTOR)
        quantized, scale, zero = self._quantized(states)
        product = self.add("MatMulInteger", quantized, self.constant(f"{name}.weight", matrix), zero)
        scaled = self.add("Mul", scale, self.constant(f"{name}.scales", scales.reshape(-1)))
        return self._biased(self.add("Mul", self.add("Cast", product, to=TensorProto.FLOAT), scaled), name)

    def multiply_precisely(self, states: str, name: str) -> str:
        """Multiply with a matrix in float32, and add its bias. It is stored in 8 bits.

        The inputs of these matrices vary too widely in size to be quantized.
        """
        matrix, scales = _quantize(self.weights[f"{name}.weight"].T, axis=0, largest=127)
        widened = self.add("Cast", self.constant(f"{name}.weight", matrix), to=TensorProto.FLOAT)
        product = self.add("MatMul", states, self.add("Mul", widened, self.constant(f"{name}.scales", scales)))
        return self._biased(product, name)

    def gelu(self, states: str) -> str:
        """Apply x / 2 (1 + erf(x / sqrt 2))."""
        erf = self.add("Erf", self.add("Div", states, self.number(2**0.5)))
        return str(self.add("Mul", self.add("Mul", states, self.add("Add", erf, self.number(1))), self.number(0.5)))

    def normalize(self, states: str, name: str) -> str:
        """Normalize each token's state."""
        parts = (self.constant(f"{name}.{part}", self.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return str(self.add("LayerNormalization", states, *parts, axis=-1, epsilon=self.epsilon))

    def pool(self, states: str) -> None:
        """Average the tokens' states, and normalize the result to a length of 1."""
        mask = self.add("Cast", self.add("Unsqueeze", "mask", self.integers([2])), to=TensorProto.FLOAT)
        total = self.add("ReduceSum", self.add("Mul", states, mask), self.integers([1]), keepdims=0)
        count = self.add("ReduceSum", mask, self.integers([1]), keepdims=0)
        mean = self.add("Div", total, self.add("Max", count, self.number(1e-9)))
        length = self.add("Max", self.add("ReduceL2", mean, axes=[1], keepdims=1), self.number(1e-12))
        self.nodes.append(helper.make_node("Div", [mean, length], ["vectors"]))

    def model(self, dims: int) -> ModelProto:
        """Return all of it."""
        shape = ["texts", "tokens"]
        graph = helper.make_graph(
            self.nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("ids", "mask")],
            [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["texts", dims])],
            list(self.constants.values()),
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)

    def number(self, value: float) -> str:
        """Return the name of a constant."""
        return self.constant(f"number {value!r}", np.array(value, np.float32))

    def integers(self, values: Sequence[int]) -> str:
        """Return the name of a constant vector."""
        return self.constant(f"integers {values}", np.array(values, np.int64))

    def _quantized(self, states: str) -> list[str]:
        """Return the names of ``states`` as integers, of their scale and of their zero point; once for each."""
        for node in self.nodes:
            if node.op_type == "DynamicQuantizeLinear" and node.input[0] == states:
                return list(node.output)
        return list(self.add("DynamicQuantizeLinear", states, outputs=3))

    def _biased(self, product: str, name: str) -> str:
        return str(self.add("Add", product, self.constant(f"{name}.bias", self.weights[f"{name}.bias"])))


def _quantize(matrix: NDArray[np.float32], *, axis: int, largest: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return integers up to ``largest``, and the scales along ``axis`` that they are to be multiplied with.

    One scale for the whole matrix would be too coarse: the cosine to the exact vectors falls from .99 to .95.
    """
    scales = np.abs(matrix).max(axis=axis, keepdims=True).astype(np.float32) / np.float32(largest)
    scales[scales == 0] = 1
    return np.rint(matrix / scales).astype(np.int8), scales
