"""Damaged files, fed to what reads them: each is taken, or refused in one sentence, within 20 s and 4 GB.

    python -m benchmarks.fuzz                        # 20,000 inputs, some 15 minutes on two cores
    python -m benchmarks.fuzz --count 1000 --only plan,onnx --seed 7

A file that layerwise (or PyTorch) wrote is changed in some bytes, cut, lengthened, or, where it is JSON, in some of its
values. A process of its own reads it: a traceback, another exit code than 0 and 2, a killed process or a file that is
left half written is a failure, which is kept in --out. The seed says all: the same inputs come again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import zarr
from safetensors.torch import save_file

from layerwise.checkpoint.save_and_load import save
from layerwise.cli import run_main
from layerwise.comm.solo import SoloComm
from layerwise.commands import explain, export
from layerwise.errors import LayerwiseError
from layerwise.machine import load as load_profile
from layerwise.machine import save as save_profile
from layerwise.oracle.__main__ import main as oracle
from layerwise.plan import load_plan
from layerwise.run.load import load
from layerwise.search.__main__ import main as search
from layerwise.search.report.traces import read_trace
from layerwise.tensorfile import weights_file
from layerwise.volumes.sources import source_of

LIMIT_S, LIMIT_BYTES = 20, 4 << 30
ODD = (None, True, -1, 0, 1, 2**31, 2**63, -0.5, 1e308, "", "\u202e\x1b[2J", "../../etc/passwd", [], {}, [[]] * 3)
_ORACLE = ("lenet5", "--gpus", "4,8", "--profile", "p100")
SEARCHED = ("--gpus", "2", "--effort", "quick", "--global-batch", "4")


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    seed: makes a sound one in a folder, and returns its file or folder; read: what a user does.
    """

    seed: Callable[[Path], Path]
    read: Callable[[Path], object]


def _plan(folder: Path) -> Path:
    search(["lenet5", *SEARCHED, "--profile", "cpu", "--gpus-per-node", "2", "--out", str(folder / "plan.json")])
    return folder / "plan.json"


def _profile(folder: Path) -> Path:
    save_profile(load_profile("p100"), folder / "machine.json")
    return folder / "machine.json"


def _onnx(folder: Path) -> Path:
    """By onnx's own helpers: torch's exporter is not needed to use layerwise."""
    float_, helper = onnx.TensorProto.FLOAT, onnx.helper
    draw = np.random.default_rng(0).standard_normal
    weights = {"w": draw((4, 2, 3, 3)), "b": draw(4), "v": draw((4 * 8 * 8, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    stored = [onnx.numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()]
    ends = (
        [helper.make_tensor_value_info("x", float_, ["n", 2, 8, 8])],
        [helper.make_tensor_value_info("y", float_, ["n", 3])],
    )
    model = helper.make_model(helper.make_graph(nodes, "g", *ends, stored))
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def _weights(folder: Path) -> Path:
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def _checkpoint(folder: Path) -> Path:
    module = load(load_plan(_plan(folder)), comm=SoloComm(torch.device("cpu")))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return save(folder / "steps", module, optimizer, {})


def _npy(folder: Path) -> Path:
    np.save(folder / "volume.npy", np.arange(240, dtype=np.float32).reshape(2, 4, 5, 6))
    return folder / "volume.npy"


def _zarr(folder: Path) -> Path:
    array = zarr.open(str(folder / "volume.zarr"), mode="w", shape=(2, 4, 6), chunks=(1, 2, 6), dtype="f4")
    array[...] = 1.0
    return folder / "volume.zarr"


def _array(path: Path) -> object:
    source = source_of(str(path), "x", None, ())
    return source.read(0, tuple(slice(0, extent) for extent in source.shape(0)))


def _measured(folder: Path) -> Path:
    runs = [{"strategy": name, "gpus": 4, "batch": 64, "iteration_s": [0.2, 0.21]} for name in ("data", "filter")]
    (folder / "runs.json").write_text(json.dumps({"runs": [*runs, {**runs[0], "gpus": 8, "iteration_s": 0.1}]}))
    return folder / "runs.json"


def _trace(folder: Path) -> Path:
    search(["lenet5", *SEARCHED, "--profile", "cpu", "--timeline", str(folder / "trace.json")])
    return folder / "trace.json"


KINDS: Mapping[str, Kind] = {
    "plan": Kind(_plan, lambda path: explain.main([str(path), "classifier.0"])),
    "profile": Kind(_profile, lambda path: search(["lenet5", *SEARCHED, "--profile", str(path)])),
    "onnx": Kind(_onnx, lambda path: search([str(path), *SEARCHED])),
    "safetensors": Kind(_weights, lambda path: dict(weights_file(path))),
    "checkpoint": Kind(_checkpoint, lambda path: export.main([str(path), f"{path}.safetensors"])),
    "npy": Kind(_npy, _array),
    "zarr": Kind(_zarr, _array),
    "measured": Kind(_measured, lambda path: oracle([*_ORACLE, "--measured", str(path)])),
    "trace": Kind(_trace, read_trace),
}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with some values, or some bytes, changed."""
    if content[:1] in b"{[" and draw.random() < 0.7:
        with contextlib.suppress(ValueError):
            value = json.loads(content)
            for _ in range(draw.choice((1, 1, 1, 2, 4))):
                _change(value, draw)
            return json.dumps(value).encode(errors="surrogatepass")
    changed, size = bytearray(content), max(len(content), 1)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, many = draw.randrange(size), draw.choice((1, 1, 4, 64))
        how = draw.randrange(5)
        if how == 0:
            changed[at : at + 1] = bytes([draw.randrange(256)])
        elif how == 1:
            changed[at : at + 1] = bytes([(changed[at] if at < len(changed) else 0) ^ 1 << draw.randrange(8)])
        elif how == 2:
            del changed[at : at + many]
        elif how == 3:
            changed[at:at] = changed[at // 2 : at // 2 + many]
        else:
            del changed[at:]
    return bytes(changed)


def _change(value: Any, draw: random.Random) -> None:
    """Changes, removes or moves one value inside."""
    while isinstance(value, (dict, list)) and value:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
            value = inner
            continue
        how = draw.randrange(4)
        if how == 0:
            del value[key]
        elif how == 1 and type(inner) in (int, float):
            value[key] = inner * draw.choice((-1, 0, 2, 1000, 1e30))
        elif how == 2:
            value[key] = value[draw.choice(keys)]
        else:
            value[key] = draw.choice(ODD)
        return


def tried(kind: Kind, seed: Path, place: Path, draw: random.Random | None) -> str:
    """What came of one input: "taken", "refused", or what is wrong. draw: None leaves it as it is."""
    target = place / seed.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (shutil.copytree if seed.is_dir() else shutil.copyfile)(seed, target)
    files = sorted(path for path in target.rglob("*") if path.is_file()) if seed.is_dir() else [target]
    if draw is not None:
        victim = draw.choice(files)
        victim.write_bytes(mutated(victim.read_bytes(), draw))
    said = place / "said"
    child = os.fork()
    if child == 0:
        _read(kind, target, said)
    begun = time.monotonic()
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() - begun > LIMIT_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"more than {LIMIT_S} s"
        time.sleep(0.002)
    code, text = os.waitstatus_to_exitcode(ended[1]), said.read_text(errors="replace")
    if code not in (0, 2) or "Traceback" in text:
        return f"exit {code}: " + (text.strip().splitlines() or ["nothing said"])[-1][:200]
    if left := [path.name for path in place.iterdir() if path.name not in (target.name, "said", _out(target))]:
        return f"left behind: {left[0]}"
    return "taken" if code == 0 else "refused"


def _out(target: Path) -> str:
    return f"{target.name}.safetensors"


def _read(kind: Kind, target: Path, said: Path) -> None:
    """In a child process, which ends here."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    code = 1
    try:
        code = run_main(lambda _: (kind.read(target), 0)[1])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def one(folder: Path, seeds: Mapping[str, Path], seed: int, number: int) -> tuple[int, str, str]:
    """The number, kind and end of one input."""
    kind = list(seeds)[number % len(seeds)]
    draw = random.Random(f"{seed} {number}")
    return number, kind, tried(KINDS[kind], seeds[kind], folder / str(number), draw)


def main() -> int:
    """Tries --count inputs; exit code 1 if any failed."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--count", type=int, default=20_000, help="inputs in all (default: 20,000)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    p.add_argument("--out", type=Path, default=Path("build/fuzz"), help="where failures are kept")
    p.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = p.parse_args()
    kinds = args.only.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise LayerwiseError(f"there is no kind {unknown[0]!r}: choose of {', '.join(KINDS)}")
    torch.set_num_threads(1)
    counts, failures = {kind: Counter[str]() for kind in kinds}, list[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        seeds = {}
        for kind in kinds:
            place = Path(folder) / "seeds" / kind
            place.mkdir(parents=True)
            seeds[kind] = KINDS[kind].seed(place)
            if (sound := tried(KINDS[kind], seeds[kind], Path(folder) / "sound", None)) != "taken":
                said = (Path(folder) / "sound" / "said").read_text()
                raise LayerwiseError(f"the {kind} that is to be changed is {sound} itself: {said}")

        try_one = partial(one, Path(folder), seeds, args.seed)
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
            for number, kind, result in pool.imap(try_one, range(args.count)):
                place = Path(folder) / str(number)
                if result in ("taken", "refused"):
                    counts[kind][result] += 1
                else:
                    counts[kind]["failed"] += 1
                    failures.append(f"{kind} {number}: {result}")
                    shutil.copytree(place, args.out / f"{kind}-{args.seed}-{number}", dirs_exist_ok=True)
                shutil.rmtree(place, ignore_errors=True)
    for kind, count in counts.items():
        print(f"{kind:12} taken {count['taken']:6,}  refused {count['refused']:6,}  failed {count['failed']:4,}")
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(run_main(lambda _: main()))
