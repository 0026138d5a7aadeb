"""The wheel: everything is inside, it works from where it is installed, and importing it is cheap."""

import doctest
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import layerwise
from tests.test_arguments import ROOMS, named

ROOT = Path(__file__).parents[1]
WRITTEN = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md")
SOURCES = {"layerwise": "layerwise", "models": "layerwise/models", "profiles": "layerwise/profiles"}


def python(*argv: str, cwd: Path, path: str = "", errors: bool = False) -> str:
    """What Python prints in a process of its own, with nothing of the repository on its path."""
    environment = {**os.environ, "PYTHONPATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + (done.stderr if errors else "")


@dataclass(frozen=True)
class Built:
    """What the build makes of a checkout, and what it says."""

    wheel: Path
    sdist: Path
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """From a copy, so that nothing is left in the repository."""
    source, out = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("dist")
    for name in (*SOURCES, "tests", "notebooks", "docs", "examples", ".ci"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for name in (
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
        "pyproject.toml",
        "setup.py",
        "mkdocs.yml",
        "CITATION.cff",
        *WRITTEN,
    ):
        shutil.copy(ROOT / name, source)
    script = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    said = python("-c", script, cwd=source, errors=True)
    (wheel,), (sdist,) = out.glob("layerwise-*.whl"), out.glob("layerwise-*.tar.gz")
    return Built(wheel, sdist, said)


@pytest.fixture(scope="module")
def wheel(built: Built) -> Path:
    return built.wheel


def files_of(folder: str) -> set[str]:
    """All of a folder of the repository but what running it leaves there."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix() for path in found if not set(path.parts) & {"__pycache__", ".pytest_cache"}
    }


def test_building_gives_no_warning(built: Built) -> None:
    assert "Warning" not in built.said
    assert "absent from the `packages` configuration" not in built.said


def test_the_sdist_has_all_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert files_of("tests") | files_of("docs") | files_of("examples") <= inside
    assert {"LICENSE", "Makefile", "mkdocs.yml", "pyproject.toml", ".ci/constraints.txt", *WRITTEN} <= inside


def test_what_is_installed_comes_from_public_indexes() -> None:
    """A local version, such as 2.13.0+cpu, is on none: pip would find no solution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    asked += [line for lines in project["project"]["optional-dependencies"].values() for line in lines]
    constraints = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if line[:1] not in "#"]
    assert any(line.startswith("torch==") for line in constraints)
    assert [line for line in (*asked, *constraints) if "+" in line or "@" in line] == []
    assert "+cpu" not in (ROOT / "Makefile").read_text()


def test_make_keeps_what_an_environment_has() -> None:
    """The users' targets pin nothing: a given environment's own PyTorch stays."""
    assert "constraints" not in (ROOT / "Makefile").read_text()


def test_wheel_is_complete(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for source, target in SOURCES.items():
        for path in (ROOT / source).rglob("*"):
            if path.suffix in (".py", ".json", ".typed", ".md") and "__pycache__" not in path.parts:
                assert f"{target}/{path.relative_to(ROOT / source).as_posix()}" in inside
    assert {f"layerwise/profiles/{name}.json" for name in ("cpu", "h100", "p100", "pcie", "v100")} <= inside
    assert {"layerwise/py.typed", "layerwise/models/vgg.py"} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert {name.split("/")[0] for name in inside} == {"layerwise", f"layerwise-{layerwise.__version__}.dist-info"}


def test_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    flags = ("--no-deps", "--no-index", "-q", "--target", str(target))
    python("-m", "pip", "install", *flags, str(wheel), cwd=tmp_path)
    script = (
        "import json, layerwise.models, layerwise.profiles\n"
        "from layerwise.machine import load, names\n"
        "from layerwise.models import find\n"
        "print(json.dumps([layerwise.__file__, layerwise.models.__file__, layerwise.profiles.__file__]))\n"
        "print(json.dumps([load(name).name for name in names()]), find('lenet5').name)\n"
    )
    files, known = python("-c", script, cwd=tmp_path, path=str(target)).splitlines()
    assert all(Path(file).is_relative_to(target / "layerwise") for file in json.loads(files))
    assert known == '["cpu", "h100", "h200-measured", "p100", "pcie", "v100"] lenet5'
    module = ("-m", "layerwise.search", "mlp:8x4", "--gpus", "2", "--json")
    assert json.loads(python(*module, cwd=tmp_path, path=str(target)))["optimal"]


def test_a_clone_needs_no_install(tmp_path: Path) -> None:
    """Python started in a clone imports its folder, whatever is installed: models and profiles are found beside it."""
    script = (
        "import sys; sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
        "import layerwise.models, layerwise.profiles\n"
        "print(layerwise.models.__file__, layerwise.profiles.__path__[0])\n"
    )
    models, profiles = python("-c", script, cwd=tmp_path, path=str(ROOT)).split()
    assert (models, profiles) == (str(ROOT / "models" / "__init__.py"), str(ROOT / "profiles"))


def test_packages_are_found(wheel: Path) -> None:
    """All of them, and nothing that is no part of the package (`models/` and `profiles/` are installed inside it)."""
    inside = {str(Path(name).parent) for name in zipfile.ZipFile(wheel).namelist() if name.startswith("layerwise/")}
    there = {
        path.parent for source in SOURCES for path in (ROOT / source).rglob("*.*") if "__pycache__" not in str(path)
    }
    rooms = {path.relative_to(ROOT).as_posix() for path in there}
    assert inside == {room if room.startswith("layerwise") else f"layerwise/{room}" for room in rooms}


def test_versions_agree(wheel: Path) -> None:
    """`layerwise/version.py` has it; the build reads it there, and the changelog begins with it."""
    assert wheel.name.startswith(f"layerwise-{layerwise.__version__}-")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == layerwise.__version__


def test_console_script() -> None:
    (script,) = entry_points(group="console_scripts", name="layerwise")
    assert script.value == "layerwise.__main__:main"
    assert callable(script.load())


def test_public_names_resolve() -> None:
    for name in layerwise.__all__:
        assert getattr(layerwise, name) is not None
    assert set(dir(layerwise)) == set(layerwise.__all__) == {*layerwise._HOME, "__version__"}
    assert len(layerwise.__all__) <= 25
    with pytest.raises(AttributeError, match="'layerwise' has no attribute 'nothing'"):
        layerwise.nothing  # noqa: B018


def test_imports_are_lazy(tmp_path: Path) -> None:
    """Neither torch nor onnx for the package, its planning, the flags, and an unknown model."""
    script = (
        "import sys, layerwise\n"
        "assert not {'torch', 'onnx', 'numpy', 'rich'} & set(sys.modules), 'import layerwise'\n"
        "layerwise.Plan, layerwise.price, layerwise.CostModel, layerwise.load_profile\n"
        "from layerwise.__main__ import dispatch\n"
        "from layerwise.cli import run_main\n"
        "for name in ('search vgg61 --gpus 4', 'explain none.json a'):\n"
        "    assert run_main(dispatch, name.split()) == 2\n"
        "layerwise.plot.strategy\n"
        "assert not {'torch', 'onnx', 'matplotlib'} & set(sys.modules), 'planning'\n"
    )
    python("-c", script, cwd=tmp_path)


def test_built_in_networks_are_planned_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys, layerwise\n"
        "from layerwise.__main__ import dispatch\n"
        "from layerwise.cli import run_main\n"
        "from layerwise.oracle import __main__ as oracle\n"
        "from layerwise.search import __main__ as search\n"
        "from layerwise.search.baselines import baseline\n"
        "assert run_main(search.main, 'lenet5 --gpus 4 --memory --out plan.json --timeline step.json'.split()) == 0\n"
        "assert run_main(dispatch, 'explain plan.json features.0'.split()) == 0\n"
        "for model in ('resnet18', 'unet2d'):\n"
        "    assert run_main(search.main, [model, '--gpus', '2', '--dtype', 'bfloat16']) == 0\n"
        "assert run_main(oracle.main, 'lenet5 --gpus 1..4'.split()) == 0\n"
        "for name in ('alexnet_grouped', 'inception_v3_aux', 'mobilenet_v2', 'mlp:8x4', 'cosmoflow:58', 'unet3d:8'):\n"
        "    graph = layerwise.fuse(layerwise.load_model(name, 4))\n"
        "    model = layerwise.CostModel(graph, layerwise.load_profile('h100').device_graph(2))\n"
        "    layerwise.price(model, baseline(model, 'model'))\n"
        "assert not {'torch', 'onnx'} & set(sys.modules)\n"
    )
    python("-c", script, cwd=tmp_path)


@pytest.mark.parametrize("module", ["layerwise", "layerwise.search", "layerwise.report"])
def test_modules_run_without_warning(module: str, tmp_path: Path) -> None:
    assert python("-W", "error", "-m", module, "--help", cwd=tmp_path).startswith("usage: layerwise")


NAMED = [name for name in (*layerwise.__all__, *ROOMS) if name not in ("__version__", "plot")]


@pytest.mark.parametrize("name", [*NAMED, *(f"plot.{name}" for name in layerwise.plot.__all__)])
def test_public_names_say_their_arguments_and_their_examples_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    public = named(name) if name in NAMED else getattr(layerwise.plot, name.removeprefix("plot."))
    monkeypatch.setenv("COLUMNS", "80")
    text = inspect.getdoc(public) or ""
    if inspect.isclass(public):
        told, needed = parameters_of(public), ("Attributes:" if is_dataclass(public) else "")
    else:
        told, needed = set(inspect.signature(public).parameters), "Args:"
    assert needed in text
    for word in told:
        assert re.search(rf"^    {word}: \S", text, re.MULTILINE), f"{name} does not say what {word} is"
    examples = doctest.DocTestFinder(recurse=False).find(public, name, globs=dict(vars(inspect.getmodule(public))))
    assert ">>> " in text
    for example in examples:
        assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0


@pytest.mark.parametrize("name", ["layerwise.run.load", "layerwise.run.parallel", "layerwise.checkpoint.save_and_load"])
def test_examples_of_rooms_hold(name: str) -> None:
    importlib.import_module(name)  # of layerwise.run the attribute `load` is the function
    ran = doctest.testmod(sys.modules[name])
    assert ran.attempted
    assert not ran.failed


def parameters_of(public: type) -> set[str]:
    """What a user gives a class: the fields of a dataclass without those that are computed."""
    return {field.name for field in fields(public) if field.init} if is_dataclass(public) else set()
