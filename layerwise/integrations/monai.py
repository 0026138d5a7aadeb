"""MONAI's evaluators, trainers and checkpoints on several GPUs, with the network's parts on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai.engines.utils import IterationEvents
from monai.inferers import Inferer
from monai.utils.enums import CommonKeys
from torch import Tensor
from torch.optim import Optimizer

from layerwise.errors import LayerwiseError
from layerwise.inference.predict import answer
from layerwise.inference.predictor import Reduce
from layerwise.integrations.optimizer_state import full_state, load_full_state
from layerwise.run.parallel import ParallelModule, of


class LayerwiseInferer(Inferer):  # type: ignore[misc] # where MONAI is not installed, its class is Any
    """A MONAI inferer that computes each image over all ranks, in one pass where it fits.

        boxes = layerwise.ParallelOptions(io="boxes")
        network = layerwise.parallelize(network, image, inference=True, options=boxes)
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
                "the network is not parallel: give LayerwiseInferer what layerwise.parallelize returns, with "
                "inference=True and ParallelOptions(io='boxes')"
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


def update_boxes(engine: Any, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """The iteration of a SupervisedTrainer whose loader gives each rank its boxes, with the loss inside the network.

        boxes = layerwise.ParallelOptions(io="boxes")
        network = layerwise.parallelize(NetworkWithLoss(), examples, options=boxes)
        SupervisedTrainer(device, epochs, layerwise.BoxLoader(network, images, labels), network, optimizer,
                          loss_function=None, iteration_update=update_boxes, decollate=False)

    LayerwiseError for a network of samples, which needs no such update.
    """
    network = engine.network
    if not isinstance(network, ParallelModule) or of(network).plan.io != "boxes":
        raise LayerwiseError(
            "update_boxes is for a network that layerwise.parallelize made with ParallelOptions(io='boxes'): leave "
            "iteration_update= out"
        )
    network.train()
    engine.optimizer.zero_grad()
    outputs = network(*batch)
    loss: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    engine.state.output = {CommonKeys.LOSS: loss}
    engine.fire_event(IterationEvents.FORWARD_COMPLETED)
    engine.fire_event(IterationEvents.LOSS_COMPLETED)
    loss.backward()  # type: ignore[no-untyped-call]
    engine.fire_event(IterationEvents.BACKWARD_COMPLETED)
    engine.optimizer.step()
    engine.fire_event(IterationEvents.MODEL_COMPLETED)
    return {CommonKeys.LOSS: loss}


class FullState:
    """The full state of a parallel network or its optimizer, for MONAI's CheckpointSaver and CheckpointLoader.

        state = {"net": FullState(network), "optimizer": FullState(network, optimizer)}
        CheckpointSaver("runs", state, save_final=True).attach(trainer)     # on every rank; rank 0 writes

    A plain network on one device reads it, and another number of ranks.
    """

    def __init__(self, network: ParallelModule, optimizer: Optimizer | None = None) -> None:
        self._network, self._optimizer = network, optimizer

    def state_dict(self) -> dict[str, Any]:
        """The full state; every rank calls it."""
        if self._optimizer is None:
            return of(self._network).full_state_dict()
        return full_state(self._optimizer, self._network)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Takes what `state_dict` returned on any number of ranks."""
        if self._optimizer is None:
            self._network.load_state_dict(state, strict)
        else:
            load_full_state(self._optimizer, state, self._network)
