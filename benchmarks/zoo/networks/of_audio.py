"""Networks of sound as torchaudio has them, and other well-known ones that are written out in their papers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.example import SAMPLES, Build, Example


def _torchaudio(name: str, *shapes: tuple[int, ...], lengths: int = 0, **options: Any) -> Build:
    """Called with tensors of `shapes`, and with as many of length `lengths` where that is not 0."""

    def build() -> Example:
        model = getattr(import_module("torchaudio.models"), name)(**options)
        given = tuple(torch.randn(SAMPLES, *shape) for shape in shapes)
        return Example(model, (*given, torch.full((SAMPLES,), lengths)) if lengths else given)

    return build


class TemporalBlock(nn.Module):
    """Of a temporal convolutional network, with weight norm (Bai et al., 2018)."""

    def __init__(self, before: int, after: int, dilation: int) -> None:
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(before, after, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(after, after, 3, padding=self.pad, dilation=dilation))
        self.skip = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x)[..., : -self.pad])
        out = F.relu(self.conv2(out)[..., : -self.pad])
        return F.relu(out + self.skip(x))


class WaveNet(nn.Module):
    """Gated dilated convolutions with skips (van den Oord et al., 2016)."""

    def __init__(self, width: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=2**i, padding=2**i) for i in range(layers)
        )
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(x)[..., : x.shape[-1]].chunk(2, 1)
            residual, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.last(total)


class M5(nn.Module):
    """Sound by 1-D convolutions (Dai et al., 2016)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [(1, width, 80, 4), (width, width, 3, 1), (width, 2 * width, 3, 1)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(a, b, k, s), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(4)) for a, b, k, s in sizes)
        )
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc(self.blocks(x).mean(-1)), -1)


def _signal(model: type[nn.Module], length: int, channels: int = 1, **options: Any) -> Build:
    return lambda: Example(model(**options), (torch.randn(SAMPLES, channels, length),))


def _tcn() -> Example:
    model = nn.Sequential(TemporalBlock(2, 8, 1), TemporalBlock(8, 8, 2), nn.Conv1d(8, 3, 1))
    return Example(model, (torch.randn(SAMPLES, 2, 32),))


NETWORKS: dict[str, Build] = {
    "TCN (weight norm)": _tcn,
    "WaveNet": _signal(WaveNet, 64),
    "M5": _signal(M5, 4000),
    "torchaudio Wav2Letter": _torchaudio("Wav2Letter", (1, 400), num_classes=8),
    "torchaudio DeepSpeech": _torchaudio("DeepSpeech", (1, 20, 16), n_feature=16, n_hidden=16, n_class=8),
    "torchaudio ConvTasNet": _torchaudio(
        "ConvTasNet", (1, 400), num_sources=2, enc_kernel_size=8, enc_num_feats=16, msk_num_feats=8,
        msk_num_hidden_feats=16, msk_num_layers=2, msk_num_stacks=2,
    ),  # fmt: skip
    "torchaudio Conformer": _torchaudio(
        "Conformer", (20, 16), lengths=20, input_dim=16, num_heads=4, ffn_dim=32, num_layers=2,
        depthwise_conv_kernel_size=7,
    ),  # fmt: skip
    "torchaudio WaveRNN": _torchaudio(
        "WaveRNN", (1, 64), (1, 8, 8), upsample_scales=[4, 4], n_classes=8, hop_length=16, n_res_block=1, n_rnn=16,
        n_fc=16, kernel_size=1, n_freq=8, n_hidden=8, n_output=8,
    ),  # fmt: skip
    "torchaudio HDemucs": _torchaudio("hdemucs_low", (2, 8192), sources=["a", "b"]),
}
