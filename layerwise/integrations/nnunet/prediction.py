"""predict: nnU-Net's own prediction, on rank 0, of a trained folder whose network all ranks compute together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.comm.start import default_device
from layerwise.comm.together import in_thread
from layerwise.errors import LayerwiseError
from layerwise.integrations.nnunet.reading import check_names, read_checkpoint
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.score import evaluating

BEAT_S = 1.0  # how often rank 0 tells the others, while nnU-Net reads and writes, that it is alive


def predict(
    model_folder: str | os.PathLike[str],
    samples: str | os.PathLike[str] | Sequence[Sequence[str]],
    out: str | os.PathLike[str],
    *,
    folds: Sequence[int | str] = (0,),
    checkpoint: str = "checkpoint_final.pth",
    overwrite: bool = False,
    processes: int = 3,
    memory_limit: float | str | None = None,
    device: torch.device | str | None = None,
    options: ParallelOptions | None = None,
    **predictor: Any,
) -> None:
    """Writes the labels of every case into `out` by nnU-Net's own predictor, with each window on all ranks.

        layerwise.integrations.nnunet.predict("nnUNetTrainer__nnUNetPlans__3d_fullres", "imagesTs", "labels")

    nnU-Net reads, prepares, blends and writes on rank 0; the forward pass is split. Every rank calls it alike.

    Args:
        model_folder: Where nnU-Net wrote plans.json, dataset.json and fold_0, on a disk that all ranks see.
        samples: A folder of NAME_0000.nii.gz, NAME_0001.nii.gz, ..., one file a channel; or a list of cases, each the
            list of its channels' files.
        out: A folder for NAME.nii.gz.
        folds: Folds, over whose networks the mean is taken.
        checkpoint: The file's name.
        overwrite: Also cases whose labels are there.
        processes: Of rank 0, that prepare cases, and as many that write; 0: it does both itself.
        memory_limit: As `layerwise.parallelize` has it.
        device: What this rank computes on. None: its GPU, if there is one.
        options: As `layerwise.parallelize` has them.
        predictor: Arguments of `nnUNetPredictor`, such as tile_step_size=0.5, use_mirroring=True.

    Raises:
        LayerwiseError: nnU-Net is not installed; the folder has more than numbers and names of layers, or the model
            will not do; nnU-Net failed on rank 0, with its reason.
        CommError: A rank is gone.
    """
    try:
        from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    except ImportError as error:
        raise LayerwiseError(f"install nnU-Net, pip install 'layerwise[nnunet]' ({error})") from error
    here = default_device(int(os.environ.get("LOCAL_RANK", "0"))) if device is None else torch.device(device)
    folder = Path(model_folder)
    check_names(folder / "plans.json")
    for fold in folds:
        read_checkpoint(folder / f"fold_{fold}" / checkpoint)
    made = nnUNetPredictor(device=here, **{"allow_tqdm": False, **predictor})
    made.initialize_from_trained_model_folder(os.fspath(folder), tuple(folds), checkpoint)
    network: nn.Module = getattr(made.network, "_orig_mod", made.network).to(here)
    channels = next(p.shape[1] for p in network.parameters() if p.dim() > 1)
    model = parallelize(
        network,
        torch.zeros(1, channels, *made.configuration_manager.patch_size, device=here),
        batch=1,
        inference=True,
        memory_limit=memory_limit,
        autocast=torch.float16 if here.type == "cuda" else None,
        options=options or ParallelOptions(verbose=False),
    )
    windows = Windows(model, made.list_of_parameters)
    made.network = windows

    def run() -> None:
        given = os.fspath(samples) if isinstance(samples, str | os.PathLike) else [list(case) for case in samples]
        Path(out).mkdir(parents=True, exist_ok=True)
        if processes:
            made.predict_from_files(given, os.fspath(out), False, overwrite, processes, processes)
        else:
            made.predict_from_files_sequential(given, os.fspath(out), False, overwrite)

    with evaluating(model), torch.inference_mode(), torch.autocast(here.type, enabled=here.type == "cuda"):
        windows.serve(run)


class Windows(nn.Module):
    """nnU-Net's network, as its predictor on rank 0 calls it from a thread: all ranks compute each window, in `serve`.

    Args:
        model: The parallel network.
        folds: The state dicts that the predictor loads, on every rank.
    """

    def __init__(self, model: ParallelModule, folds: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self._ranks, self._folds = [model], folds  # in a list: its modules are not this one's
        self._loaded = 0
        self._asked: SimpleQueue[tuple[str, Tensor | None]] = SimpleQueue()  # what all ranks are told; a window
        self._made: SimpleQueue[Tensor | BaseException] = SimpleQueue()

    def forward(self, x: Tensor) -> Tensor:
        return self._ask(f"window {' '.join(map(str, x.shape))}", x.contiguous())

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        self._ask(f"fold {next(fold for fold, state in enumerate(self._folds) if state is state_dict)}")

    def _ask(self, what: str, x: Tensor | None = None) -> Tensor:
        self._asked.put((what, x))
        made = self._made.get()
        if isinstance(made, BaseException):
            raise made
        return made

    def serve(self, run: Callable[[], object]) -> None:
        """Calls `run` on rank 0, in a thread, and has all ranks compute what its predictor asks for.

        Raises:
            LayerwiseError: It fails, on all ranks, with its reason.
        """
        (model,) = self._ranks
        comm = of(model).comm
        if comm.rank == 0:
            in_thread(run, "nnU-Net").add_done_callback(lambda future: self._asked.put((_end(future), None)))
        while True:
            text, x = self._next() if comm.rank == 0 else ("", None)
            what, _, rest = comm.broadcast_text(text).partition(" ")
            if what == "window":
                x = torch.empty(tuple(map(int, rest.split())), device=comm.device) if x is None else x
                sends = [(rank, x) for rank in range(1, comm.size)] if comm.rank == 0 else []
                comm.exchange(sends, [] if comm.rank == 0 else [(0, x)], "io", "a window").wait()
                self._tell(partial(model, x))
            elif what == "fold":
                self._tell(partial(self._load, int(rest)))
            elif what == "failed":
                raise LayerwiseError(f"nnU-Net failed on rank 0: {rest}")
            elif what == "done":
                return

    def _next(self) -> tuple[str, Tensor | None]:
        try:
            return self._asked.get(timeout=BEAT_S)
        except Empty:
            return "busy", None

    def _load(self, fold: int) -> Tensor:
        if fold != self._loaded:
            self._ranks[0].load_state_dict(self._folds[fold])
            self._loaded = fold
        return torch.empty(0)

    def _tell(self, compute: Callable[[], Tensor]) -> None:
        """Hands the predictor's thread the result, or the reason why there is none."""
        try:
            self._made.put(compute())
        except BaseException as error:
            self._made.put(error)
            raise


def _end(run: Future[object]) -> str:
    """Returns the text that tells the ranks of nnU-Net's end."""
    error = run.exception()
    return "done" if error is None else f"failed {type(error).__name__}: {' '.join(str(error).split())}"
