"""Names what vectors can be compared with each other: the model, and how texts were brought to it and encoded."""

from typing import NamedTuple


class Space(NamedTuple):
    """Vectors of one space were made alike, down to the precision of the arithmetic; they are never mixed with others.

    Written as ``MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE``.
    """

    model: str
    """As in ``registry.model``: a name, or a folder."""
    fingerprint: str
    precision: str
    """What the model was computed in: ``float32``, or the recipe of an export in whole numbers. Former versions did
    not write it, and mixed both: then it is empty."""
    dims: int
    template: str
    """The version of the texts that are made of a card."""

    def __str__(self) -> str:
        """Write it as it is kept with vectors."""
        precision = f"/{self.precision}" if self.precision else ""
        return f"{self.model}@{self.fingerprint}{precision}/{self.dims}/{self.template}"

    @classmethod
    def parse(cls, text: str) -> "Space":
        """Read what ``str`` wrote; ValueError when it is none."""
        model, at, rest = text.rpartition("@")
        fingerprint, *precision, dims, template = rest.split("/") if rest.count("/") in (2, 3) else ("", "", "")
        if not (at and fingerprint and template and dims.isascii() and dims.isdecimal() and len(dims) <= 5):
            raise ValueError(f'expected MODEL@FINGERPRINT/PRECISION/DIMS/TEMPLATE, got "{text[:1024]}"')
        return cls(model, fingerprint, "".join(precision), int(dims), template)

    def is_comparable(self, other: "Space") -> bool:
        """Say whether a request in the one can be compared with cards in the other, all of them.

        The same model read both; precision and template move a vector far less than another card would. Cards among
        each other must be of one space: they would rank by when they came.
        """
        return (self.model, self.fingerprint, self.dims) == (other.model, other.fingerprint, other.dims)
