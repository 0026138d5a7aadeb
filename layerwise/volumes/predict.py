"""predict: every rank writes its box of an output, and no rank has all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import writing
from layerwise.geometry import Box
from layerwise.run.parallel import ParallelModule
from layerwise.volumes.loader import BoxLoader
from layerwise.volumes.sources import foreign


def predict(model: ParallelModule, loader: BoxLoader, out: object, *, output: int = 0) -> None:
    """Writes an output of every sample that `loader` has into `out`; every rank writes its box, and calls it alike.

        layerwise.predict(model, BoxLoader(model, "images.npy"), "logits.npy")    # model: parallelize(..., io="boxes")

    The model is in evaluation mode meanwhile.

    Args:
        model: A parallel module whose plan has io "boxes".
        loader: Samples in their order, unchanged, a multiple of its batch.
        out: The path of a .npy file, which rank 0 makes, (samples, ...) of float32 or the output's own integers, on a
            disk that all ranks see; or anything that takes `out[index] = values`, such as a Zarr array with chunks that
            no two ranks share.
        output: Which of the model's outputs.

    Raises:
        LayerwiseError: The loader shuffles, changes samples or leaves some out; the plan has no such output; `out` has
            another shape, takes whole numbers only of an output that has others, or cannot be written.

    Examples:
        >>> import layerwise
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 1), torch.randn(2, 4), io="boxes", verbose=False)
        >>> out = np.zeros((6, 1), np.float32)
        >>> predict(model, BoxLoader(model, np.ones((6, 4), np.float32)), out)
        >>> bool((out == out[0]).all() and out[0] != 0)
        True
    """
    boxes = model.output_boxes()
    if not 0 <= output < len(boxes):
        raise LayerwiseError(f"the model has {len(boxes)} outputs: there is no number {output}")
    if not loader.as_they_are or len(loader) * loader.batch != loader.samples:
        raise LayerwiseError(
            "predict writes every sample in its place: give a loader that does not shuffle, crop, flip or change them, "
            f"of a multiple of {loader.batch} samples (it has {loader.samples})"
        )
    if model.io != "boxes":
        raise LayerwiseError(f"the plan has io {model.io!r}: parallelize the model with io='boxes'")
    spec, box = model.graph.layers[-1].specs[output], boxes[output]
    shape = (loader.samples, *spec.shape[1:])
    if isinstance(out, str | os.PathLike):
        with _file(os.fspath(out), shape, spec.dtype, model) as array:
            _fill(array, model, loader, output, box)
            array.flush()
            model.comm.barrier()
    else:
        _check(out, shape, spec.dtype)
        _fill(out, model, loader, output, box)
    model.comm.barrier()


def _fill(array: Any, model: ParallelModule, loader: BoxLoader, output: int, box: Box | None) -> None:
    """Writes this rank's box of every sample into an array."""
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            for number, inputs in enumerate(loader):
                values = _numbered(model(*inputs), output)
                if box is not None and box.volume:
                    first, *rest = box.slices()
                    here = slice(number * loader.batch + first.start, number * loader.batch + first.stop)
                    values = values.float() if values.is_floating_point() else values
                    with foreign(f"samples from {here.start} cannot be written"):
                        array[(here, *rest)] = values.cpu().numpy()
    finally:
        model.train(mode)


def _numbered(returned: object, output: int) -> Tensor:
    """One of what the model returns, in the order of a plan's outputs."""
    tensors = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
    return tensors[output]


def _check(array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """LayerwiseError where `made` is no array of this shape: numpy would leave out what lies beyond it, unsaid."""
    if not hasattr(array, "__setitem__") or isinstance(array, list | dict | Tensor):
        raise LayerwiseError(
            f"predict cannot write into a {type(array).__name__}: give the path of a .npy, or an array"
        )
    there = tuple(getattr(array, "shape", shape))
    if there != shape:
        raise LayerwiseError(f"predict writes {shape} numbers, and what it is to write into has shape {there}")
    kind = np.dtype(getattr(array, "dtype", float)).kind
    if kind not in ("iu" if "int" in dtype else "biu" if dtype == "bool" else "f") + "f":
        raise LayerwiseError(f"predict writes {dtype}, and what it is to write into has {array.dtype}")


@contextmanager
def _file(path: str, shape: tuple[int, ...], dtype: str, model: ParallelModule) -> Iterator[np.memmap[Any, Any]]:
    """An array of zeros in a file of rank 0's, which lies beside `path`, and is there at the end: whole, or not at all.

    LayerwiseError on every rank where it cannot be made, or seen.
    """
    if Path(path).suffix.lower() != ".npy":
        raise LayerwiseError(f"predict makes .npy files, not {path!r}: give an array to write into")
    kind = np.dtype(dtype) if "int" in dtype or dtype == "bool" else np.dtype(np.float32)
    with ExitStack() as done:

        def make() -> tuple[None, str]:
            if model.comm.rank:
                return None, ""
            temporary = done.enter_context(writing(path))
            np.lib.format.open_memmap(temporary, mode="w+", dtype=kind, shape=shape)
            return None, os.fspath(temporary)

        _, (beside, *_) = agree(model.comm, make)
        yield agree(model.comm, lambda: (np.lib.format.open_memmap(beside, mode="r+"), None))[0]
