"""An ONNX file, trained from its weights on all ranks. (Not called onnx.py: that would hide the package of this name.)

python examples/from_onnx.py
torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/from_onnx.py
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import layerwise


def write(file: Path) -> None:
    """A small network, 16 inputs to 4 classes, such as another framework may have exported."""
    draw = np.random.default_rng(0)
    sizes = {"w1": (32, 16), "b1": (32,), "w2": (4, 32), "b2": (4,)}
    values = [numpy_helper.from_array((draw.normal(size=s) * 0.2).astype(np.float32), n) for n, s in sizes.items()]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1", transB=1),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], name="fc2", transB=1),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n, size in (("x", 16), ("y", 4)))
    onnx.save(helper.make_model(helper.make_graph(nodes, "mlp", [x], [y], values)), file)


def main(file: str | None, epochs: int, measure_s: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(1)  # what there is to learn
    with tempfile.TemporaryDirectory() as folder:  # each rank its own: all hold the same
        network = Path(file or f"{folder}/mlp-{os.environ.get('RANK', '0')}.onnx")
        if file is None:
            write(network)
        layerwise.fit(
            network,
            (x, y),
            nn.CrossEntropyLoss(),
            "adam",
            epochs=epochs,
            batch=64,
            options=layerwise.ParallelOptions(measure_s=measure_s),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", metavar="NET.onnx", help="of 16 inputs and 4 classes (default: one is written)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
