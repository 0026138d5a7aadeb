"""The device graph: nested groups, ports, and what becomes of a profile with another number of GPUs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.machine import DeviceGraph, LinkLevel, Profile, load

V100 = load("v100")


@st.composite
def machines(draw: st.DrawFn) -> Profile:
    """The V100 profile with one to three levels of random sizes and ports."""
    node = draw(st.integers(1, 6))
    sizes: list[int | None] = [node, node * draw(st.integers(2, 4)), None][: draw(st.integers(1, 3))]
    if len(sizes) == 2:
        sizes[1] = None
    levels: list[LinkLevel] = []
    for i, size in enumerate(sizes):
        within = levels[-1].devices if levels else node
        assert within is not None
        divisors: list[int | str] = [d for d in range(1, within + 1) if within % d == 0]
        sharing = draw(st.sampled_from(divisors + [level.name for level in levels]))
        levels.append(LinkLevel(f"level{i}", size, 1e-6 * (i + 1), 1e9 / (i + 1), sharing))
    return Profile("random", "random", V100.processor, tuple(levels), {})


@st.composite
def graphs(draw: st.DrawFn) -> DeviceGraph:
    machine = draw(machines())
    node = draw(st.integers(1, 6))
    single = st.integers(1, node)
    many = st.integers(2, 8).map(lambda nodes: nodes * node)
    return machine.device_graph(draw(single | many if len(machine.levels) > 1 else single), node)


@given(graphs())
def test_two_devices_meet_in_the_innermost_group_that_holds_both(graph: DeviceGraph) -> None:
    groups = [graph.group(level) for level in range(len(graph.levels))]
    between = graph.level_between(np.arange(graph.count)[:, None], np.arange(graph.count)[None, :])
    for p in range(graph.count):
        for q in range(graph.count):
            meeting = min(level for level, group in enumerate(groups) if group[p] == group[q])
            assert graph.level_between(p, q) == meeting == between[p, q]


@given(graphs())
def test_groups_nest_and_no_port_spans_two_of_them(graph: DeviceGraph) -> None:
    assert graph.count == graph.nodes * graph.devices_per_node
    assert set(graph.group(len(graph.levels) - 1)) == {0}
    for level in range(1, len(graph.levels)):
        inner, outer, port = graph.group(level - 1), graph.group(level), graph.port(level)
        assert len(set(zip(inner, outer, strict=True))) == inner.max() + 1 > outer.max() + 1
        assert len(set(zip(port, inner, strict=True))) == port.max() + 1


@pytest.mark.parametrize(
    ("name", "gpus", "gpus_per_node", "expected"),
    [
        ("p100", 16, None, [("node", 4, 1), ("cluster", 16, 4)]),
        ("p100", 16, 2, [("node", 2, 1), ("cluster", 16, 2)]),  # the node's port is still one
        ("p100", 16, 16, [("node", 16, 1)]),
        ("p100", 3, None, [("node", 3, 1)]),
        ("h100", 32, 16, [("node", 16, 1), ("cluster", 32, 1)]),
        ("cpu", 4, None, [("node", 1, 1), ("cluster", 4, 1)]),
        ("cpu", 4, 2, [("node", 2, 1), ("cluster", 4, 2)]),
        ("cpu", 1, None, [("node", 1, 1)]),
        ("v100", 8, 1, [("node", 1, 1), ("rack", 8, 1)]),
        ("v100", 6, 3, [("node", 3, 1), ("rack", 6, 3)]),  # two GPUs a port would span two nodes
        ("v100", 136, None, [("node", 4, 1), ("rack", 136, 2)]),
        ("v100", 256, None, [("node", 4, 1), ("rack", 136, 2), ("cluster", 256, 136)]),
        ("v100", 256, 2, [("node", 2, 1), ("rack", 68, 2), ("cluster", 256, 68)]),  # 34 nodes a rack
    ],
)
def test_levels_for_a_number_of_gpus(
    name: str, gpus: int, gpus_per_node: int | None, expected: list[tuple[str, int, int]]
) -> None:
    graph = load(name).device_graph(gpus, gpus_per_node)
    assert [(level.name, level.devices, level.devices_per_port) for level in graph.levels] == expected


def test_between_racks_a_device_has_a_third_of_its_share_inside() -> None:
    rack, cluster = V100.device_graph(1024).levels[1:]
    inside = 1 / rack.beta_s_per_byte / rack.devices_per_port
    between = 1 / cluster.beta_s_per_byte / cluster.devices_per_port
    assert between == pytest.approx(inside / 3, rel=1e-3)


def test_a_message_between_racks_passes_its_nic_and_the_uplink_but_no_nvlink() -> None:
    graph = V100.device_graph(256)
    passed = [[graph.levels[i].name for i in graph.ports_passed(level)] for level in range(3)]
    assert passed == [["node"], ["rack"], ["rack", "cluster"]]
    # The slowest of them is what a lone message gets, so an uplink wider than a NIC never makes it faster.
    slowest = [max(graph.levels[i].beta_s_per_byte for i in graph.ports_passed(level)) for level in range(3)]
    assert slowest == sorted(slowest)


def test_the_largest_graph_is_small_and_whole() -> None:
    graph = load().device_graph(65_536)
    last = graph.count - 1
    assert (graph.nodes, graph.device_name(last)) == (8192, "node8191/gpu7")
    assert graph.level_between(last, last - 7) == 0
    assert graph.level_between(last, last - 8) == 1


def test_equal_graphs_share_a_cache_entry() -> None:
    assert len({load("p100").device_graph(16), load("p100").device_graph(16), load("p100").device_graph(8)}) == 2


@pytest.mark.parametrize(
    ("gpus", "gpus_per_node", "said"),
    [
        (0, None, "must be 1 to 65,536, not 0"),
        (-4, None, "not -4"),
        (65_537, None, "not 65,537"),
        (6, None, "6 GPUs do not fill nodes of 4: take 4 or 8 GPUs"),
        (16, 5, "16 GPUs do not fill nodes of 5: take 15 or 20 GPUs"),
        (16, 0, "GPUs per node must be at least 1, not 0"),
    ],
)
def test_gpus_that_cannot_be(gpus: int, gpus_per_node: int | None, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        V100.device_graph(gpus, gpus_per_node)


def test_a_machine_of_one_node_has_no_second() -> None:
    node = Profile("box", "one node", V100.processor, V100.levels[:1], {})
    assert len(node.device_graph(4).levels) == 1
    with pytest.raises(LayerwiseError, match=r"profile box describes a single node and 8 GPUs are more than its 4"):
        node.device_graph(8)


def test_a_dtype_that_the_device_lacks() -> None:
    assert V100.processor.peak("float32") == 15.7e12
    with pytest.raises(LayerwiseError, match=r"V100.*'bf16'.*float64, float32, float16"):
        V100.processor.peak("bfloat16")
