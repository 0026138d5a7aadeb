"""TensorSpec: what planning knows of a tensor (never its values)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from layerwise.arguments import checked_values
from layerwise.errors import LayerwiseError

ITEM_BYTES = {
    "complex128": 16, "complex64": 8, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

LABELS = ("n", "c", "d", "h", "w", "l", "s")  # of tensor dimensions; a reduction is "k"


@checked_values
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, a label (or None) and a granularity for every dimension, and the element type.

    Attributes:
        shape: Extents, each at least 1.
        dims: Labels, unique in a tensor: n sample, c channel, l length, h height, w width, d depth, s sequence. None:
            never split.
        dtype: PyTorch's name of the element type.
        units: A dimension with unit u is cut only at multiples of u (it was merged from an outer one and u inner
            elements).

    Examples:
        >>> TensorSpec((32, 64, 7), ("n", "c", None)).describe()
        '(n=32, c=64, 7)'
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...]
    dtype: str = "float32"
    units: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.units:
            object.__setattr__(self, "units", (1,) * len(self.shape))
        assert len(self.shape) == len(self.dims) == len(self.units), self
        named = [d for d in self.dims if d]
        assert len(set(named)) == len(named), f"labels must be unique: {self.dims}"
        if self.dtype not in ITEM_BYTES:
            raise LayerwiseError(f"element type {self.dtype!r} is not supported; use one of {', '.join(ITEM_BYTES)}")
        if any(s < 1 for s in self.shape):
            raise LayerwiseError(f"a tensor of shape {self.shape} has no elements")

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def differentiable(self) -> bool:
        """True if a gradient flows through it."""
        return "float" in self.dtype or "complex" in self.dtype

    def index(self, label: str) -> int | None:
        """The dimension that carries `label`."""
        return self.dims.index(label) if label in self.dims else None

    def describe(self) -> str:
        """`(n=32, c=64, 7)`: for messages."""
        return "(" + ", ".join(f"{d}={s}" if d else str(s) for d, s in zip(self.dims, self.shape, strict=True)) + ")"
