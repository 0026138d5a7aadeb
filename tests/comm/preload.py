"""What the ranks import, or make PyTorch import: once, in the server that they are forked from."""

# ruff: noqa: F401

import contextlib
import gc

import pytest  # functions that ranks call stand in test files, too
import torch
import torch._dynamo
import torch.nn.parallel
import torch.optim
import torch.utils.data

import layerwise.api.fit
import layerwise.commands.run
import layerwise.measure.__main__
import layerwise.search.__main__
import tests.comm.pool
from layerwise.importers.load import network_of

with contextlib.suppress(ImportError):
    import lightning
    import transformers.trainer

if not torch.backends.cuda.is_built():  # then autograd has threads after a first backward pass, which forked ranks lack
    network_of(torch.nn.Linear(1, 1), (torch.zeros(2, 1),), None, "first")  # a first export imports much
gc.freeze()  # the ranks' garbage collections pass over all of this
gc.set_threshold(10_000, 10, 10)
