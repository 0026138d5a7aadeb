"""What all of the scripts import, or make PyTorch import: once, in the server that they are forked from."""

import torch._dynamo
import torch.export
import torch.nn.parallel
import torch.optim
import torch.utils.data  # noqa: F401

import layerwise.api.fit  # noqa: F401
