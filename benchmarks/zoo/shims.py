"""What a package of the zoo needs before it is imported, where PyTorch is a build that it was not made for."""

from __future__ import annotations

from contextlib import suppress

import torch

_LIBRARY: list[torch.library.Library] = []  # operators live as long as it does


def torchvision_operators() -> None:
    """torchvision's Python registers a shape function for its compiled `nms` when it is imported; no network here
    calls it. Where the compiled part does not load, the name is defined, without a kernel."""
    if _LIBRARY:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # the compiled part is there
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.append(library)
