"""Arguments of the wrong kind: every public function and class answers with one sentence, never with a traceback."""

import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import layerwise
from layerwise import Config, LayerwiseError, ParallelOptions
from layerwise.importers.torch.traced_program import TracedProgram

X = torch.randn(4, 4)
WRONG = [object(), b"x", math.nan, {1: 2}, [object()], nn.Linear, TracedProgram, -1.5]
ROOMS = {  # public names that their rooms have
    "Box": "layerwise.geometry",
    "DeviceGraph": "layerwise.machine",
    "Grid": "layerwise.geometry",
    "Layer": "layerwise.graph.layer",
    "LayerGraph": "layerwise.graph.layer_graph",
    "Op": "layerwise.ops.base",
    "TensorSpec": "layerwise.tensor",
    "from_onnx": "layerwise.importers.onnx.from_onnx",
    "timeline": "layerwise.cost.timeline.simulate",
}
FREE = {"model", "name", "digest", "message"}  # texts that may say anything


@pytest.fixture(scope="module")
def right() -> dict[str, dict[str, Any]]:
    """Arguments, by name, with which each public name can be called."""
    network = layerwise.load_model("lenet5", 8)
    graph, machine = layerwise.fuse(network), layerwise.load_profile("h100").device_graph(4)
    model, first = layerwise.CostModel(graph, machine), graph.inner[0]
    strategy = {layer.name: Config.of({"n": 4}) for layer in graph.inner}
    module = nn.Linear(4, 2)
    quiet = ParallelOptions(measure_s=0, verbose=False)
    parallel = layerwise.parallelize(nn.Linear(4, 2), X, options=replace(quiet, io="boxes"))
    return {
        "Box": {"lo": (0,), "hi": (2,)},
        "BoxLoader": {"model": parallel, "sources": np.ones((8, 4), np.float32)},
        "Config": {},
        "CostModel": {"graph": graph, "devices": machine},
        "CostOptions": {},
        "DeviceGraph": {"name": "x", "count": 4, "processor": machine.processor, "levels": machine.levels},
        "Grid": {"shape": (4,), "degrees": (2,)},
        "Layer": {"name": first.name, "op": first.op, "inputs": first.inputs, "specs": first.specs},
        "LayerGraph": {"layers": graph.layers},
        "ParallelOptions": {},
        "Plan": {
            "model": "m", "digest": "", "batch": 8, "gpus": 2, "gpus_per_node": 2, "io": "sample", "fused": True,
            "strategy": {},
        },
        "SearchSpace": {"devices": 4},
        "TensorSpec": {"shape": (4,), "dims": ("n",)},
        "fit": {"model": module, "data": (X, X[:, :2]), "loss": nn.MSELoss(), "optimizer": "sgd", "options": quiet},
        "from_onnx": {"path": "nothing.onnx"},
        "from_torch": {"model": module, "example_inputs": X},
        "fuse": {"graph": network},
        "load_model": {"spec": "lenet5", "batch": 8},
        "load_plan": {"path": "nothing.json"},
        "load_profile": {},
        "memory": {"model": module, "inputs": X},
        "of": {"model": parallel},
        "parallelize": {"model": module, "example_inputs": X, "options": quiet},
        "predict": {"model": parallel, "samples": np.ones((6, 4), np.float32), "out": np.zeros((6, 2), np.float32)},
        "price": {"model": model, "strategy": strategy},
        "register_op": {"target": "mylib::x", "build": lambda call: None},
        "restore": {"model": parallel},
        "save": {"model": parallel, "file": "nothing/nowhere.pt"},
        "split": {"loader": DataLoader(range(8), 4), "model": parallel},
        "timeline": {"model": model, "strategy": strategy},
    }  # fmt: skip


def called(function: Any, arguments: dict[str, Any]) -> Any:
    """Calls it with arguments by name, those that come by position alone too."""
    kinds = inspect.signature(function).parameters
    stars = [name for name in arguments if name in kinds and kinds[name].kind is inspect.Parameter.VAR_POSITIONAL]
    if not stars:
        return function(**arguments)
    before = [name for name in list(kinds)[: list(kinds).index(stars[0])] if name in arguments]
    named = {name: value for name, value in arguments.items() if name not in (*before, *stars)}
    return function(*(arguments[name] for name in before), arguments[stars[0]], **named)


def named(name: str) -> Any:
    """A public name of the package or of a room."""
    return getattr(importlib.import_module(ROOMS.get(name, "layerwise")), name)


def public() -> Iterator[str]:
    for name in (*layerwise.__all__, *ROOMS):
        if callable(named(name)) and name not in ("Op", "LayerwiseError"):
            yield name


@pytest.mark.parametrize("name", public())
def test_whatever_a_public_function_is_given_it_answers_in_one_sentence(name: str, right: dict[str, Any]) -> None:
    function, said = named(name), list[str]()
    for argument in inspect.signature(function).parameters:
        for wrong in WRONG if argument != "keywords" else ():
            try:
                called(function, {**right[name], argument: wrong})
            except LayerwiseError as error:
                said.append(str(error))
    assert said
    assert not [text for text in said if "\n" in text]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": None}, "options is None; it must be a ParallelOptions"),
        ({"options": {"seed": 1}}, "options is {'seed': 1}; it must be a ParallelOptions"),
        ({"strategy": ["data"]}, r"strategy is \['data'\]; it must be a text, a dict, a Plan, a path or None"),
        ({"memory_limit": [3]}, r"memory_limit is \[3\]; it must be a number, a text or None"),
        ({"model": nn.Sequential(nn.LazyLinear(2))}, "'0.weight' of the model has no shape yet, as nn.LazyLinear's"),
        ({"model": nn.Linear}, "model is the class Linear; it must be a Module"),
        ({"inference": "no"}, "inference is 'no'; it must be True or False"),
        ({"batch": -2}, "batch is -2; it must be at least 1, and a whole number"),
    ],
)
def test_parallelize_is_given_another_kind(given: dict[str, Any], message: str) -> None:
    for function, more in ((layerwise.parallelize, {}), (layerwise.fit, {"loss": nn.MSELoss(), "optimizer": "sgd"})):
        inputs = {"example_inputs": X} if function is layerwise.parallelize else {"data": (X, X)}
        with pytest.raises(LayerwiseError, match=message):
            function(**{"model": nn.Linear(4, 4), **inputs, **(more | given)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"effort": "fast"}, "effort is 'fast'; it must be 'quick', 'normal' or 'thorough'"),
        ({"profile": 3}, "profile is 3; it must be a Profile, a text, a path or None"),
        ({"timeout_s": "30"}, "timeout_s is '30'; it must be at least 0.001, and a number"),
        ({"optimizer": ["sgd"]}, r"optimizer is \['sgd'\]; it must be a text"),
        ({"comm": 3}, "comm is 3; it must be a Comm or None"),
        ({"measure_s": math.nan}, "measure_s is nan; it must be at least 0, and a number"),
        ({"measure_s": -5}, "measure_s is -5; it must be at least 0"),
        ({"seed": "a"}, "seed is 'a'; it must be .*a whole number"),
        ({"race": 0}, "race is 0; it must be at least 1"),
    ],
)
def test_an_option_is_given_another_kind(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        ParallelOptions(**given)


def test_numbers_of_numpy_are_numbers() -> None:
    assert ParallelOptions(measure_s=np.float32(1), seed=np.int64(3)).seed == 3


@pytest.mark.parametrize(
    ("name", "told"),
    [("plan", "strategy="), ("verbose", r"options=ParallelOptions\(verbose=...\)"), ("sync_every", r"no_sync\(\)")],
)
def test_an_argument_that_moved_says_where_it_is(name: str, told: str) -> None:
    with pytest.raises(LayerwiseError, match=f"takes no {name}=: .*{told}"):
        layerwise.parallelize(nn.Linear(4, 2), X, **{name: 1})
