"""What a rank of test_stale runs: `parallelize`, whose table says what was measured anew."""

import torch

import layerwise
from benchmarks.common.networks import SMALL

torch.set_num_threads(1)
network = SMALL["alexnet"]
layerwise.parallelize(network.build(), network.data(network.per_rank)[0])
