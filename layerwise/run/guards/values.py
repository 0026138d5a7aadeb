"""Values: notices changed values of buffers that a split plan does not read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.local_tensor import digest, local_tensor, version


class Values:
    """The present values of tensors. read: returns the tensors by name; later they may have other values."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._before = {name: (id(x), version(x), _bits(local_tensor(x))) for name, x in read().items()}

    def changed(self) -> str | None:
        """Returns the name of a tensor whose values have changed, or None."""
        for name, tensor in self._read().items():
            number, before, bits = self._before.get(name, (0, (0, 0), None))
            now, local = version(tensor), local_tensor(tensor)
            if number == id(tensor) and now == before:
                continue
            if _bits(local) != bits:
                return name
            self._before[name] = id(tensor), now, bits
        return None


def _bits(tensor: Tensor) -> int | None:
    """Returns a digest of the tensor's values; None if it has none, on the meta device."""
    return None if tensor.is_meta else digest(tensor)


def check_folded(values: Values) -> None:
    """Raises LayerwiseError if a buffer that the layers were traced with has changed."""
    if (name := values.changed()) is not None:
        raise LayerwiseError(
            f"buffer {name!r} changed after the model was made parallel, by load_state_dict or by hand, but the plan's "
            f"layers were traced with its old values: set the values before you parallelize the model, or {AS_WRITTEN}"
        )
