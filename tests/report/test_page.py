"""The page of a plan: its seven sections, names that stay text, and what a browser makes of it."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.shares import shares
from layerwise.cost.timeline.simulate import step_spans, timeline
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import load
from layerwise.report import html, markdown
from layerwise.report.content import Report
from layerwise.search.baselines import baselines
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.report.page import Planned, plan_report
from layerwise.search.result import SearchResult
from tests.report.page import Page

SECTIONS = ["The answer", "Where the time goes", "A layer", "The picture", "The step", "Memory", "All layers"]
HOSTILE = "</script><script>alert(1)</script>|`*"


def planned(model: CostModel, name: str) -> tuple[SearchResult, Planned]:
    space = SearchSpace(model.devices.count)
    result = search(model, space, effort="quick")
    plan = make_plan(name, "p100", model, space, result, fused=True)
    return result, Planned(plan, model, space, result.memory_bytes)


@cache
def of(name: str, batch: int = 8) -> tuple[SearchResult, Planned]:
    return planned(CostModel(fuse(load_model(name, batch)), load("p100").device_graph(4)), name)


@cache
def hostile() -> Report:
    """Of a network with a layer that is called like the end of a script."""
    net = nn.Sequential()
    net.add_module("first", nn.Linear(64, 256))
    graph = from_torch(net, (torch.randn(8, 64),))
    (layer,) = graph.inner
    called = {layer.name: HOSTILE}
    layers = (
        replace(one, name=called.get(one.name, one.name), inputs=tuple(called.get(i, i) for i in one.inputs))
        for one in graph.layers
    )
    model = CostModel(replace(graph, layers=tuple(layers)), load("p100").device_graph(4))
    return plan_report(planned(model, "net")[1])


@pytest.mark.parametrize("name", ["lenet5", "unet3d:16"])
def test_seven_sections_without_another_file(name: str) -> None:
    result, plan = of(name)
    source = html.page(plan_report(plan))
    found = Page(source)
    assert [words for tag, words in found.texts if tag == "h2"] == SECTIONS
    assert found.loaded == []
    assert len(source.encode()) < 500_000
    words = " ".join(text for _, text in found.texts)
    gain = result.baselines["data"].timeline.total_s / result.best.timeline.total_s
    assert f"{gain:.2f}× as fast as data parallelism" in words or "this is data parallelism" in words
    for layer in plan.model.graph.inner:
        assert layer.name in words
    assert source.count("<svg") == (7 if name == "unet3d:16" and "needs its halo" in words else 6)


def test_names_stay_text() -> None:
    source = html.page(hostile())
    assert source.count("<script") == source.count("</script>") == 1
    assert "<script>alert" not in source
    said = markdown.text(hostile())
    assert "<script>" not in said
    assert r"&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;\|\`\*" in said


def test_what_is_said_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install &#x27;layerwise[plot]&#x27;" in of("lenet5")[0]._repr_html_()
    assert "pip install &#x27;layerwise[plot]&#x27;" in html.page(plan_report(of("lenet5")[1]))


@pytest.mark.parametrize("name", ["data", "model", "owt"])
def test_the_shares_of_layers_are_the_step(name: str) -> None:
    for network in ("vgg16", "unet3d:32"):
        model = CostModel(fuse(load_model(network, 64)), load("p100").device_graph(8))
        strategy = baselines(model, SearchSpace(8))[name]
        found = shares(step_spans(model, strategy))
        step_s = sum(found.total(part) for part in ("compute", "transfers", "sync", "statistics"))
        assert step_s == pytest.approx(timeline(model, strategy).total_s)
        assert found.total("sync") >= timeline(model, strategy).exposed_sync_s * 0.99


def test_print() -> None:
    result, _ = of("lenet5")
    text = str(result)
    assert "samples/s" in text
    assert "against" in text
    assert "block of layers" in text
    assert max(map(len, text.splitlines())) <= 80


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, as Debian has it."""
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("there is no chromium")
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def opened(browser: Any, path: Path, report: Report) -> None:
    path.write_text(html.page(report), encoding="utf-8")
    browser.get(path.as_uri())
    assert browser.execute_script("return document.querySelectorAll('figure svg').length") > 0


def summaries(browser: Any, of_which: str) -> list[str]:
    script = f"return [...document.querySelectorAll('{of_which}>summary')].map(e => e.textContent)"
    return list(browser.execute_script(script))


def test_a_reader_with_mouse_and_keyboard(browser: Any, tmp_path: Path) -> None:
    """A bar leads to a block, that to a layer; the field finds one; all of it by keys; on any width; on paper."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    opened(browser, tmp_path / "page.html", plan_report(of("lenet5")[1]))
    bar = browser.find_element(By.CSS_SELECTOR, "figure svg a path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    ActionChains(browser).move_to_element(bar).click().perform()
    assert len(summaries(browser, "details[open]")) == 1
    link = browser.find_element(By.CSS_SELECTOR, "details[open] a")
    name = link.text
    link.send_keys(Keys.ENTER)
    assert any(text.startswith(f"{name}:") for text in summaries(browser, "details[open]"))
    field = browser.find_element(By.CSS_SELECTOR, "input[type=search]")
    field.send_keys("classifier")
    section = "section:nth-of-type(3) details"
    assert {text.split(".")[0] for text in summaries(browser, f"{section}:not([hidden])")} == {"classifier"}
    opened_before = summaries(browser, "details[open]")
    ActionChains(browser).send_keys(Keys.TAB, Keys.ENTER).perform()
    assert len(set(summaries(browser, "details[open]")) ^ set(opened_before)) == 1
    for width in (1280, 400):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000
    assert browser.get_log("browser") == []


def test_a_hostile_name_does_nothing(browser: Any, tmp_path: Path) -> None:
    opened(browser, tmp_path / "hostile.html", hostile())
    assert any(HOSTILE in text for text in summaries(browser, "details"))
    assert browser.get_log("browser") == []
