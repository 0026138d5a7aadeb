"""LayerwiseInferer: MONAI's evaluators on several GPUs, with the network's parts on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monai.inferers import Inferer
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.inference.predict import answer
from layerwise.inference.predictor import Reduce
from layerwise.run.parallel import ParallelModule


class LayerwiseInferer(Inferer):  # type: ignore[misc] # where MONAI is not installed, its class is Any
    """A MONAI inferer that computes each image over all ranks, in one pass where it fits.

        network = layerwise.parallelize(network, image, inference=True, io="boxes")
        labels = LayerwiseInferer(reduce="argmax")(image, network)    # instead of SlidingWindowInferer

    Every rank is given the same images and returns the same answers.

    Args:
        reduce: What is made of each rank's box before anything is gathered: see `layerwise.predict`.
        window: Positions of a window; None: windows are taken where an image does not fit.
        overlap: The share of a window that its neighbour covers, too.
        mirror: Dimensions along which the mean over mirrored images is taken.
        memory_limit: Of a device: beyond it windows are taken.
    """

    def __init__(
        self,
        reduce: Reduce | None = None,
        window: Sequence[int] | None = None,
        overlap: float = 0.5,
        mirror: str = "",
        memory_limit: float | str | None = None,
    ) -> None:
        super().__init__()
        self._reduce, self._window, self._overlap = reduce, window, overlap
        self._mirror, self._limit = mirror, memory_limit

    def __call__(self, inputs: Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        """The network's answer for `inputs`, (samples, channels, ...). LayerwiseError as `layerwise.predict`."""
        if not isinstance(network, ParallelModule):
            raise LayerwiseError(
                "LayerwiseInferer takes what layerwise.parallelize(network, ..., inference=True, io='boxes') returns"
            )
        if args or kwargs:
            raise LayerwiseError("LayerwiseInferer takes networks of one input: leave other arguments out")
        return answer(
            network,
            inputs,
            reduce=self._reduce,
            window=self._window,
            overlap=self._overlap,
            mirror=self._mirror,
            memory_limit=self._limit,
        ).to(inputs.device)
