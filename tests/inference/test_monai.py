"""MONAI's inferer: its SlidingWindowInferer and ours agree where both take the same windows."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.comm.thread import run_threads
from tests.inference.test_predict import module_of, one_pass, trained, volumes

ZOO = Path(sys.prefix) / "zoo"  # where `make zoo` puts MONAI


def test_an_image_over_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (ZOO / "monai").is_dir():  # of the zoo this package alone: others would be taken for the environment's
        (tmp_path / "monai").symlink_to(ZOO / "monai")
        monkeypatch.syspath_prepend(str(tmp_path))
    monai = pytest.importorskip("monai.inferers", reason="MONAI is not installed")
    from layerwise.integrations.monai import LayerwiseInferer

    image = torch.from_numpy(volumes()[1])[None]

    def run(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        network = module_of(comm)
        with pytest.raises(LayerwiseError, match="give LayerwiseInferer what"):
            LayerwiseInferer()(image, trained()[0])
        return LayerwiseInferer()(image, network), LayerwiseInferer(window=(8, 8, 8))(image, network)

    windows = monai.SlidingWindowInferer((8, 8, 8), overlap=0.5, mode="gaussian")(image, trained()[0]).detach()
    for full, windowed in run_threads(2, run):
        np.testing.assert_allclose(full[0].numpy(), one_pass(volumes()[1]), rtol=1e-5, atol=1e-6)
        assert (windowed.double() - windows).abs().max() <= 1e-5 * windows.abs().max()  # float32
