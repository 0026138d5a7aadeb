"""predict: nnU-Net's own prediction, on rank 0, of a trained folder whose network all ranks compute together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.comm.start import default_device
from layerwise.comm.together import in_thread
from layerwise.errors import LayerwiseError, foreign
from layerwise.integrations.nnunet.reading import check_names, read_checkpoint
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.score import evaluating

BEAT_S = 1.0  # between two signs of rank 0 that it is alive


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
    """nnU-Net's network, as its predictor on rank 0 calls it: all ranks compute each window, in `serve`.

    Args:
        model: The parallel network.
        folds: The state dicts that the predictor loads, on every rank.
    """

    def __init__(self, model: ParallelModule, folds: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self._ranks, self._folds = [model], folds  # in a list: its modules are not this one's
        self._comm, self._loaded = of(model).comm, 0
        self._turn, self._ended = threading.Lock(), threading.Event()  # one thing at a time is told to the ranks

    def forward(self, x: Tensor) -> Tensor:
        with self._together(f"window {' '.join(map(str, x.shape))}"):
            x = x.contiguous()
            self._comm.exchange([(rank, x) for rank in range(1, self._comm.size)], [], "io", "a window").wait()
            made: Tensor = self._ranks[0](x)
            return made

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        fold = next(fold for fold, state in enumerate(self._folds) if state is state_dict)
        with self._together(f"fold {fold}"):
            self._load(fold)

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """A context in which rank 0 does what it tells the others to do. nnU-Net would repeat a RuntimeError alone."""
        with self._turn, foreign("the ranks cannot compute a window"):
            self._comm.broadcast_text(what)
            yield

    def serve(self, run: Callable[[], object]) -> None:
        """Calls `run` on rank 0, and has all ranks compute what its predictor asks for.

        Raises:
            LayerwiseError: It fails, on all ranks, with its reason.
        """
        if self._comm.rank == 0:
            in_thread(self._beat)
            try:
                end = "done"
                run()
            except LayerwiseError:  # of a window: no rank is waiting for more
                raise
            except Exception as error:
                end = f"failed {type(error).__name__}: {' '.join(str(error).split())}"
            finally:
                self._ended.set()
            with self._turn:
                self._comm.broadcast_text(end)
        while True:
            what, _, rest = (end if self._comm.rank == 0 else self._comm.broadcast_text("")).partition(" ")
            if what == "window":
                x = torch.empty(tuple(map(int, rest.split())), device=self._comm.device)
                self._comm.exchange([], [(0, x)], "io", "a window").wait()
                self._ranks[0](x)
            elif what == "fold":
                self._load(int(rest))
            elif what == "failed":
                raise LayerwiseError(f"nnU-Net failed on rank 0: {rest}")
            elif what == "done":
                return

    def _beat(self) -> None:
        """Tells the others, while nnU-Net reads and writes, that rank 0 is alive."""
        while not self._ended.wait(BEAT_S):
            with self._turn:
                if not self._ended.is_set():
                    self._comm.broadcast_text("busy")

    def _load(self, fold: int) -> None:
        if fold != self._loaded:
            self._ranks[0].load_state_dict(self._folds[fold])
            self._loaded = fold
