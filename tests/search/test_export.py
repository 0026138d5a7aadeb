"""The exported file: the format's rules, and its numbers. test_toulbar2.py has it solved."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.model import CostTables
from layerwise.errors import LayerwiseError
from layerwise.search.export import above_s, export_costs, value_name, variable_names
from tests.search.tables import every_strategy, random_tables, tables

TOKEN = re.compile(r"[^0-9.+\-/#\[\]{}:,\s][^/#\[\]{}:,\s]*")  # what the format says of strings


@given(random_tables(nodes=5, most=3))
def test_the_file_has_all_tables_to_twelve_decimals(tmp_path_factory: pytest.TempPathFactory, t: CostTables) -> None:
    path = tmp_path_factory.getbasetemp() / "costs.cfn"
    export_costs(t, path, "some model")
    text = path.read_text()
    file = json.loads(text)
    assert list(file) == ["problem", "variables", "functions"]
    assert file["problem"]["name"] == "some_model"
    assert file["variables"] == {name: [value_name(c) for c in configs] for name, configs in t.configs.items()}
    expected = [([name], cost) for name, cost in t.node.items()]
    expected += [([u, v], cost) for (u, v, _), cost in t.transfer.items()]
    for function, (scope, cost) in zip(file["functions"].values(), expected, strict=True):
        assert function["scope"] == scope
        np.testing.assert_allclose(function["costs"], cost.ravel(), rtol=0, atol=0.5e-12)
    numbers = re.findall(r"[\s<][0-9][0-9.eE+-]*", text)
    assert all(re.fullmatch(r".[0-9]+\.[0-9]{12}", number) for number in numbers)
    assert float(file["problem"]["mustbe"].removeprefix("<")) > max(every_strategy(t).values())


def test_values_are_named_after_configurations() -> None:
    assert value_name(Config()) == "serial"
    assert value_name(Config.of({"c": 2, "n": 4})) == "n4_c2"
    assert value_name(Config.of({"n": 4}, "strided")) == "n4_strided"


@given(
    st.lists(st.text() | st.sampled_from(["a/b", "a:b", "a_b", "a b", "_0", "0", "", "é", '"', "a_b_2"]), unique=True)
)
def test_layers_have_distinct_names_that_the_format_allows(layers: list[str]) -> None:
    names = variable_names(layers)
    assert list(names) == layers
    assert len(set(names.values())) == len(layers)
    assert all(TOKEN.fullmatch(name) and name.isascii() for name in names.values())


def test_names_that_the_format_allows_stay() -> None:
    layers = ["features.0", "Mixed_5b.branch1x1-conv", "outputs"]
    assert variable_names(layers) == dict(zip(layers, layers, strict=True))


def scaled(factor: float) -> CostTables:
    t = tables({"a": 2, "b": 2}, [("a", "b", 0)], seed=1)
    for cost in (*t.node.values(), *t.transfer.values()):
        cost *= factor
    return t


@pytest.mark.parametrize(("factor", "digits"), [(5e3, 12), (1e4, 11), (1e5, 10), (1e6, 9)])
def test_large_costs_leave_room_for_fewer_decimals(tmp_path: Path, factor: float, digits: int) -> None:
    export_costs(scaled(factor), tmp_path / "costs.cfn")
    bound = json.loads((tmp_path / "costs.cfn").read_text())["problem"]["mustbe"]
    assert len(bound.partition(".")[2]) == digits
    assert int(bound[1:].replace(".", "")) < 2**63 // 162


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "costs.cfn"
    path.write_text("before")
    with pytest.raises(LayerwiseError, match="too long for 9 decimals"):
        export_costs(scaled(1e8), path)

    def fails(config: Config) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("layerwise.search.export.value_name", fails)
    with pytest.raises(KeyboardInterrupt):
        export_costs(scaled(1), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    with pytest.raises(LayerwiseError, match="cannot be written"):
        export_costs(scaled(1), tmp_path / "no" / "such" / "folder.cfn")


def test_no_strategy_reaches_the_bound() -> None:
    t = scaled(0.0)
    assert above_s(t) == 1.0  # a bound of 0 would forbid strategies that cost nothing
