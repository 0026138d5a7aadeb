"""Values: of buffers that a split plan does not read again, to notice others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.local_tensor import digest, local_tensor, version


class Values:
    """The values that tensors have now. read: returns the tensors by name, which later may be others."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._before = {name: (id(x), version(x), _bits(local_tensor(x))) for name, x in read().items()}

    def changed(self) -> str | None:
        """Returns the name of a tensor that has other values now."""
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
    """Returns a digest of its values; None where it has none, on the meta device."""
    return None if tensor.is_meta else digest(tensor)


def check_folded(values: Values) -> None:
    """LayerwiseError where a buffer that the layers were traced with has other values now."""
    if (name := values.changed()) is not None:
        raise LayerwiseError(
            f"buffer {name!r} was given other values after the model was made parallel, by load_state_dict or by hand, "
            "and the plan's layers were traced with those of before: give the model its values before it is made "
            f"parallel, or {AS_WRITTEN}"
        )
