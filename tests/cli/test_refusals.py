"""What a user may mistype: one line on stderr, exit code 2, and no file changed. A row a command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.commands import NETWORKS, Run
from tests.train.command import save_plans

MLP, SMALL = "mlp:64x48x32x10", "search mlp:64x32x8 --gpus 4"
REFUSED = [
    # search
    ("search vgg61 --gpus 4", "unknown model 'vgg61'; nearest: vgg16"),
    ("search vgg16:3 --gpus 4", "importing 'vgg16' raised ModuleNotFoundError"),
    ("search lenet5", "required: --gpus"),
    ("search --gpus 4", "required: MODEL"),
    ("search lenet5 --gpus 0", "must be 1 to 65,536, not 0"),
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
    ("search lenet5 --gpus 4 --price s.json --export-costs c.cfn", "--price does not search"),
    ("search lenet5 --gpus 4 --out p.json --timeline p.json", "name the same file"),
    ("search missing.onnx --gpus 4", "missing.onnx"),
    ("search no.such.module:net --gpus 4", "importing 'no.such.module' raised ModuleNotFoundError"),
    ("search :net --gpus 4", "importing '' raised ValueError"),
    ("search broken_code:net --gpus 4", "raised SyntaxError"),
    ("search quits:net --gpus 4", "raised SystemExit: 5"),
    ("search networks:missing --gpus 4", "module 'networks' has no 'missing'"),
    ("search networks:alone --gpus 4", "returned no example inputs"),
    ("search networks:number --gpus 4", "returned int, not an nn.Module"),
    ("search networks:faulty --gpus 4", "raised RuntimeError: out of luck (" + "{here}/networks.py:17)"),
    ("search networks:leaves --gpus 4", "raised SystemExit: 3"),
    ("search networks:needy --gpus 4", "raised TypeError: needy() missing 1 required"),
    ("search networks:wrong_inputs --gpus 4", "torch.export fails"),
    ("search networks:listed --gpus 4 --input-shape 8", "leave out --input-shape"),
    (
        f"{SMALL} --memory-limit 24",
        "--memory-limit is 24, which is 24 bytes: write 24GB or 24GiB, or 24B",
    ),
    (
        f"{SMALL} --memory-curve 8GB",
        "--memory-curve is '8GB': give the least and the most, such as 8GB..80GB",
    ),
    (
        f"{SMALL} --memory-curve 1GB..2GB --out p.json",
        "--memory-curve is about many plans: leave out --out",
    ),
    (
        f"{SMALL} --memory-curve 1GB..2GB --memory --memory-limit 3GB",
        "leave out --memory-limit and --memory",
    ),
    (f"{SMALL} --memory-curve 1GB..2GB --plot c.txt", "must end in .png, .svg, .pdf"),
    (f"{SMALL} --memory-curve 1GB..2GB --plot missing/c.png", "cannot be written"),
    (f"{SMALL} --plot c.txt", "must end in .png, .svg, .pdf"),
    (f"{SMALL} --plot missing/c.svg", "cannot be written"),
    (f"{SMALL} --offer swap", "'swap': choose of recompute, shard, joined by commas"),
    (f"{SMALL} --no-offer ,", "choose of recompute, shard"),
    (f"{SMALL} --offer shard --no-offer shard", "--no-offer: not allowed with argument --offer"),
    # grid
    (f"search {MLP} --gpus 4 --price grid:2x3", "grid 2x3 has 6 processes, there are 4: give --gpus 6"),
    ("search lenet5 --gpus 4 --replicas 3", "4 devices cannot be 3 replicas of equally many"),
    ("search lenet5 --gpus 4 --replicas 2 --global-batch 1", "a batch of 1 does not give each of 2 replicas a sample"),
    (f"search {MLP} --gpus 4 --replicas 4 --price grid:2x2", "{n=2, c=2} has samples in common for the 4 replicas"),
    (f"search {MLP} --gpus 4 --price grid:two", "grid 'two': write batch groups x model parts"),
    (
        f"search {MLP} --gpus 4 --price grid:2x2 --export-costs c.cfn",
        "leave out --export-costs",
    ),
    (f"search {MLP} --gpus 4 --price grid:4x1 --global-batch 2", "a batch of 2 samples cannot be cut into 4 groups"),
    (f"search {MLP} --gpus 128 --price grid:1x128", "the widest layer has 48 outputs and cannot be cut into 128 parts"),
    ("search lenet5 --gpus 2 --price grid:2x1", "process grids are for MLPs"),
    (f"run {MLP} --grid 2x2", "--grid 2x2 has 4 processes, there is 1: start them with torchrun"),
    (f"run {MLP} --grid all", "grid 'all': write batch groups x model parts"),
    ("run plan.json --grid 1x1", "--grid is for a model, such as mlp:64x256x10, and 'plan.json' is a plan"),
    ("run lenet5 --grid 1x1", "process grids are for MLPs"),
    ("run missing.json --global-batch 8", "plan 'missing.json' cannot be read"),
    # run
    ("run two.json", "the plan is for 2 ranks, there is 1: start them with torchrun --nproc-per-node 2"),
    ("run missing.json", "plan 'missing.json' cannot be read"),
    ("run one.json --steps 0", "'0' is not a whole number of at least 1"),
    ("run one.json --steps 3 --epochs 1", "not allowed with"),
    ("run one.json --lr 0", "'0' is not a number above 0"),
    ("run one.json --momentum 1", "'1' is not a number of at least 0 and below 1"),
    ("run one.json --accumulate 1000", "too few for one step of the plan's batch of 8 and --accumulate 1000"),
    ("run one.json --dtype float16", "invalid choice: 'float16'"),
    ("run one.json --resume", "need --checkpoint DIR"),
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
    (
        "oracle lenet5 --gpus 8 --strategy filter",
        "filter cannot use 8 devices: at most 6, by layer 'features.0'",
    ),
    ("oracle vgg16 --gpus 128,256 --strategy channel", "at most 64, by layer 'features.2' with 64 input channels"),
    ("oracle lenet5 --gpus 4 --strategy serial", "serial cannot use 4 devices: at most 1"),
    ("oracle lenet5 --gpus 8 --scaling strong --batch 4 --strategy data", "at most 4, by the batch of 4 samples"),
    ("oracle lenet5 --gpus 8 --scaling strong", "needs --batch B"),
    ("oracle lenet5 --gpus 8 --strategy dta", "unknown strategy 'dta' (did you mean 'data'?)"),
    ("oracle lenet5 --gpus 8 --strategy ,", "--strategy ','"),
    ("oracle lenet5 --gpus 2 --strategy df", "at least two groups of two devices"),
    ("oracle mlp:8x8x8 --gpus 4 --strategy spatial", "no layer has positions to cut"),
    ("oracle lenet5 --gpus 4 --strategy spatial --gather-after features.9", "no such layer (did you mean"),
    ("oracle lenet5 --gpus 4 --strategy spatial --spatial-dims h,x", "--spatial-dims 'h,x'"),
    ("oracle lenet5 --gpus 4 --batch 0", "'0' is not a whole number of at least 1"),
    ("oracle lenet5 --gpus 4 --max-hours 0", "'0' is not a number above 0"),
    ("oracle lenet5 --gpus 4 --plan plan.json", "name one --strategy and one number of --gpus"),
    ("oracle lenet5 --gpus 4 --strategy data --plan no/plan.json", "cannot be written"),
    ("oracle lenet5 --gpus 4 --strategy data --plan both.png --plot ./both.png", "name the same file"),
    ("oracle lenet5 --gpus 4 --formulas published", "unrecognized arguments: --formulas published"),
    ("oracle lenet5 --gpus 4 --strategy pipeline --plan plan.json", "pipeline is not a configuration for every layer"),
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
    ("measure layers mlp:8x6x4 --gpus 2 --dtype float16", "--dtype float16: layerwise runs"),
    ("measure layers mlp:8x6x4 --gpus 2 --dims n,z", "--dims 'n,z': choose from"),
    ("measure layers mlp:8x6x4 --gpus 2 --threads 0", "--threads must be from 1 to"),
    ("measure layers mlp:8x6x4 --gpus 2 --threads 100000000000", "--threads must be from 1 to"),
    ("measure layers mlp:8x6x4 --gpus 0", "the number of GPUs must be 1 to"),
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
