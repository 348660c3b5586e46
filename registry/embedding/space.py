"""Identifies embedding spaces: which vectors can be compared with each other."""

from typing import Final, NamedTuple

REMOTE: Final = "remote"
"""Precision of vectors that a server gives."""


class EmbeddingSpace(NamedTuple):
    """Vectors of one space are made the same way, down to the precision of the arithmetic, and never mixed with others.

    Written as ``MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE``.
    """

    model: str
    """As in ``registry.model``: a name, or a folder."""
    fingerprint: str
    precision: str
    """``float32``, the name of a quantized export, or ``remote``; empty for vectors of older versions, which mixed."""
    dims: int
    template: str
    """The version of the texts that are composed of a card."""

    def __str__(self) -> str:
        """Return it in the form that is stored with vectors."""
        precision = f"/{self.precision}" if self.precision else ""
        return f"{self.model}@{self.fingerprint}{precision}/{self.dims}/{self.template}"

    @classmethod
    def parse(cls, text: str) -> "EmbeddingSpace":
        """Parse what ``str`` wrote; ValueError for anything else."""
        model, at, rest = text.rpartition("@")
        fingerprint, *precision, dims, template = rest.split("/") if rest.count("/") in (2, 3) else ("", "", "")
        if not (at and fingerprint and template and dims.isascii() and dims.isdecimal() and len(dims) <= 5):
            raise ValueError(f'expected MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE, got "{text[:1024]}"')
        return cls(model, fingerprint, "".join(precision), int(dims), template)

    @property
    def remote(self) -> bool:
        """Whether a server makes the vectors."""
        return REMOTE in self.precision.split("+")

    def is_comparable(self, other: "EmbeddingSpace") -> bool:
        """Return whether requests of one space can be compared with the cards of the other.

        They can if the model is the same: precision and template change a vector far less than another card would. But
        the cards themselves must all be of one space, or their ranks would depend on when they were embedded.
        """
        return (self.model, self.fingerprint, self.dims) == (other.model, other.fingerprint, other.dims)
