"""Exports something, once for all networks: what torch.export imports at its first call is nobody's time."""

from __future__ import annotations

import torch
from torch import nn

torch.set_num_threads(1)
torch.export.export(nn.Linear(2, 2), (torch.randn(2, 2),), strict=False)
