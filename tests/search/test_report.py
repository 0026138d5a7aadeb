"""What is said of a search: no more than is known, of gains and of memory."""

from dataclasses import replace
from math import inf

import pytest
import torch
from torch import Tensor, nn

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.find import search
from layerwise.search.report.found import as_dict
from layerwise.search.report.sentences import choices, verdict, why_data
from layerwise.search.result import SearchResult, error_between
from tests.importers.networks import chain


def with_memory(model: CostModel, memory_bytes: float) -> CostModel:
    processor = replace(model.devices.processor, memory_bytes=int(memory_bytes))
    return CostModel(model.graph, replace(model.devices, processor=processor), model.options)


def said(result: SearchResult) -> tuple[str, str, dict[str, object]]:
    """For people, as HTML and for programs."""
    return " ".join(verdict(result)), result._repr_html_(), as_dict(result, "net", result.seconds)


def test_a_gain_within_the_models_error_is_told_and_data_parallelism_kept() -> None:
    """VGG-16 on one node of P100: split linear layers would gain 0.3 %."""
    model = CostModel(fuse(load_model("vgg16", 128)), load("p100").device_graph(4))
    result = search(model, SearchSpace(4))
    less = 1 - result.fastest.timeline.total_s / result.best.timeline.total_s
    assert result.best.name == "data"
    assert 0.001 < less < 0.03
    text, html, found = said(result)
    gain = f"{1 / (1 - less):.4g}× as fast ({less:.1%} less time)"
    error = f"{100 * error_between(result.best, result.fastest):.2g}%"
    kept = f"kept: the fastest plan found is predicted {gain}, within the model's error ({error})"
    assert f"Data parallelism is {kept}." in text
    assert kept in html.replace("&#x27;", "'")
    assert found["chosen"] == "data"
    assert less < found["model_error"] < 0.2
    assert found["fastest"]["timeline_s"] == result.fastest.timeline.total_s
    assert found["fastest"]["strategy"]["classifier.0"] == {"n": 1, "c": 4}


def test_where_nothing_is_faster_that_is_said() -> None:
    model = CostModel(fuse(load_model("lenet5", 4096)), load("h100").device_graph(2))
    result = search(model, SearchSpace(2))
    text, html, _ = said(result)
    assert "Data parallelism is the best here: no other plan that was simulated is predicted to be faster." in text
    assert "no other plan that was simulated is predicted to be faster" in html
    assert "memory" not in text


def slower(result: SearchResult, share: float) -> SearchResult:
    """With data parallelism taking so much more time than the fastest plan that this one saves `share` of it."""
    data, fastest = result.baselines["data"], result.fastest
    longer = replace(data.timeline, total_s=fastest.timeline.total_s / (1 - share))
    data = replace(data, timeline=longer)
    others = tuple(c for c in result.simulated if c.strategy != data.strategy)
    return replace(
        result, best=data, additive=data, baselines={**result.baselines, "data": data}, simulated=(*others, data)
    )


def test_a_gain_is_told_as_what_it_is_compared_with() -> None:
    """2.99 % less time is told as "1.031× as fast"."""
    model = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    found = search(model, SearchSpace(4))
    told = why_data(slower(found, 0.0299))
    kept = "kept: the fastest plan found is predicted 1.031× as fast (3.0% less time), within the model's error (11%)"
    assert told == kept
    told = why_data(slower(found, 0.25))  # as --objective additive may choose
    assert told == "the best by step time; with overlap a plan that was simulated is predicted to take 25.0% less time"


def test_data_parallelism_is_not_called_fastest_where_a_faster_plan_does_not_fit() -> None:
    model = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    found = slower(search(model, SearchSpace(4)), 0.05)
    full = tuple(
        replace(c, memory_limit_bytes=inf if c.strategy == found.best.strategy else 0.0) for c in found.simulated
    )
    told = why_data(replace(found, simulated=full))
    assert told == "the best here: no other plan that was simulated and fits into memory is predicted to be faster"


def test_where_no_plan_fits_the_least_memory_is_said() -> None:
    """Of all plans of the space, and bounded; not that data parallelism is best, nor what would help."""
    roomy = CostModel(fuse(chain(8, depth=1)), load("p100").device_graph(4), CostOptions(optimizer="adam"))
    model = with_memory(roomy, 1e4)
    result = search(model, SearchSpace(4))
    assert result.least is not None
    assert 1e4 < result.least.lower_bound_bytes <= result.least.bytes
    assert result.least.bytes <= min(c.price.memory_bytes for c in result.simulated)
    text, html, found = said(result)
    for words in (text, html, *found["warnings"]):
        assert "no plan fits into the 10.0 kB of a device" in words
        assert f": every plan needs at least {units(result.least.bytes, 'B')} (proven)" in words
        assert "best here" not in words
        assert "more GPUs" not in words
        assert "smaller batch" not in words
    assert found["simulated"]["fit"] == 0
    assert found["fits"] is False
    for bound, words in (
        (2e4, "no plan fits into the 10.0 kB of a device: the smallest plan found needs"),
        (5e3, "no plan was found that fits into the 10.0 kB of a device: the smallest plan found needs"),
        (result.least.bytes * 0.9999, f": every plan needs at least {units(result.least.bytes, 'B')} (proven)"),
    ):
        unsure = replace(result, least=replace(result.least, lower_bound_bytes=bound))
        assert words in said(unsure)[0]
        assert ("and no plan needs less than" in said(unsure)[0]) == (bound < 3e4)


def test_an_additive_optimum_that_does_not_fit_gives_way_to_what_does() -> None:
    roomy = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    free = search(roomy, SearchSpace(4), objective="additive").best
    limit = 0.7 * free.price.memory_bytes
    result = search(roomy, SearchSpace(4), objective="additive", memory_limit_bytes=limit)
    assert result.best.fits
    text, _, found = said(result)
    have, need = units(int(limit), "B"), units(free.price.memory_bytes, "B")
    assert f"lower bound of all that fits into {have}" in text
    assert f"The limit of {have} a device binds: a plan that needs {need} ({result.unlimited.name}) would " in text
    assert "libraries" not in text  # the limit is given
    assert found["memory_limit_bytes"] == int(limit)
    assert found["without_limit"]["memory_bytes"] == free.price.memory_bytes
    forms = {(layer["recompute"], layer["states"]) for layer in found["layers"].values()}
    assert forms - {(False, "replicated")} or result.best.strategy != free.strategy


def test_where_the_default_limit_binds_its_reserve_is_said() -> None:
    roomy = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    model = with_memory(roomy, 0.8 * search(roomy, SearchSpace(4)).best.price.memory_bytes)
    limit = model.devices.usable_bytes
    assert limit == 0.9 * model.devices.processor.memory_bytes
    text, *_ = said(search(model, SearchSpace(4), memory_limit_bytes=limit))
    whole = units(model.devices.processor.memory_bytes, "B")
    assert f" of a device's {whole} to libraries" in text
    assert "--memory-limit overrides it." in text


def test_choices_are_counted() -> None:
    plain, again = Config(), Config(recompute=True)
    assert list(choices([plain])) == []
    assert list(choices([plain, again])) == ["To fit, 1 layer is recomputed in the backward pass."]
    (line,) = choices([again, again, Config(states="sharded"), Config(states="gathered")])
    assert line.startswith("To fit, 2 layers are recomputed in the backward pass, the optimizer state of 1 ")
    assert line.endswith(", all states of 1 are sharded, with parameters gathered for computation.")


def test_one_device_has_one_plan() -> None:
    roomy = CostModel(fuse(chain(8)), load("p100").device_graph(1))
    text, *_ = said(search(roomy, SearchSpace(1)))
    assert "Data parallelism is the only plan there is. " in text


def test_one_device_may_recompute() -> None:
    """Where even that does not fit, its memory is the least."""
    model = with_memory(CostModel(fuse(chain(8)), load("p100").device_graph(1)), 1e4)
    result = search(model, SearchSpace(1))
    assert result.least is not None
    assert result.least.bytes < result.baselines["data"].price.memory_bytes
    assert f"every plan needs at least {units(result.least.bytes, 'B')} (proven)" in said(result)[0]


@pytest.mark.parametrize(("batch", "warned"), [(1, True), (2, False)])
def test_a_batch_norm_of_one_number_is_warned_of(batch: int, warned: bool) -> None:
    """A cube of 8 voxels a side is halved three times; PyTorch has no variance of what is left of one sample."""
    model = CostModel(fuse(load_model("unet3d:8", batch)), load("cpu").device_graph(2, gpus_per_node=2))
    text, _, found = said(search(model, SearchSpace(2)))
    line = "WARNING: PyTorch cannot train layer 'bottom.0': its batch norm has one number for each channel"
    assert (line in text) == warned
    assert any(line in one for one in found["warnings"]) == warned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.linalg.svdvals(self.up(x).view(-1, 8, 8)))


def test_reports_name_whole_layers_and_their_share() -> None:
    graph = fuse(from_torch(Net(), (torch.randn(8, 16),)))
    model = CostModel(graph, load("cpu").device_graph(gpus=2, gpus_per_node=2), CostOptions())
    result = search(model, SearchSpace(2))
    (line,) = (line for line in verdict(result) if line.startswith("Not split"))
    told = as_dict(result, "net", {})["whole"]
    assert list(told) == ["linalg_svdvals"]
    assert 0 < told["linalg_svdvals"] < 1
    named = f"linalg_svdvals (aten::linalg_svdvals), {told['linalg_svdvals']:.0%}"
    assert line == f"Not split, with their share of the step: {named}."
