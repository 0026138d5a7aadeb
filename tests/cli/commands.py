"""What the tests of the command lines have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import TensorProto, helper

LENET, MLP = ("search", "lenet5", "--gpus", "4"), ("search", "mlp:64x32x8", "--gpus", "4")


Run = Callable[..., str]


NETWORKS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
def alone(): return Net()
def by_name(): return Net(), {"x": torch.randn(2, 8)}
def on_meta(): return Net(), torch.empty(2, 8, device="meta")
def chatty():
    print("building")
    return Net(), torch.randn(2, 8)
def listed(): return Net(), [torch.randn(2, 8)]
def number(): return 3
def wrong_inputs(): return Net(), torch.randn(2, 9)
def faulty(): raise RuntimeError("out of\\nluck")
def leaves(): raise SystemExit(3)
def needy(x): return Net()
ready = Net()
"""


def onnx_file(path: Path, op: str, shape: list[Any], opset: int = 17, domain: str = "", name: str = "it") -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], name, domain=domain)], "g", [x], [y])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
