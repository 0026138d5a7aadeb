"""Law: whatever the size of a sample and the number of ranks, what is written is what one device computes."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm, CommError
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.inference import results
from layerwise.inference.predict import Predicted, _named, answer, predict
from layerwise.inference.windows import LEAST, profile, starts
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import of
from tests.comm.thread import run_threads
from tests.run.plans import random_plan

pytestmark = pytest.mark.usefixtures("models_traced_once")
SHAPES = ((1, 13, 16, 12), (1, 16, 16, 16), (1, 17, 9, 14))


class Net(nn.Module):
    """Takes even extents only: what is halved is doubled and added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.down = nn.Conv3d(4, 4, 2, stride=2)
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.head = nn.Conv3d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        out: Tensor = self.head(x + self.up(torch.relu(self.down(x))))
        return out


@cache
def trained() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    model = Net().double()
    model(torch.randn(2, 1, 16, 16, 16, dtype=torch.float64) * 2 + 1)
    model.eval()
    return model, network_of(copy.deepcopy(model), (torch.zeros(1, 1, 16, 16, 16, dtype=torch.float64),), 1, "net")


@pytest.fixture(autouse=True, scope="module")
def before_threads() -> None:
    """It is made before ranks are threads, which have one generator of random numbers."""
    trained()


def volumes() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in SHAPES]


@cache
def plan_of(ranks: int) -> Plan:
    def deep(configs: list[Config]) -> Config:
        return max(configs, key=lambda c: (c["d"] * c["h"], c["d"], -c.total))

    return random_plan(fuse(trained()[1].graph), ranks, 0, "boxes", deep)


def module_of(comm: Comm) -> Any:
    plan = plan_of(comm.size)
    plan = replace(plan, predicted=dict(plan.predicted))  # which a test writes to
    return load(plan, trained()[1], comm=comm, dtype=torch.float64).eval()


@torch.no_grad()
def one_pass(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The network's answer for one sample, padded with zeros to even extents on both sides."""
    rest = [n % 2 for n in x.shape[1:]]
    before = [r // 2 for r in rest]
    padded = np.pad(x, [(0, 0), *((b, r - b) for b, r in zip(before, rest, strict=True))])
    made = trained()[0](torch.from_numpy(padded)[None])[0].numpy()
    return made[(slice(None), *(slice(b, b + n) for b, n in zip(before, x.shape[1:], strict=True)))]


def check(folder: Path, wanted: Sequence[np.ndarray[Any, Any]]) -> None:
    """The files of a folder have these, to float32."""
    for number, one in enumerate(wanted):
        np.testing.assert_allclose(np.load(folder / f"sample_{number:05d}.npy"), one, rtol=1e-5, atol=1e-6)


def in_windows(
    x: np.ndarray[Any, Any],
    window: tuple[int, ...],
    overlap: float,
    one: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] = one_pass,
) -> np.ndarray[Any, Any]:
    """The Gaussian mean over windows, as sliding windows on one device compute it."""
    large = [max(n, w) for n, w in zip(x.shape[1:], window, strict=True)]
    before = [(m - n) // 2 for m, n in zip(large, x.shape[1:], strict=True)]
    padded = np.pad(x, [(0, 0), *((b, m - n - b) for b, m, n in zip(before, large, x.shape[1:], strict=True))])
    total, weight = np.zeros((len(one(x)), *large)), np.zeros(large)
    gaussian = np.maximum(np.einsum("a,b,c->abc", *map(profile, window)), LEAST)
    for place in starts(large, window, overlap):
        here = tuple(slice(p, p + w) for p, w in zip(place, window, strict=True))
        total[(slice(None), *here)] += one(padded[(slice(None), *here)]) * gaussian
        weight[here] += gaussian
    mean = total / weight
    return mean[(slice(None), *(slice(b, b + n) for b, n in zip(before, x.shape[1:], strict=True)))]


def run(ranks: int, samples: object, out: object, **options: Any) -> list[Predicted]:
    plan_of(ranks)  # once, before ranks are threads that each would make it
    return run_threads(ranks, lambda comm: predict(module_of(comm), samples, out, **options))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_sizes_that_differ(ranks: int, tmp_path: Path) -> None:
    run(ranks, volumes(), tmp_path / "logits")
    check(tmp_path / "logits", [one_pass(x) for x in volumes()])


@pytest.mark.parametrize("ranks", [1, 3])
def test_giant_windows(ranks: int, tmp_path: Path) -> None:
    """Where all devices together are too small; one sample is smaller than the window in some dimensions."""
    run(ranks, volumes(), tmp_path / "logits", window=(12, 16, 8), overlap=0.25)
    check(tmp_path / "logits", [in_windows(x, (12, 16, 8), 0.25) for x in volumes()])


def test_windows_are_taken_where_a_sample_does_not_fit(tmp_path: Path) -> None:
    def limited(comm: Comm) -> None:
        module = module_of(comm)
        module.plan.predicted["memory_bytes"] = 1e6  # of the planned size, 16 x 16 x 16
        predict(module, [*volumes(), large], tmp_path / "a", memory_limit="2MB")

    large = np.random.default_rng(1).normal(size=(1, 40, 16, 16))
    run_threads(2, limited)
    check(tmp_path / "a", [*map(one_pass, volumes()), in_windows(large, (16, 16, 16), 0.5)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_mirrored(ranks: int, tmp_path: Path) -> None:
    run(ranks, volumes(), tmp_path / "logits", mirror="dw")
    for number, x in enumerate(volumes()):
        ways = [(), (1,), (3,), (1, 3)]
        wanted = sum(np.flip(one_pass(np.flip(x, way).copy()), way) for way in ways) / 4
        odd = any(n % 2 for n in x.shape[1:])  # what pads an odd extent is mirrored with it
        found = np.load(tmp_path / "logits" / f"sample_{number:05d}.npy")
        if not odd:
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert np.isfinite(found).all()


def test_mirrored_where_a_rank_has_no_part(tmp_path: Path) -> None:
    def on_one_device(comm: Comm) -> Predicted:
        _, network = trained()
        plan = random_plan(
            fuse(network.graph), comm.size, 0, "boxes", lambda configs: min(configs, key=lambda c: c.total)
        )
        module = load(plan, network, comm=comm, dtype=torch.float64)
        return predict(module, [volumes()[1]], tmp_path / "a", mirror="d")

    run_threads(2, on_one_device)
    x = volumes()[1]
    check(tmp_path / "a", [(one_pass(x) + one_pass(x[:, ::-1].copy())[:, ::-1]) / 2])


REDUCED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "argmax": ("argmax", lambda y: y.argmax(0)),
    "softmax": ("softmax", lambda y: np.exp(y) / np.exp(y).sum(0)),
    "sigmoid": ("sigmoid", lambda y: 1 / (1 + np.exp(-y))),
    "a threshold": (lambda y: y[:, 1] > 0.1, lambda y: y[1] > 0.1),
    "two of them": (lambda y: y[:, :2] * 2, lambda y: y[:2] * 2),
}


@pytest.mark.parametrize("kind", ["zarr", "npy"])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_before_anything_is_gathered(name: str, kind: str, tmp_path: Path) -> None:
    reduce, expected = REDUCED[name]
    out = tmp_path / ("labels.zarr" if kind == "zarr" else "labels")
    run(2, volumes(), out, reduce=reduce)
    for number, x in enumerate(volumes()):
        case = f"sample_{number:05d}"
        found = zarr.open_array(out / case)[:] if kind == "zarr" else np.load(out / f"{case}.npy")
        np.testing.assert_allclose(found, expected(one_pass(x)), rtol=1e-5, atol=1e-6)


def test_nifti(tmp_path: Path) -> None:
    """Labels lie where their volumes lie."""
    files, affine = [], np.diag([2.0, 1.0, 3.0, 1.0])
    for number, x in enumerate(volumes()):
        files.append(str(tmp_path / f"case{number}.nii.gz"))
        nibabel.save(nibabel.Nifti1Image(x[0], affine), files[-1])
    run(2, files, tmp_path / "labels", reduce="argmax")
    for number, x in enumerate(volumes()):
        made = nibabel.load(tmp_path / "labels" / f"case{number}.nii.gz")
        assert np.array_equal(made.affine, affine)
        assert np.array_equal(np.asarray(made.dataobj), one_pass(x).argmax(0))


def test_a_case_that_fails_is_named_and_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.npy" for name in "abc"]
    for file, x in zip(files, volumes(), strict=True):
        np.save(file, x)
    files[1].write_bytes(b"no numbers")
    out = tmp_path / "out"
    for _ in range(2):  # the second run computes nothing again
        with pytest.raises(LayerwiseError, match=r"1 of 3 samples failed, . were written: b: .*b\.npy"):
            run(2, [str(file) for file in files], out)
        before = (out / "a.npy").stat().st_mtime_ns
        assert sorted(path.name for path in out.iterdir()) == [".layerwise", "a.npy", "c.npy"]
    np.save(files[1], volumes()[1])
    assert run(2, [str(file) for file in files], out) == [Predicted(("b",), ("a", "c"))] * 2
    assert (out / "a.npy").stat().st_mtime_ns == before
    assert run(1, [str(file) for file in files], out, overwrite=True) == [Predicted(("a", "b", "c"), ())]


@pytest.mark.parametrize("kind", ["zarr", "npy"])
def test_results_of_others_are_not_taken(kind: str, tmp_path: Path) -> None:
    """By other ranks the same: other weights, or another reduction, need another folder."""
    out = tmp_path / ("labels.zarr" if kind == "zarr" else "labels")
    run(2, volumes(), out, reduce="argmax")
    assert run(3, volumes(), out, reduce="argmax")[0].written == ()

    def other(comm: Comm) -> Predicted:
        module = module_of(comm)
        for shard in module.shards():
            if shard.name == "head.bias":
                shard.tensor.view(-1)[-1] += 1e-9
        return predict(module, volumes(), out, reduce="argmax")

    for again in (lambda: run_threads(2, other), lambda: run(2, volumes(), out, reduce="softmax")):
        with pytest.raises(LayerwiseError, match="may belong to other weights or options"):
            again()
    assert len(run(1, volumes(), out, reduce="softmax", overwrite=True)[0].written) == len(SHAPES)
    assert run(2, volumes(), out, reduce="softmax")[0].written == ()


def test_ranks_of_two_nodes_never_hold_a_page_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS each node's file is closed before the next one opens it."""
    there, opened = threading.local(), list[str]()
    put = results._put_into_file

    def recorded(*args: Any) -> None:
        opened.append(there.host)
        put(*args)

    monkeypatch.setattr(results, "_host", lambda: there.host)
    monkeypatch.setattr(results, "_put_into_file", recorded)

    def rank(comm: Comm) -> Predicted:
        there.host = "ab"[comm.rank % 2]
        return predict(module_of(comm), [volumes()[1]] * 2, tmp_path / "a.npy")

    run_threads(4, rank)
    assert opened == [*"aabb"] * 2
    np.testing.assert_allclose(np.load(tmp_path / "a.npy")[1], one_pass(volumes()[1]), rtol=1e-5, atol=1e-6)


def test_one_rank_without_memory_ends_all(tmp_path: Path) -> None:
    def rank(comm: Comm) -> Predicted:
        module = module_of(comm)
        if comm.rank == 1:
            run = of(module)
            sized = run.sized

            def short(*args: Any) -> Any:
                def fail(given: object) -> Any:
                    raise torch.OutOfMemoryError("no memory")

                return replace(sized(*args), run=fail)

            vars(run)["sized"] = short
        return predict(module, volumes(), tmp_path / "a")

    with pytest.raises(CommError, match="rank 1 ran out of memory"):
        run_threads(2, rank)


def test_what_cannot_be(tmp_path: Path) -> None:
    wrong: list[tuple[object, object, dict[str, Any], str]] = [
        ([np.zeros((2, 16, 16, 16))], tmp_path / "a", {}, r"has shape \(2, 16, 16, 16\), but the model takes"),
        ([np.zeros((16, 16, 16))], tmp_path / "a", {}, r"has shape \(16, 16, 16\), but the model takes"),
        ([np.full((1, 16, 16, 16), np.nan)], tmp_path / "a", {}, "not finite"),
        (volumes(), tmp_path / "a.txt", {}, "predict writes .npy files"),
        (volumes(), tmp_path / "a.npy", {}, "has an array of shape"),
        (volumes(), tmp_path / "a", {"overlap": 1.0}, "overlap is 1.0; it must be at least 0"),
        (volumes(), tmp_path / "a", {"mirror": "s"}, "'s' is not one of d, h, w"),
        (volumes(), tmp_path / "a", {"window": (4, 4)}, "must have an extent for each of d, h, w"),
        (volumes(), tmp_path / "a", {"reduce": "max"}, "it must be 'argmax', 'softmax', 'sigmoid', a function or None"),
        (volumes(), tmp_path / "a", {"reduce": lambda y: y.sum()}, "must return a tensor"),
        (volumes(), tmp_path / "a", {"output": 1}, "output=1 is out of range"),
    ]
    for samples, out, options, said in wrong:
        with pytest.raises(LayerwiseError, match=said):
            run(2, samples, out, **options)
        assert not list(tmp_path.rglob("*.npy")), said


def test_ranks_that_split_samples_alone_compute_samples_of_their_own(tmp_path: Path) -> None:
    model, _ = trained()

    def both(comm: Comm) -> Predicted:
        options = layerwise.ParallelOptions(comm=comm, io="boxes", measure_s=0, verbose=False)
        x = torch.zeros(2, 1, 16, 16, 16, dtype=torch.float64)
        made = layerwise.parallelize(copy.deepcopy(model), x, strategy="data", inference=True, options=options)
        return predict(made, volumes(), tmp_path / "a")

    run_threads(2, both)
    check(tmp_path / "a", [one_pass(x) for x in volumes()])


def test_windows_cover_and_weigh() -> None:
    for extent, size, overlap in product((5, 16, 33), (4, 5), (0.0, 0.5, 0.75)):
        places = [place for (place,) in starts((extent,), (size,), overlap)]
        covered = {i for place in places for i in range(place, place + size)}
        assert covered == set(range(extent))
        assert places == sorted(set(places))
    assert profile(8).min() > 0
    assert np.array_equal(profile(9), profile(9)[::-1])


def test_an_answer_in_full_on_every_rank() -> None:
    """As a server or one of MONAI's evaluators asks."""
    x = np.stack([volumes()[1], volumes()[1][:, ::-1]])
    wanted = np.stack([one_pass(sample.copy()) for sample in x])

    def both(comm: Comm) -> tuple[Tensor, Tensor]:
        module = module_of(comm)
        given = torch.from_numpy(x.copy())
        return answer(module, given), answer(module, given, reduce="argmax")

    for logits, labels in run_threads(3, both):
        np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-5, atol=1e-6)
        assert np.array_equal(labels.numpy(), wanted.argmax(1))


def test_ranks_that_see_other_samples_never_mix_them(tmp_path: Path) -> None:
    """A rank that cannot read a sample groups the others as those that can."""
    _, network = trained()
    volume = volumes()[1]
    samples = [volume + number for number in range(4)]

    def both(comm: Comm) -> None:
        graph = fuse(network.graph.rebatch(2))
        plan = random_plan(graph, comm.size, 0, "boxes", lambda configs: max(configs, key=lambda c: c["d"]))
        module = load(plan, network, comm=comm, dtype=torch.float64)
        mine = [object(), *samples[1:]] if comm.rank else samples
        with pytest.raises(LayerwiseError, match="samples failed"):
            predict(module, mine, tmp_path / "a")

    run_threads(2, both, timeout_s=60)
    written = list((tmp_path / "a").glob("*.npy"))
    assert {path.stem for path in written} >= {"sample_00002", "sample_00003"}
    for path in written:
        wanted = one_pass(samples[int(path.stem[-1])])
        np.testing.assert_allclose(np.load(path), wanted, rtol=1e-5, atol=1e-6)


def test_what_was_in_training_is_so_again(tmp_path: Path) -> None:
    module = module_of(SoloComm()).train()
    norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm3d))
    norm.eval()
    predict(module, [volumes()[1]], tmp_path / "a")
    assert module.training
    assert not norm.training


def test_labels_that_do_not_fit_are_refused() -> None:
    out = np.zeros((1, 16, 16, 16), np.uint8)
    with pytest.raises(LayerwiseError, match="contains 300"):
        predict(
            module_of(SoloComm()), [volumes()[1]], out,
            reduce=lambda y: torch.full_like(y[:, 0], 300, dtype=torch.int32),
        )  # fmt: skip
    assert not out.any()


def test_results_are_called_so_that_files_are_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a/x-0.5mm.npy", "a/x-0.7mm.npy", "b/x-0.5mm.npy")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        np.save(file, volumes()[1])
    done = predict(module_of(SoloComm()), [str(file) for file in files], tmp_path / "out")
    assert done.written == ("a_x-0.5mm", "a_x-0.7mm", "b_x-0.5mm")


class Two(nn.Module):
    """Takes an image, another of its extents, and numbers of the sample as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(2, 4, 2, stride=2)
        self.up, self.of_all = nn.ConvTranspose3d(4, 4, 2, stride=2), nn.Linear(3, 4)

    def forward(self, x: Tensor, other: Tensor, numbers: Tensor) -> Tensor:
        made: Tensor = torch.relu(self.first(x)) + self.up(torch.relu(self.second(other)))
        return made * self.of_all(numbers)[:, :, None, None, None]


@pytest.mark.parametrize("window", [None, (8, 6, 8)])
def test_several_inputs(window: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Padded, mirrored and cut into windows alike; what has no positions goes to every window in full."""
    torch.manual_seed(0)
    model, rng, shape = Two().double().eval(), np.random.default_rng(0), (13, 9, 16)
    samples = [rng.normal(size=(1, *each)) for each in ((1, *shape), (2, *shape), (3,))]

    def run_rank(comm: Comm) -> Predicted:
        options = layerwise.ParallelOptions(comm=comm, io="boxes", measure_s=0, verbose=False)
        example = tuple(torch.zeros(1, *each, dtype=torch.float64) for each in ((1, 8, 8, 8), (2, 8, 8, 8), (3,)))
        made = layerwise.parallelize(
            copy.deepcopy(model), example, strategy={"first": {"d": comm.size}}, inference=True,
            options=options,
        )  # fmt: skip
        loader = layerwise.BoxLoader(made, *samples)
        return predict(made, loader, tmp_path / "a", window=window, mirror="w")

    run_threads(2, run_rank)

    @torch.no_grad()
    def one(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The mean of both ways, of extents that are padded to even ones on both sides."""
        rest = [n % 2 for n in images.shape[1:]]
        padded = np.pad(images, [(0, 0), *((r // 2, r - r // 2) for r in rest)])[None]
        parts = padded[:, :1], padded[:, 1:]
        made = [
            np.flip(model(*(torch.from_numpy(np.flip(p, way).copy()) for p in parts), given).numpy(), way)
            for way in ((), (4,))
        ]
        inside = tuple(slice(r // 2, r // 2 + n) for r, n in zip(rest, images.shape[1:], strict=True))
        result: np.ndarray[Any, Any] = (sum(made) / 2)[(0, slice(None), *inside)]
        return result

    given, images = torch.from_numpy(samples[2]), np.concatenate([samples[0][0], samples[1][0]])
    check(tmp_path / "a", [one(images) if window is None else in_windows(images, window, 0.5, one)])


def test_functions_are_told_apart() -> None:
    def above(limit: float) -> Callable[[Tensor], Tensor]:
        return lambda y: y > limit

    every = [
        nn.Softmax(1),
        nn.Softmax(2),
        nn.Sigmoid(),
        above(0.1),
        above(0.2),
        lambda y: y.sum(1),
        lambda y: y.amax(1),
        torch.abs,
    ]
    assert len({str(_named(reduce)) for reduce in every}) == len(every)
    assert _named(above(0.1)) == _named(above(0.1))
