"""Tables: every entry is what the layer or the edge costs by itself, whatever else was asked for before."""

from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost import transfer
from layerwise.cost.compute.roofline import compute_time
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.cost.terms import COMPUTE, LAYER_TERMS, owned_share
from layerwise.cost.timeline.simulate import timeline
from layerwise.cost.transfer import telling_devices
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.types import Region, Regions
from layerwise.importers.load import load_model
from layerwise.machine import load as load_profile
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Cast, Unary
from layerwise.ops.tensor.view import Reshape
from layerwise.search.find import search
from layerwise.search.priced.variants import OFFERS, Forms
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.cost.test_price import NETWORKS, random_strategy
from tests.examples import examples

DIMS = ("n", "c", "l", "k")


def residual() -> LayerGraph:
    """Branches, a concat, two blocks alike, an input in its middle, and a flatten."""
    b = GraphBuilder("residual")
    x = b.input("x", TensorSpec((6, 4, 6), ("n", "c", "l")))
    ends = [networks.add(b, f"branch{i}", networks.pointwise_conv(2 + i, 1), [x]) for i in range(2)]
    x = networks.add(b, "concat", Concat(1), ends)
    for i in range(2):
        y = networks.add(b, f"conv{i}", Conv(5, (3,), (1,), ((1, 1),), (1,)), [x])
        y = networks.add(b, f"norm{i}", BatchNorm(), [y])
        y = networks.add(b, f"add{i}", Binary("add"), [y, x])
        x = networks.add(b, f"relu{i}", Unary("relu"), [y])
    x = networks.add(b, "flatten", Reshape((6, 30)), [x])
    return fuse(b.finish([networks.add(b, "linear", Linear(3), [x])]))


def configurations(model: CostModel, most: int | None = None) -> dict[str, tuple[Config, ...]]:
    where = SearchSpace(model.devices.count, DIMS, spread=True)
    inner = {layer.name for layer in model.graph.inner}
    return {
        layer.name: where.configurations(layer.space.dims)[:most] if layer.name in inner else (model.end_config(layer),)
        for layer in model.graph.layers
    }


@pytest.mark.parametrize("chunk", [1, 3000, transfer.CHUNK])
def test_every_entry_is_the_cost_of_that_pair_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    model = CostModel(residual(), brute.machine((2, 6), ports=(1, 2)))
    configs = configurations(model)
    assert max(map(len, configs.values())) > 30
    tables = model.tables(configs)
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    alone = CostModel(model.graph, model.devices)
    for layer in model.graph.layers:
        found = [float(alone.node_cost(layer, (c,)).total[0]) for c in configs[layer.name]]
        assert tables.node[layer.name] == pytest.approx(found)
    for edge in model.graph.edges():
        pairs = list(product(range(len(configs[edge[0]])), range(len(configs[edge[1]]))))
        for i, j in [pairs[p] for p in rng.permutation(len(pairs))[:60]]:
            ends = ((configs[edge[0]][i],), (configs[edge[1]][j],))
            assert tables.transfer[edge][i, j] == pytest.approx(float(alone.edge_cost(edge, *ends)[0, 0]))


def uncached(model: CostModel, layer: Layer, config: Config) -> dict[str, float]:
    """Seconds by term of one configuration in its form, of which nothing is looked up."""
    made, wanted = model.layout(layer, (config,)), model.graph.flows_back(layer)
    processor, dtype = model.devices.processor, model.dtype(layer)
    compute = compute_time(layer, made, wanted, processor, dtype, model.options.optimizer)
    compute = compute.updating(owned_share(model, layer, made))
    seconds = {
        COMPUTE.name: compute.total,
        **{term.name: term.seconds(model, layer, made, False) for term in LAYER_TERMS},
    }
    if config.recompute:
        seconds[COMPUTE.name] = seconds[COMPUTE.name] + compute.forward
        for term in LAYER_TERMS:
            if term.recomputes:
                seconds[term.name] = seconds[term.name] + term.seconds(model, layer, made, True)
    return {name: float(cost[0]) for name, cost in seconds.items()}


@pytest.mark.parametrize("seed", range(2))
def test_forms_of_a_layer_cost_the_same_together_or_apart_and_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = CostModel(residual(), brute.machine((2, 6)), CostOptions(optimizer="adam"))
    forms = Forms.of(model.graph, model.devices.count, OFFERS)
    for layer in model.graph.inner:
        cells = configurations(model)[layer.name]
        few = [cells[i] for i in rng.permutation(len(cells))[:4]]
        formed = [forms.of_layer(layer.name, config, form) for config in few for form in forms.offered]
        asked = [formed[i] for i in rng.integers(0, len(formed), 3 * len(formed))]  # some more than once
        truth = {config: uncached(model, layer, config) for config in asked}
        while asked:
            count = int(rng.integers(1, 9))
            group, asked = tuple(asked[:count]), asked[count:]
            found = model.node_cost(layer, group).seconds
            for name in found:
                assert found[name] == pytest.approx([truth[config][name] for config in group]), (layer.name, name)


def test_layers_alike_share_what_is_alike_only() -> None:
    """Of three equal linear layers the first computes no gradient of its input, and nobody sends it one."""
    b = GraphBuilder("alike")
    x = b.input("x", TensorSpec((8, 8), ("n", "c")))
    for i in range(3):
        x = networks.add(b, f"linear{i}", Linear(8), [x])
    model = CostModel(b.finish([x]), brute.machine((4,)))
    tables = model.tables(dict.fromkeys(model.graph.by_name, (Config.of({"n": 4}), Config.of({"c": 4}))))
    assert (tables.node["linear0"] < tables.node["linear1"]).all()
    assert (tables.node["linear1"] == tables.node["linear2"]).all()
    inputs, inner = tables.transfer["x", "linear0", 0], tables.transfer["linear0", "linear1", 0]
    assert inner[0, 1] == 2 * inputs[0, 1] > 0
    assert (inner == tables.transfer["linear1", "linear2", 0]).all()
    assert inputs[0, 0] == inner[0, 0] == 0


def test_edges_alike_but_for_their_element_type_are_not_alike() -> None:
    b = GraphBuilder("cast")
    x = networks.add(b, "linear", Linear(8), [b.input("x", TensorSpec((8, 8), ("n", "c")))])
    for dtype in ("float32", "float16"):
        y = networks.add(b, dtype, Cast(dtype), [x])
        x = networks.add(b, f"after_{dtype}", Linear(8), [y])
    model = CostModel(b.finish([x]), brute.machine((4,)), CostOptions(link_model="sum"))
    ends = (Config.of({"n": 4}),), (Config.of({"c": 4}),)
    whole, half = (model.edge_cost((dtype, f"after_{dtype}", 0), *ends) for dtype in ("float32", "float16"))
    assert whole == pytest.approx(2 * half)


def test_a_quick_table_is_a_lower_bound_of_the_exact_one() -> None:
    """Close to it, but not it; and neither is mistaken for the other afterwards."""
    model = CostModel(residual(), brute.machine((2, 4, 12), ports=(1, 2, 4)), CostOptions(io="sample"))
    configs = configurations(model, most=60)
    few = telling_devices(model.devices)
    quick, exact = model.tables(configs, watched=few).transfer, model.tables(configs).transfer
    alone = CostModel(model.graph, model.devices, model.options).tables(configs).transfer
    for edge, found in exact.items():
        assert (found == alone[edge]).all()
        assert (quick[edge] <= found * (1 + 1e-9)).all()
        assert quick[edge].sum() > 0.5 * found.sum()
    assert any((quick[edge] < 0.99 * found).any() for edge, found in exact.items())


def test_progress_is_reported_edge_by_edge() -> None:
    model = CostModel(residual(), brute.machine((2,)))
    seen: list[tuple[int, int]] = []
    model.tables(configurations(model), lambda done, of: seen.append((done, of)))
    edges = len(list(model.graph.edges()))
    assert seen == [(i + 1, edges) for i in range(edges)]


@pytest.mark.parametrize(("devices", "degree"), [(4, 4), (6, 6), (8, 6)])
def test_the_ends_have_the_samples_over_as_many_devices_as_there_are(devices: int, degree: int) -> None:
    model = CostModel(residual(), brute.machine((devices,)), CostOptions())
    assert {model.end_config(model.graph[name]) for name in ("x", "outputs")} == {Config.of({"n": degree})}


def test_regions_of_autocast_are_planned_at_their_own_rates() -> None:
    """Layers within them cost what they cost where all of the network is of that type, and those without, too."""

    def chain(regions: Regions) -> LayerGraph:
        b = GraphBuilder("chain")
        x = b.input("x", TensorSpec((8192, 4096), ("n", "c")))
        for i in range(3):
            b.autocast = regions if i == 1 else ()
            x = networks.add(b, f"linear{i}", Linear(4096), [x])
        return b.finish([x])

    devices = load_profile("h100").device_graph(gpus=2, gpus_per_node=2)

    def costs(regions: Regions, dtype: str) -> list[float]:
        model = CostModel(chain(regions), devices, CostOptions(dtype=dtype))
        return [float(model.node_cost(layer, (Config(),)).compute.forward[0]) for layer in model.graph.inner]

    sixteen, off = (Region("cuda", "bfloat16"),), (Region("cuda", None),)
    plain, mixed = costs((), "float32"), costs((), "bf16")
    assert plain[1] > 2 * mixed[0]
    assert costs((Region("cpu", "bfloat16"),), "float32") == plain  # it does nothing on a GPU
    assert costs(sixteen, "float32")[:2] == [plain[0], mixed[0]]  # both read float32
    assert costs(off, "bf16")[0] == mixed[0]
    assert 0.8 * plain[1] < costs(off, "bf16")[1] <= plain[1]  # it reads 16 bits
    for regions, dtype, here, bits in ((sixteen, "float32", "bf16", "bfloat16"), (off, "bf16", "float32", "float32")):
        model = CostModel(chain(regions), devices, CostOptions(dtype=dtype))
        assert [model.dtype(layer) for layer in model.graph.inner] == [dtype, here, dtype]
        assert model.graph["linear1"].out.dtype == bits
        assert [item_bytes for layer in model.graph.inner for *_, item_bytes in layer.held()] == [4] * 6


def test_what_is_learned_at_once_is_what_each_strategy_costs_alone() -> None:
    """Also of blocks alike, whose layers share what is made of them, and of what is kept of strategies before."""
    graph, random = residual(), np.random.default_rng(0)
    devices = load_profile("v100").device_graph(8, 4)
    model = CostModel(graph, devices, CostOptions(optimizer="adam"))
    configs = configurations(model)
    draws = [{name: cs[int(random.integers(len(cs)))] for name, cs in configs.items()} for _ in range(12)]
    spent = {"recompute": True}, {"states": "sharded"}, {"states": "gathered"}
    draws += [
        {name: replace(c, **spent[i % 3]) if can_spend(model, name) else c for name, c in s.items()}
        for i, s in enumerate(draws[:6])
    ]
    model.learn(draws)
    for strategy in draws:
        alone = CostModel(graph, devices, model.options)
        assert price(model, strategy) == price(alone, strategy)
        assert timeline(model, strategy) == timeline(alone, strategy)
        assert (peak_bytes(model, strategy) == peak_bytes(alone, strategy)).all()


def can_spend(model: CostModel, name: str) -> bool:
    layer = model.graph[name]
    return model.graph.differentiates(layer) and layer.main.weights


def models(
    network: LayerGraph, profile: str, devices: int, io: Literal["sample", "free"]
) -> tuple[CostModel, CostModel]:
    """Of inference, and of training."""
    machine = load_profile(profile).device_graph(devices, min(devices, 2))
    options = CostOptions(io=io)
    return CostModel(network, machine, replace(options, kind="inference")), CostModel(network, machine, options)


@given(
    NETWORKS,
    st.sampled_from(["p100", "cpu"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["sample", "free"]),
    st.data(),
)
@examples(18)
def test_it_is_a_part_of_training(
    network: LayerGraph, profile: str, devices: int, io: Literal["sample", "free"], data: st.DataObject
) -> None:
    """t_C is the forward part, nothing is summed or gathered, tensors go one way, and less memory is needed."""
    inference, training = models(network, profile, devices, io)
    strategy = complete(inference, random_strategy(inference, data))
    mine, whole = price(inference, strategy), price(training, strategy)
    for layer in network.layers:
        configs = (strategy[layer.name],)
        forward = training.node_cost(training.graph[layer.name], configs).compute.forward
        here = inference.node_cost(inference.graph[layer.name], configs)
        assert here.compute.total == pytest.approx(forward)
        for term in ("sync", "gather"):
            assert here.seconds[term] == 0
        assert mine.layers[layer.name].seconds["transfer"] <= whole.layers[layer.name].seconds["transfer"]
    assert mine.bytes["sync"] == mine.bytes["gather"] == 0
    assert mine.memory_bytes <= whole.memory_bytes
    step = timeline(inference, strategy)
    assert step.backward_s == step.exposed_sync_s == 0
    assert step.total_s <= timeline(training, strategy).total_s
    assert (peak_bytes(inference, strategy) <= peak_bytes(training, strategy)).all()


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
def test_batch_norms_have_running_statistics(name: str) -> None:
    inference, _ = models(fuse(load_model(name, 32)), "p100", 4, "sample")
    strategy = {layer.name: inference.end_config(layer) for layer in inference.graph.inner}
    assert price(inference, strategy).bytes["statistics"] == 0


def test_it_is_chosen_by_its_own_time() -> None:
    """VGG's last layers are split in training, whose gradients are dear; what inference chooses is best for it."""
    inference, training = models(fuse(load_model("vgg16", 64)), "p100", 4, "sample")
    space = SearchSpace(4)
    found, other = search(inference, space), search(training, space)
    assert found.optimum.proven
    assert found.optimum.cost_s <= price(inference, other.additive.strategy).step_time_s * (1 + 1e-9)
    assert found.best.timeline.total_s <= timeline(inference, complete(inference, other.best.strategy)).total_s * 1.03
    assert other.optimum.cost_s > 2 * found.optimum.cost_s
