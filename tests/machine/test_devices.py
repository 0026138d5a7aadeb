"""Devices, the levels of links between them, curves of measured links, memory that is reserved."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.machine import Curve, DeviceGraph, LinkLevel, Links, Overlap, Profile, load, reserved_bytes, save

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
        (0, None, "but must be 1 to 65,536"),
        (-4, None, "is -4, but must be 1 to 65,536"),
        (65_537, None, "is 65,537, but must be 1 to 65,536"),
        (6, None, "6 GPUs do not fill nodes of 4: use 4 or 8 GPUs"),
        (16, 5, "16 GPUs do not fill nodes of 5: use 15 or 20 GPUs"),
        (16, 0, "GPUs per node is 0, but must be at least 1"),
    ],
)
def test_gpus_that_cannot_be(gpus: int, gpus_per_node: int | None, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        V100.device_graph(gpus, gpus_per_node)


def test_a_machine_of_one_node_has_no_second() -> None:
    node = Profile("box", "one node", V100.processor, V100.levels[:1], {})
    assert len(node.device_graph(4).levels) == 1
    with pytest.raises(LayerwiseError, match=r"profile box describes a single node of 4 GPUs, fewer than 8"):
        node.device_graph(8)


def test_a_dtype_that_the_device_lacks() -> None:
    assert V100.processor.peak("float32") == 15.7e12
    with pytest.raises(LayerwiseError, match=r"V100.*'bf16'.*float64, float32, float16"):
        V100.processor.peak("bfloat16")


@pytest.mark.parametrize(("profile", "share"), [("h100", 1.5e9), ("p100", 1.5e9), ("cpu", 0.0)])
def test_a_gpu_has_some_bytes_reserved_and_a_cpu_none(profile: str, share: float) -> None:
    devices = load(profile).device_graph(2)
    assert devices.processor.memory_bytes - devices.usable_bytes == share
    assert reserved_bytes(4e9, devices.device_type) == (0.4e9 if share else 0)  # at most a tenth


CURVE = Curve("all_reduce", (1, 2), 1, ((1000.0, 1e-3), (3000.0, 2e-3), (4000.0, 4e-3)))
LINKS = Links(
    (CURVE, replace(CURVE, load=2), Curve("exchange", (2,), 1, ((1.0, 1e-6), (2.0, 2e-6)), ((1.0, 5e-7), (4.0, 2e-6)))),
    (Overlap((1, 2), 1, 0.9, 0.8), Overlap((2, 2), 1, 0.7, 0.6), Overlap((1, 2), 1, 0.4, 0.3, "reduce_scatter")),
    {"date": "today"},
)


def test_lines_between_knots_the_last_one_going_on() -> None:
    found = CURVE.seconds(np.array([0, 1, 1000, 2000, 3000, 6000]))
    assert found == pytest.approx([0, 1e-3, 1e-3, 1.5e-3, 2e-3, 8e-3])
    for at, alpha, beta in CURVE.pieces:
        assert float(CURVE.seconds(np.array(at + 10))) == pytest.approx(alpha + beta * (at + 10))
    assert [at for at, _, _ in CURVE.pieces] == [1000, 3000]


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-9, 10)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_a_curve_never_falls(points: list[tuple[float, float]]) -> None:
    """Bounds on configurations rest on it: what some devices see is no more than all."""
    sizes, times = sorted(p[0] for p in points), sorted(p[1] for p in points)
    curve = Curve("exchange", (2,), 1, tuple(zip(sizes, times, strict=True)), ((1.0, 1e-6), (9.0, 2e-6)))
    at = np.sort(np.concatenate([np.geomspace(0.5, 3e9, 200), sizes]))
    assert (np.diff(curve.seconds(at)) >= -1e-12).all()
    assert (np.diff(curve.ports_seconds(np.full(5, 100.0), np.arange(5.0))) >= 0).all()


def test_the_next_higher_load_stands_in() -> None:
    assert LINKS.curve("all_reduce", (1, 2, 1), 1) is CURVE
    assert LINKS.curve("all_reduce", (1, 2), 2) == replace(CURVE, load=2)
    assert LINKS.curve("all_reduce", (1, 2), 3) is None
    assert LINKS.curve("all_reduce", (1, 4), 1) is None
    assert LINKS.port(0) == LINKS.curves[2]
    assert LINKS.port(1) is None


def test_overlap_of_a_shape_or_of_one_of_as_many_levels_and_of_an_operation_or_that_of_an_all_reduce() -> None:
    """Profiles of earlier versions have the latter only."""
    assert LINKS.overlap((1, 2), 1) == LINKS.overlap((1, 2), 1, "all_gather") == LINKS.overlaps[0]
    assert LINKS.overlap((4, 4), 1) == LINKS.overlaps[1]
    assert LINKS.overlap((2,), 1) is None
    assert LINKS.overlap((1, 4), 1, "reduce_scatter") == LINKS.overlaps[2]


def test_further_messages_cost_more_the_more_bytes_they_have(tmp_path: Path) -> None:
    """An earlier profile has one number for all sizes."""
    ports = LINKS.curves[2].ports_seconds(np.array([1.0, 2.5, 9.0, 9.0]), np.array([3.0, 3.0, 3.0, 1.0]))
    assert ports == pytest.approx([1e-6 + 2 * 5e-7, 2.5e-6 + 2 * 1.25e-6, 9e-6 + 2 * 2e-6, 9e-6])
    save(replace(load("cpu"), links=LINKS), tmp_path / "x.json")
    document = json.loads((tmp_path / "x.json").read_text())
    document["links"]["curves"][2]["message_s"] = 3e-7
    (tmp_path / "x.json").write_text(json.dumps(document))
    links = load(tmp_path / "x.json").links
    assert links is not None
    assert links.curves[2].ports_seconds(np.array([1.0, 2.0]), np.array([3.0, 2.0])) == pytest.approx([1.6e-6, 2.3e-6])


def test_a_profile_keeps_its_links(tmp_path: Path) -> None:
    profile = replace(load("cpu"), links=LINKS)
    save(profile, tmp_path / "x.json")
    assert load(tmp_path / "x.json") == profile
    assert "[1000.0, 0.001]" in (tmp_path / "x.json").read_text()
    assert profile.device_graph(2).links is LINKS
    assert hash(profile.device_graph(2)) == hash(load("cpu").device_graph(2))
    assert profile.device_graph(2) != load("cpu").device_graph(2)
