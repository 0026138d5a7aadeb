"""A user's mistake is one line on stderr and exit code 2, whatever was typed or handed in, and no file is changed."""

import json
import os
import shlex
from pathlib import Path

import onnx
import pytest

from layerwise.errors import LayerwiseError
from tests.cli.commands import MLP, NETWORKS, Run, onnx_file
from tests.train.command import save_plans

NET, SMALL = "mlp:64x48x32x10", "search mlp:64x32x8 --gpus 4"
REFUSED = [
    # search
    ("search vgg61 --gpus 4", "unknown model 'vgg61'; nearest: vgg16"),
    ("search vgg16:3 --gpus 4", "importing 'vgg16' raised ModuleNotFoundError"),
    ("search lenet5", "required: --gpus"),
    ("search --gpus 4", "required: MODEL"),
    ("search lenet5 --gpus 0", "but must be 1 to 65,536"),
    ("search lenet5 --gpus 6 --gpus-per-node 4", "6 GPUs do not fill nodes of 4"),
    ("search lenet5 --gpus 4 --gpus-per-node 0", "at least 1"),
    ("search lenet5 --gpus 4 --batch 0", "global batch is 0"),
    (f"search lenet5 --gpus 4 --global-batch {10**30}", "at most 1,073,741,824"),
    ("search lenet5 --gpus 4 --batch 2 --global-batch 8", "not allowed with"),
    ("search lenet5 --gpus 4 --bogus", "unrecognized arguments: --bogus"),
    ("search lenet5 --gpus 4 --dims n,q", "--dims 'n,q'"),
    ("search lenet5 --gpus 4 --dims ,", "--dims ','"),
    ("search lenet5 --gpus 4 --degrees odd", "invalid choice: 'odd'"),
    ("search lenet5 --gpus 4 --search-memory 0", "'0' is not a number above 0"),
    ("search lenet5 --gpus 4 --search-memory inf", "'inf' is not a number above 0"),
    ("search lenet5 --gpus 4 --input-shape 3xx", "'3xx' is not sizes joined by x"),
    ("search lenet5 --gpus 4 --input-shape 1x32x32", "has its own input shape"),
    ("search lenet5 --gpus 4 --profile h10", "did you mean h100?"),
    ("search lenet5 --gpus 4 --profile p100 --dtype bfloat16", "no peak for dtype 'bf16'"),
    ("search lenet5 --gpus 4 --out missing/plan.json", "cannot be written: No such file"),
    ("search lenet5 --gpus 4 --out /proc/plan.json", "cannot be written"),
    ("search lenet5 --gpus 4 --price missing.json", "cannot be read: No such file"),
    (
        "search lenet5 --gpus 4 --price megatron",
        "'megatron' is neither a file nor one of data, model, owt or, for an MLP, grid:RxC",
    ),
    ("search lenet5 --gpus 4 --price s.json --export-costs c.cfn", "--price does not search"),
    ("search lenet5 --gpus 4 --out p.json --timeline p.json", "name the same file"),
    ("search missing.onnx --gpus 4", "missing.onnx"),
    ("search no.such.module:net --gpus 4", "importing 'no.such.module' raised ModuleNotFoundError"),
    ("search :net --gpus 4", "importing '' raised ValueError"),
    ("search broken_code:net --gpus 4", "raised SyntaxError"),
    ("search quits:net --gpus 4", "raised SystemExit: 5"),
    ("search networks:missing --gpus 4", "module 'networks' has no 'missing'"),
    ("search networks:alone --gpus 4", "returned no example inputs"),
    ("search networks:by_name --gpus 4", "returned a dict of inputs: return a tuple"),
    ("search networks:on_meta --gpus 4", "returned inputs on the meta device and a module with values"),
    ("search networks:number --gpus 4", "returned int, but must return an nn.Module"),
    ("search networks:faulty --gpus 4", "raised RuntimeError: out of luck (" + "{here}/networks.py:19)"),
    ("search networks:leaves --gpus 4", "raised SystemExit: 3"),
    ("search networks:needy --gpus 4", "raised TypeError: needy() missing 1 required"),
    ("search networks:wrong_inputs --gpus 4", "torch.export fails"),
    ("search networks:listed --gpus 4 --input-shape 8", "leave out --input-shape"),
    (f"{SMALL} --memory-limit 24", "--memory-limit is 24, which is 24 bytes: write 24GB or 24GiB, or 24B"),
    ("report one.json --memory-curve 8GB", "--memory-curve is '8GB': give the least and the most, such as 8GB..80GB"),
    (f"{SMALL} --plot c.txt", "must end in .png, .svg, .pdf"),
    (f"{SMALL} --plot missing/c.svg", "cannot be written"),
    (f"{SMALL} --offer swap", "'swap': choose from recompute, shard, joined by commas"),
    (f"{SMALL} --offer ,", "choose from recompute, shard"),
    # grid
    (f"search {NET} --gpus 4 --price grid:2x3", "grid 2x3 has 6 processes, but there are 4 devices: pass --gpus 6"),
    ("search lenet5 --gpus 4 --replicas 3", "4 devices cannot be 3 replicas of equally many"),
    (
        "search lenet5 --gpus 4 --replicas 2 --global-batch 1",
        "a batch of 1 is too small to give each of 2 replicas a sample",
    ),
    (f"search {NET} --gpus 4 --replicas 4 --price grid:2x2", "{n=2, c=2} has samples in common for the 4 replicas"),
    (f"search {NET} --gpus 4 --price grid:two", "grid 'two' must be batch groups x model parts"),
    (f"search {NET} --gpus 4 --price grid:2x2 --export-costs c.cfn", "leave out --export-costs"),
    (f"search {NET} --gpus 4 --price grid:4x1 --global-batch 2", "a batch of 2 samples cannot be split into 4 groups"),
    (
        f"search {NET} --gpus 128 --price grid:1x128",
        "the widest layer has 48 outputs, which cannot be split into 128 parts",
    ),
    ("search lenet5 --gpus 2 --price grid:2x1", "process grids are for MLPs"),
    # run
    ("run two.json", "the plan is for 2 ranks, there is 1: start them with torchrun --nproc-per-node 2"),
    ("run missing.json", "plan 'missing.json' cannot be read"),
    ("run one.json --steps 0", "'0' is not a whole number of at least 1"),
    ("run one.json --steps 3 --epochs 1", "not allowed with"),
    ("run one.json --lr 0", "'0' is not a number above 0"),
    ("run one.json --momentum 1", "'1' is not a number of at least 0 and below 1"),
    ("run one.json --accumulate 1000", "too few for one step with the plan's batch of 8 and --accumulate 1000"),
    ("run one.json --dtype float16", "invalid choice: 'float16'"),
    ("run one.json --resume", "need --checkpoint DIR"),
    ("run one.json --compare", "unrecognized arguments: --compare"),
    ("run one.json --checkpoint-every 3", "need --checkpoint DIR"),
    ("run one.json --checkpoint ''", "--checkpoint is empty: name a folder"),
    ("run one.json --checkpoint a\0b", r"--checkpoint a\x00b: embedded null byte"),
    ("run one.json --checkpoint two.json", "--checkpoint two.json: File exists"),
    ("run one.json --checkpoint two.json/ck", "--checkpoint two.json/ck: Not a directory"),
    ("run one.json --checkpoint ck --data cifar", "unknown data 'cifar'"),
    ("run one.json --checkpoint ck/a --trace missing/t.json", "'missing/t.json' cannot be written"),
    ("run one.json --compare-single --local-batch-norm", "leave out --compare-single"),
    ("run local.json --compare-single", "give --no-local-batch-norm"),
    ("run one.json --trace missing/t.json", "'missing/t.json' cannot be written"),
    ("run one.json --weights missing.safetensors", "weights 'missing.safetensors' cannot be read as safetensors"),
    # oracle
    ("oracle lenet5 --gpus 8 --strategy filter", "filter cannot use 8 devices: at most 6, by layer 'features.0'"),
    ("oracle vgg16 --gpus 128,256 --strategy channel", "at most 64, by layer 'features.2' with 64 input channels"),
    ("oracle lenet5 --gpus 4 --strategy serial", "serial cannot use 4 devices: at most 1"),
    ("oracle lenet5 --gpus 8 --scaling strong --batch 4 --strategy data", "at most 4, by the batch of 4 samples"),
    ("oracle lenet5 --gpus 8 --scaling strong", "needs --batch B"),
    ("oracle lenet5 --gpus 8 --strategy dta", "unknown strategy 'dta' (did you mean 'data'?)"),
    ("oracle lenet5 --gpus 8 --strategy ,", "--strategy ','"),
    ("oracle lenet5 --gpus 2 --strategy df", "at least two groups of two devices"),
    ("oracle mlp:8x8x8 --gpus 4 --strategy spatial", "the model, which has no layer with positions to split"),
    ("oracle lenet5 --gpus 4 --strategy spatial --gather-after features.9", "no layer of this name (did you mean"),
    ("oracle lenet5 --gpus 4 --strategy spatial --spatial-dims h,x", "--spatial-dims 'h,x'"),
    ("oracle lenet5 --gpus 4 --batch 0", "'0' is not a number above 0"),
    ("oracle lenet5 --gpus 4 --max-hours 0", "'0' is not a number above 0"),
    ("oracle lenet5 --gpus 4 --plan plan.json", "pass one --strategy and one number of --gpus"),
    ("oracle lenet5 --gpus 4 --strategy data --plan no/plan.json", "cannot be written"),
    ("oracle lenet5 --gpus 4 --strategy data --plan both.png --plot ./both.png", "name the same file"),
    ("oracle lenet5 --gpus 4 --formulas published", "unrecognized arguments: --formulas published"),
    ("oracle lenet5 --gpus 4 --strategy pipeline --plan plan.json", "pipeline is not a configuration of every layer"),
    ("oracle lenet5 --gpus 4 --plot figure.doc", "must end in .png"),
    ("oracle lenet5 --gpus 4 --plot no/figure.png", "cannot be written"),
    ("oracle lenet5 --gpus 4 --plot a.png --plot-phases a.png", "--plot and --plot-phases name the same file"),
    ("oracle lenet5 --gpus 4 --measured runs.json", "cannot be read"),
    ("oracle lenet5 --gpus 128 --strategy layerwise", "searched for up to 64 GPUs"),
    (f"oracle lenet5 --gpus 4 --batch 1{'0' * 40}", "at most 1,073,741,824 samples a step"),
    (f"oracle lenet5 --gpus 4 --samples 1{'0' * 400}", "is not a number of samples below 10^15"),
    # measure
    ("measure layers vgg61 --gpus 2", "unknown model 'vgg61'"),
    ("measure layers mlp:8x6x4 --gpus 2 --device cuda", "--device cuda: "),
    ("measure layers mlp:8x6x4 --gpus 2 --device tpu", "invalid choice: 'tpu'"),
    ("measure layers mlp:8x6x4 --gpus 2 --budget soon", "'soon' is not a time such as 120s"),
    ("measure layers mlp:8x6x4 --gpus 2 --dtype float16", "--dtype float16: layerwise supports only"),
    ("measure layers mlp:8x6x4 --gpus 2 --dims n,z", "--dims 'n,z': choose from"),
    ("measure layers mlp:8x6x4 --gpus 2 --threads 0", "--threads must be from 1 to"),
    ("measure layers mlp:8x6x4 --gpus 2 --threads 100000000000", "--threads must be from 1 to"),
    ("measure layers mlp:8x6x4 --gpus 0", "but must be 1 to"),
    ("measure layers mlp:8x6x4 --gpus 2 --out none/such/x.json", "cannot be written"),
    ("measure layers", "the following arguments are required"),
]


@pytest.mark.parametrize(("line", "reason"), REFUSED, ids=[line[:80] for line, _ in REFUSED])
def test_one_line_says_what_is_wrong(
    refuse: Run, here: Path, line: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (here / "networks.py").write_text(NETWORKS)
    (here / "broken_code.py").write_text("def net(:")
    (here / "quits.py").write_text("raise SystemExit(5)")
    if line.startswith("run"):
        save_plans(here)
    machine = ["--profile", "v100"] if line.startswith("oracle") and "--profile" not in line else []
    assert reason.replace("{here}", str(here)) in refuse(*shlex.split(line), *machine)


LONG = "a" * 50_000


ENDLESS = [
    f"search {LONG} --gpus 2",
    f"search {LONG}.onnx --gpus 2",
    f"search lenet5 --gpus {LONG}",
    f"search lenet5 --gpus 2 --dims {LONG}",
    f"search lenet5 --gpus 2 --profile {LONG}",
    f"search lenet5 --gpus 2 --{LONG}",
    f"search lenet5 --gpus 2 --out {LONG}",
    f"export {LONG} out.safetensors",
    f"explain key.json {LONG}",
    f"{LONG}",
]


@pytest.mark.parametrize("line", ENDLESS, ids=[line[:40] for line in ENDLESS])
def test_an_error_does_not_repeat_what_is_too_long(line: str, refuse: Run, here: Path) -> None:
    (here / "key.json").write_text(json.dumps({"format": "layerwise-plan " + LONG}))
    error = refuse(*line.split())
    assert len(error) < 800
    assert "characters)…a" in error
    assert "a" * 201 not in error


def test_a_sentence_between_two_quotations_is_not_cut() -> None:
    own = " is what PyTorch's loop is told, at some length" * 6
    for text in (f"parameter 'fc.bias'{own}, strategy='data'", f'layer "fc"{own}, the layers\' "data" and \'fc\''):
        assert str(LayerwiseError(text)) == text
    assert len(str(LayerwiseError(f"model ('{'a b ' * 100}'){own}: take 'fc'"))) < len(own) + 320


def test_a_path_of_255_characters_is_readable(refuse: Run) -> None:
    path = "/" + "/".join("folder" for _ in range(35)) + "/plan.json"
    assert len(path) == 255
    assert repr(path) in refuse("explain", path, "fc")


def test_what_is_too_long_has_spaces(refuse: Run) -> None:
    error = refuse("search", "a " * 50_000, "--gpus", "2")
    assert len(error) < 800
    assert "; there are " in error


def test_empty_names(refuse: Run) -> None:
    assert "cannot be written" in refuse(*MLP, "--out", "")
    assert "cannot be read" in refuse(*MLP, "--price", "")
    assert "unknown model" in refuse("search", "", "--gpus", "4")
    assert "unknown profile" in refuse(*MLP, "--profile", "")
    assert "unknown model 'a\\n\\nb'" in refuse("search", "a\n\nb", "--gpus", "4")


def test_unknown_command(refuse: Run) -> None:
    assert "unknown command 'serach' (did you mean 'search'?); there are search, fits, explain, report" in refuse(
        "serach"
    )


@pytest.mark.parametrize("data", [b"", b"not a model", b"PK\x03\x04 broken", b"\x80\x04."])
def test_corrupt_model(refuse: Run, here: Path, data: bytes) -> None:
    (here / "net.onnx").write_bytes(data)
    assert "net.onnx" in refuse("search", "net.onnx", "--gpus", "4")
    (here / "dir.onnx").mkdir()
    assert "dir.onnx" in refuse("search", "dir.onnx", "--gpus", "4")


@pytest.mark.parametrize("suffix", [".pt2", ".pt", ".pth"])
def test_files_that_pytorch_unpickles_are_not_opened(refuse: Run, suffix: str) -> None:
    assert "or export it as .onnx" in " ".join(refuse("search", f"net{suffix}", "--gpus", "4").split())


def test_unsupported_onnx(refuse: Run, run: Run, here: Path) -> None:
    onnx_file(here / "good.onnx", "Relu", ["batch", 8])
    assert json.loads(run("search", "good.onnx", "--gpus", "2", "--json"))["strategy"]
    onnx_file(here / "odd.onnx", "Wobble", ["batch", 8], domain="acme")
    assert "Wobble" in refuse("search", "odd.onnx", "--gpus", "4")
    onnx_file(here / "new.onnx", "Relu", ["batch", 8], opset=onnx.defs.onnx_opset_version() + 50)
    assert "opset" in refuse("search", "new.onnx", "--gpus", "4")
    onnx_file(here / "open.onnx", "Relu", ["batch", "width"])
    assert "width" in refuse("search", "open.onnx", "--gpus", "4")


def test_an_onnx_model_of_one_identity_has_nothing_to_plan(refuse: Run, here: Path) -> None:
    onnx_file(here / "same.onnx", "Identity", ["batch", 8])
    assert "computes nothing from its inputs" in refuse("search", "same.onnx", "--gpus", "2")
    onnx_file(here / "turned.onnx", "Transpose", ["batch", 8, 8])
    for more in ([], ["--json"]):
        assert "nothing to plan" in refuse("search", "turned.onnx", "--gpus", "2", *more)


STRATEGIES = [
    ("{", "is not JSON"),
    ("[]", "must be a JSON object"),
    ('{"0": {"n": 4}, "2": {"n": 4}, "1": {}}', "names layer '1'"),
    ('{"0": {"n": 4}, "2": {"c": 9}}', "c=9 is more than the 8"),
]


@pytest.mark.parametrize(("text", "reason"), STRATEGIES)
def test_bad_strategy(refuse: Run, here: Path, text: str, reason: str) -> None:
    (here / "s.json").write_text(text)
    assert reason in refuse(*MLP, "--price", "s.json")


def test_failed_write_leaves_nothing(refuse: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (here / "p.json").write_text("before")
    monkeypatch.setattr(Path, "replace", full)
    assert "No space" in refuse(*MLP, "--out", "p.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(refuse: Run, here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    assert "Permission denied" in refuse(*MLP, "--out", "locked/p.json")
