"""Laws of io "boxes": ranks read only what they need, and together they train as one device does on whole volumes."""

import copy
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.inference.predict import predict
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from layerwise.volumes.loader import BoxLoader
from layerwise.volumes.sources import source_of
from tests.comm.thread import run_threads
from tests.run.plans import priced, random_plan
from tests.volumes.networks import EXTENT, samples, segments

pytestmark = pytest.mark.usefixtures("models_traced_once")

AUGMENTED: dict[str, Any] = {
    "crop": "random",
    "flip": "dhw",
    "shuffle": True,
    "seed": 3,
    "intensity": lambda box, rng: box * rng.uniform(0.5, 1.5) + rng.normal(),
}


def spatial(batch: int, ranks: int, *, loss: bool = True) -> Plan:
    """Every layer cut along d, as far as it goes."""
    graph = segments(batch, loss=loss)[2]
    plan = random_plan(graph, ranks, 0, "boxes", choose=lambda configs: max(configs, key=lambda c: (c["d"], -c.total)))
    return priced(plan, graph)


def trained(module: ParallelModule, batches: BoxLoader) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        for inputs in batches:
            optimizer.zero_grad()
            loss = module(*inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, module.full_state_dict()


@pytest.mark.parametrize(("seed", "ranks"), [(0, 2), (1, 3), (2, 4)])
def test_any_plan_trains_as_one_device_does(seed: int, ranks: int) -> None:
    """Cropped, mirrored, scaled: the samples are the same whatever is split, and so is all that follows."""
    _, network, graph = segments(2)
    x, target = samples(4, EXTENT + 5)

    def run(comm: Comm) -> tuple[list[float], dict[str, Tensor]]:
        plan = random_plan(graph, comm.size, seed, "boxes")
        module = load(plan, network, comm=comm, dtype=torch.float64)
        return trained(module, BoxLoader(module, x, target, **AUGMENTED))

    losses, state = run(SoloComm())
    assert len(set(losses)) == 4
    for mine, held in run_threads(ranks, run):
        assert mine == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(held[name], value, rtol=1e-9, atol=1e-9)


class Counting:
    """An array that knows what was read of it: the largest piece, and every element."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape = array, array.shape
        self.largest, self.elements = defaultdict[int, int](int), defaultdict[int, int](int)

    def __getitem__(self, index: tuple[Any, ...]) -> NDArray[Any]:
        read = self.array[index]
        self.largest[0] = max(self.largest[0], read.size)
        self.elements[0] += read.size
        return read


def test_no_rank_reads_or_makes_a_whole_volume() -> None:
    """One sample on four ranks: each reads a quarter of it and a halo, and no tensor of it is larger."""
    _, network, _ = segments(1)
    plan, whole = spatial(1, 4), EXTENT**3

    def run(comm: Comm) -> tuple[int, int, int]:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        x, target = (Counting(array) for array in samples(1))
        (inputs,) = BoxLoader(module, x, target)
        module(*inputs).backward()
        return x.largest[0], target.largest[0], max(t.numel() for t in inputs)

    for read, classes, held in run_threads(4, run):
        assert 0 < read <= whole * 9 / EXTENT  # 6 or 7 of 26 slices, and two of a halo
        assert 0 < classes <= whole * 8 / EXTENT  # two slices are a part
        assert held == max(read, classes)


class Guard(TorchDispatchMode):
    """The most positions that a tensor made within it has: its three longest dimensions, or all of fewer.

    Tensors of a trace, and one number seen as many, take no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and not isinstance(t, FakeTensor) and t.untyped_storage().nbytes() >= t.nbytes:
                flat = t.dim() == 4 and t.shape[2] == 1  # (n, classes, 1, positions), as torch's cross entropy has them
                self.most = max(self.most, t.shape[3] if flat else math.prod(sorted(t.shape)[-3:]))
        return made


@pytest.mark.parametrize("loss", [True, False])
def test_no_rank_allocates_a_whole_volume(loss: bool, tmp_path: Path) -> None:
    """Of a step, from reading to the optimizer, and of a prediction: inputs, outputs, all between, and gradients."""
    _, network, _ = segments(1, loss=loss)
    x, target = samples(1)
    np.save(tmp_path / "x.npy", x)

    def run(comm: Comm) -> int:
        module = load(spatial(1, comm.size, loss=loss), network, comm=comm, dtype=torch.float64)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loader = BoxLoader(module, tmp_path / "x.npy", *[target][: int(loss)])
        with Guard() as guard:
            if loss:
                for inputs in loader:
                    module(*inputs).backward()
                optimizer.step()
            else:
                predict(module, loader, tmp_path / "out.npy")
        return guard.most

    assert run(SoloComm()) >= EXTENT**3  # which the guard sees
    for most in run_threads(4, run):
        assert 0 < most <= EXTENT**3 * 10 / EXTENT  # 6 or 7 of 26 slices with a halo of both sides, or of two parts


def test_what_is_read_is_the_box() -> None:
    x, target = samples(2, EXTENT)
    _, network, graph = segments(2)
    module = load(random_plan(graph, 1, 0, "boxes"), network, comm=SoloComm(), dtype=torch.float64)
    ((mine, classes),) = BoxLoader(module, x, target)
    assert torch.equal(mine, torch.from_numpy(x))
    assert torch.equal(classes, torch.from_numpy(target))
    flipped = [t for t, _ in BoxLoader(module, x, target, flip="w", seed=1)]
    for given, read in zip(torch.from_numpy(x), flipped[0], strict=True):
        assert torch.equal(read, given) != torch.equal(read, given.flip(-1))


def test_crops_are_parts_of_the_samples() -> None:
    """The same of all inputs; in the middle, or anywhere, and another one in another epoch."""
    x, _ = samples(2, EXTENT + 6)
    target = np.where(x[:, 0] > 0, 2, 0)  # so that it tells whether it is cut alike
    _, network, graph = segments(2)
    module = load(random_plan(graph, 1, 0, "boxes"), network, comm=SoloComm(), dtype=torch.float64)
    middle = slice(3, 3 + EXTENT)
    ((mine, classes),) = BoxLoader(module, x, target, crop="center")
    assert torch.equal(mine, torch.from_numpy(x[:, :, middle, middle, middle]))
    loader = BoxLoader(module, x, target, crop="random")
    epochs = [next(iter(loader)) for _ in range(3)]
    for mine, classes in epochs:
        assert torch.equal(classes == 2, mine[:, 0] > 0)
        assert all(np.isin(part.numpy(), whole).all() for part, whole in zip(mine, x, strict=True))
    assert not torch.equal(epochs[0][0], epochs[1][0])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, object]:
    x, target = samples(2)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "t.npy", target)
    for i in range(2):
        np.save(tmp_path / f"x{i}.npy", x[i])
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["images"] = x
    zarr.save(str(tmp_path / "x.zarr"), x)
    return {
        "hdf5": f"{tmp_path / 'all.h5'}::images",
        "zarr": tmp_path / "x.zarr",
        "file": str(tmp_path / "x.npy"),
        "files": [tmp_path / f"x{i}.npy" for i in range(2)],
        "function": lambda index, slices: x[index][slices],
        "array": x,
        "target": tmp_path / "t.npy",
    }


@pytest.mark.parametrize("kind", ["file", "files", "function", "array", "hdf5", "zarr"])
def test_where_samples_lie(kind: str, files: dict[str, object]) -> None:
    _, network, graph = segments(2)
    module = load(random_plan(graph, 1, 0, "boxes"), network, comm=SoloComm(), dtype=torch.float64)
    ((x, target),) = BoxLoader(module, files[kind], files["target"], samples=2, workers=int(kind in ("file", "hdf5")))
    assert torch.equal(x, torch.from_numpy(samples(2)[0]))
    assert target.dtype == torch.int64


Wrong = tuple[tuple[object, ...], dict[str, Any], str]  # sources, options, what is said


def wrong(x: NDArray[Any], target: NDArray[Any], path: Path) -> dict[str, Wrong]:
    nan = x.copy()
    nan[1, 0, 3, 3, 3] = np.nan
    (path / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    (path / "text.npy").write_text("no array")
    (path / "empty.npy").write_text("")
    zarr.save(str(path / "whole.zarr"), x)
    np.save(path / "short.npy", x)
    data = (path / "short.npy").read_bytes()
    (path / "short.npy").write_bytes(data[: len(data) // 2])
    np.save(path / "whole.npy", x)
    np.save(path / "x0.npy", x[0])
    np.save(path / "nan.npy", nan)
    worse = target.copy()
    worse[1, 2, 3, 4] = 7
    with h5py.File(path / "all.h5", "w") as file:
        file["deep/x"] = x
        file["x"] = x
    data = (path / "all.h5").read_bytes()
    (path / "short.h5").write_bytes(data[: len(data) // 2])
    zarr.save(str(path / "short.zarr"), x)
    chunks = [one for one in (path / "short.zarr").rglob("*") if one.is_file() and one.name[0] in "01"]
    max(chunks).write_bytes(max(chunks).read_bytes()[:9])
    return {
        "one input": ((x,), {}, "takes 2 inputs"),
        "counts": ((x, target[:1]), {}, "have 1 and 2 samples"),
        "smaller": ((x[:, :, :20], target), {}, "sample 0 has shape"),
        "larger": ((np.pad(x, ((0, 0),) * 4 + ((0, 2),)), target), {}, "crop= cuts larger ones"),
        "one larger": ((np.pad(x, ((0, 0),) * 4 + ((0, 2),)), target), {"crop": "center"}, "input 'target', sample 0"),
        "nan": ((path / "nan.npy", target), {}, "nan.npy') has values that are not finite in float64"),
        "types": ((x, target * 1.5), {}, "sample 0 is float64, but the model takes int64"),
        "wide": ((x, target.astype(np.uint64) + np.uint64(2**63)), {}, "int64, which cannot hold them"),
        "missing": ((path / "none.npy", target), {}, "does not exist"),
        "broken": ((path / "broken.npy", target), {}, "broken.npy' cannot be read"),
        "empty": ((path / "empty.npy", target), {}, f"file '{path}/empty.npy' cannot be read: it is not in"),
        "name in an array": ((f"{path / 'whole.zarr'}::x", target), {}, "whole.zarr::x' cannot be read"),
        "gradient": ((torch.from_numpy(x).requires_grad_(), target), {}, "input 'x', sample 0: Can't call numpy()"),
        "bfloat16": ((torch.from_numpy(x).bfloat16(), target), {}, "input 'x', sample 0: Got unsupported"),
        "text": ((path / "text.npy", target), {}, "text.npy' cannot be read: it is not in numpy's format"),
        "truncated": ((path / "short.npy", target), {}, "short.npy' cannot be read"),
        "kind": ((path / "x.txt", target), {}, "x.txt'"),
        "function": ((lambda i, s: x[i][s], target), {}, "pass the number of samples"),
        "flip": ((x, target), {"flip": "z"}, "'z' is not one of"),
        "flip of none": ((x, target), {"flip": "s"}, "'s' is not one of d, h, w"),
        "crop": ((x, target), {"crop": "middle"}, "crop is 'middle'; it must be 'random', 'center' or None"),
        "class": (
            (path / "whole.npy", worse),
            {},
            "input 'target', sample 1 has class 7, but the model accepts 0 to 2",
        ),
        "infinite": ((x, target), {"intensity": lambda box, rng: box + np.inf}, "not finite in float64"),
        "intensity": (
            (x, target),
            {"intensity": lambda box, rng: box[0]},
            "what intensity makes of input 'x', sample 0",
        ),
        "raising": (([path / "x0.npy", path / "none.npy"], target), {}, "input 'x', sample 1: file"),
        "group": ((f"{path / 'all.h5'}::deep", target), {}, "all.h5::deep' contains a Group"),
        "no array": (("x", target), {}, "'x' does not exist"),
        "items": (([3, 4], target), {}, "input 'x', sample 0 is of type int"),
        "own": ((lambda i, s: x[i + 9][s], target), {"samples": 2}, "sample 0: its function raised IndexError"),
        "short h5": ((f"{path / 'short.h5'}::x", target), {}, "short.h5::x' cannot be read"),
        "short zarr": ((path / "short.zarr", target), {}, "short.zarr', sample 1"),
        "few": ((x[:1], target[:1]), {}, "1 samples are fewer than a batch of 2"),
        "number": ((3, target), {}, "is of type int"),
    }


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    _, network, graph = segments(2)
    module = load(random_plan(graph, 1, 0, "boxes"), network, comm=SoloComm(), dtype=torch.float64)
    assert module.output_boxes()[0] == Box((), ())  # the loss
    (tmp_path / "x.txt").write_text("")
    for name, (sources, options, said) in wrong(*samples(2), tmp_path).items():
        for workers in (0, 1) if name == "nan" else (0,):
            with pytest.raises(LayerwiseError) as caught:
                list(BoxLoader(module, *sources, workers=workers, **options))
            assert said in str(caught.value), name
            assert str(caught.value).count("cannot be read") <= 1, name
            assert "\n" not in str(caught.value), name


def deepest(configs: Sequence[Config]) -> Config:
    return max(configs, key=lambda c: (c["d"], -c.total))


@pytest.mark.parametrize("kind", ["file", "array", "zarr"])
def test_ranks_write_their_boxes(kind: str, tmp_path: Path) -> None:
    model, network, graph = segments(2, loss=False)
    x, _ = samples(4)
    shape = (4, 3, *(EXTENT,) * 3)
    written: Any = np.zeros(shape)
    choose = None
    if kind == "zarr":  # a chunk a slice, of which no two ranks have a part where depth is split
        chunks = (1, 3, 1, EXTENT, EXTENT)
        written = zarr.create_array(tmp_path / "out.zarr", shape=shape, chunks=chunks, dtype="f4")
        choose = deepest
    out = tmp_path / "out.npy" if kind == "file" else written

    def run(comm: Comm) -> list[object]:
        module = load(random_plan(graph, comm.size, 5, "boxes", choose), network, comm=comm, dtype=torch.float64)
        predict(module, BoxLoader(module, x), out)
        return list(module.output_boxes())

    boxes = run_threads(3, run)
    assert sum(box.volume for (box,) in boxes if box is not None) == math.prod(shape) / 2
    found = np.load(tmp_path / "out.npy") if kind == "file" else written[:]
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_an_older_prediction_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    """Where predict is killed nothing else is done: what is at the path meanwhile is what would be there then."""
    _, network, graph = segments(2, loss=False)
    x, _ = samples(4)
    out = tmp_path / "out.npy"
    np.save(out, np.ones(3))
    found: list[Any] = []

    def look(box: Tensor) -> Tensor:
        found.append(np.load(out).tolist())
        return box

    def run(comm: Comm) -> None:
        module = load(random_plan(graph, comm.size, 5, "boxes"), network, comm=comm, dtype=torch.float64)
        predict(module, BoxLoader(module, x), out, reduce=look)

    run_threads(2, run)
    assert found
    assert found == [[1.0] * 3] * len(found)
    assert np.load(out).shape == (4, 3, *(EXTENT,) * 3)
    assert list(tmp_path.iterdir()) == [out]


def flipped_headers(folder: Path) -> Iterator[Path]:
    """A .npy with each of its header's bits the other way."""
    np.save(folder / "good.npy", np.zeros((3, 4)))
    good = (folder / "good.npy").read_bytes()
    for bit in range(128 * 8):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        (folder / "bad.npy").write_bytes(content)
        yield folder / "bad.npy"


def forged_zarrs(folder: Path) -> Iterator[Path]:
    """Zarr arrays of both formats whose descriptions are odd."""
    for version, file in ((2, ".zarray"), (3, "zarr.json")):
        array = folder / f"{version}.zarr"
        zarr.create_array(array, shape=(3, 4), chunks=(1, 4), dtype="f4", zarr_format=version)[:] = 1
        text = (array / file).read_text()
        described = json.loads(text)
        texts = ["[]", "null", "", "3", *(json.dumps(described | {k: v}) for k in described for v in (None, [], 0))]
        grid = re.sub(r'("chunks"|"chunk_shape"): *\[\s*1,', r"\1: [0,", text)
        for one in (*texts, grid, *(text.replace("3", n, 1) for n in ("-3", "1e300", str(2**70)))):
            (array / file).write_text(one)
            yield array


@pytest.mark.parametrize("files", [flipped_headers, forged_zarrs])
def test_a_file_whose_header_is_damaged_is_read_or_refused(
    files: Callable[[Path], Iterator[Path]], tmp_path: Path
) -> None:
    refused: list[bool] = []
    for path in files(tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                source = source_of(path, "x", None, (4,))
                assert len(source) >= 0
                source.read(0, (slice(0, 2),))
            except LayerwiseError as error:
                refused.append(str(path) in str(error))
    assert len(refused) > 20
    assert all(refused)


def test_what_predict_refuses(tmp_path: Path) -> None:
    _, network, graph = segments(2, loss=False)
    x, _ = samples(3)
    module = load(random_plan(graph, 1, 0, "boxes"), network, comm=SoloComm(), dtype=torch.float64)
    whole, shape = x[:2], (3, *(EXTENT,) * 3)
    zarr.create_array(tmp_path / "a.zarr", shape=(2, *shape), chunks=(1, *shape), dtype="f4")
    read_only = zarr.open_array(tmp_path / "a.zarr", mode="r")
    loader = BoxLoader(module, whole)
    refused: list[tuple[BoxLoader, object, str]] = [
        (BoxLoader(module, whole, shuffle=True), tmp_path / "a.npy", "does not shuffle"),
        (BoxLoader(module, whole, flip="d"), tmp_path / "a.npy", "does not shuffle, crop, flip"),
        (loader, tmp_path / "none" / "a.npy", "a.npy' cannot be written"),
        (loader, np.zeros((1, *shape)), "the destination has shape"),
        (loader, np.zeros((2, *shape), np.int32), "predict writes float32, but the destination has int32"),
        (loader, [1], "cannot write into a list"),
        (loader, None, "cannot write into a NoneType"),
        (loader, read_only, "samples from 0 cannot be written: store was opened in read-only"),
    ]
    for samples_of, out, said in refused:
        with pytest.raises(LayerwiseError, match=said):
            predict(module, samples_of, out)
