"""A model as sentence-transformers runs it: any model, exactly, at the price of torch's memory and start."""

from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from registry.embedding.fast import FLOAT32

KIND: Final = "reference"


class Reference:
    """A loaded model."""

    kind = KIND
    precision = FLOAT32

    def __init__(self, folder: Path) -> None:
        """Load it, which takes seconds; raises what sentence-transformers does."""
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        self.model: Any = SentenceTransformer(str(folder), device="cpu")

    def encode(self, texts: list[str]) -> NDArray[np.float32]:
        """Give normalised vectors, (texts, dims); at least one text is wanted."""
        vectors = self.model.encode(texts, batch_size=8, normalize_embeddings=True, show_progress_bar=False)
        return cast(NDArray[np.float32], vectors)
