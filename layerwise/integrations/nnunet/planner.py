"""LargestPatch: nnU-Net's experiment planners, with the largest patch that several GPUs hold together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import nnunetv2
import numpy as np
import torch
from nnunetv2.experiment_planning.experiment_planners.default_experiment_planner import ExperimentPlanner
from nnunetv2.experiment_planning.experiment_planners.network_topology import get_pool_and_conv_props
from nnunetv2.experiment_planning.plan_and_preprocess_api import plan_experiment_dataset
from nnunetv2.utilities.find_class_by_name import recursive_find_python_class
from nnunetv2.utilities.label_handling.label_handling import LabelManager
from nnunetv2.utilities.plans_handling.plans_handler import ConfigurationManager

from layerwise.cli import Parser, count, profile_arguments, settle_machine
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.integrations.nnunet.trainer import nnUNetTrainerLayerwise
from layerwise.machine import Profile, load
from layerwise.quantities import parse_bytes, units
from layerwise.search.fits import FitQuestion

PLANS = "nnUNetLayerwisePlans"
LEAST_STAGES = 3  # the weights of deep supervision are 0 of the two coarsest
MANY = 999999  # poolings of an axis, of which nnU-Net allows any number


class LargestPatch(ExperimentPlanner):  # type: ignore[misc] # mypy does not read nnU-Net
    """A base that comes before a planner of nnU-Net's, and makes it one for several GPUs that train one network.

    A patch is at first as large as the median case, and is made smaller by nnU-Net's rule until some plan is predicted
    to fit. The batch is nnU-Net's least, 2, unless the patch is nnU-Net's. 2-D configurations are nnU-Net's.

    Attributes:
        gpus: That train together.
        profile: Their machine.
        limit_bytes: That a plan may take of each.
    """

    gpus: ClassVar[int]
    profile: ClassVar[Profile]
    limit_bytes: ClassVar[float]

    def get_plans_for_configuration(
        self, spacing: Any, median_shape: Any, data_identifier: str, approximate_n_voxels_dataset: float, _cache: Any
    ) -> dict[str, Any]:
        """nnU-Net's. LayerwiseError where no patch fits."""
        plan: dict[str, Any] = super().get_plans_for_configuration(
            spacing, median_shape, data_identifier, approximate_n_voxels_dataset, _cache
        )
        if len(spacing) < 3:
            return plan
        sized = [self._sized(plan, *topology) for topology in self._topologies(spacing, median_shape)]
        largest = bisect_left(sized, True, key=lambda one: self._bytes(one, _cache) <= self.limit_bytes)
        if not sized:
            raise LayerwiseError(f"the median case of {tuple(median_shape)} voxels is too small for deep supervision")
        if largest == len(sized):
            raise LayerwiseError(
                f"no patch fits into {units(self.limit_bytes, 'B')} of each of {self.gpus} GPUs: the smallest takes "
                f"{units(self._bytes(sized[-1], _cache), 'B')}"
            )
        return sized[largest]

    def _topologies(self, spacing: Any, median_shape: Any) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
        """Patches with the strides and kernels of their stages, from the median case's on, each smaller."""
        edge = self.UNet_featuremap_min_edge_length

        def properties(patch: Any) -> Any:
            return get_pool_and_conv_props(spacing, patch, edge, MANY)

        patch: Any = np.round(median_shape).astype(int)
        while True:
            _, strides, kernels, padded, divisors = properties(patch)
            if len(strides) < LEAST_STAGES:
                return
            yield tuple(map(int, padded)), strides, kernels
            patch = np.array(padded)
            axis = int(np.argmax(patch / median_shape))
            less = patch.copy()
            less[axis] -= divisors[axis]
            if less[axis] < edge:
                return
            patch[axis] -= properties(less)[4][axis]  # those of the smaller patch: fewer sizes are left out

    def _sized(self, plan: dict[str, Any], patch: tuple[int, ...], strides: Any, kernels: Any) -> dict[str, Any]:
        """A configuration with another patch, and the stages that go with it."""
        stages, architecture = len(strides), plan["architecture"]
        arguments = architecture["arch_kwargs"]
        blocks = "n_conv_per_stage" if "n_conv_per_stage" in arguments else "n_blocks_per_stage"
        of_stages = {
            "n_stages": stages,
            "features_per_stage": tuple(
                min(self.UNet_max_features_3d, self.UNet_base_num_features * 2**stage) for stage in range(stages)
            ),
            "kernel_sizes": kernels,
            "strides": strides,
            blocks: self.UNet_blocks_per_stage_encoder[:stages],
            "n_conv_per_stage_decoder": self.UNet_blocks_per_stage_decoder[: stages - 1],
        }
        same = patch == tuple(map(int, plan["patch_size"]))
        return plan | {
            "patch_size": patch,
            "batch_size": plan["batch_size"] if same else self.UNet_min_batch_size,
            "architecture": architecture | {"arch_kwargs": arguments | of_stages},
        }

    def _bytes(self, plan: dict[str, Any], cache: dict[Any, Any]) -> float:
        """The least memory of a GPU that a step of some plan is predicted to take."""
        key = plan["patch_size"], plan["architecture"]["arch_kwargs"]["strides"], plan["batch_size"]
        if key not in cache:
            trainer: Any = object.__new__(nnUNetTrainerLayerwise)  # which has not met other ranks, nor made folders
            labels = LabelManager(self.dataset_json["labels"], self.dataset_json.get("regions_class_order"))
            channels = len(self.dataset_json.get("channel_names", self.dataset_json.get("modality")))
            trainer.configuration_manager = ConfigurationManager(plan | {"batch_dice": True})
            trainer.label_manager, trainer.num_input_channels, trainer.batch_size = labels, channels, plan["batch_size"]
            trainer.is_ddp, trainer.enable_deep_supervision = False, True
            trainer.loss = trainer._build_loss()
            with torch.device("meta"):
                trainer.network = trainer.build_network_architecture(
                    None, trainer.configuration_manager, channels, labels.num_segmentation_heads
                )
            graph = fuse(network_of(trainer.with_loss(), trainer.example(), None, "nnU-Net").graph)
            dtype = "float16" if self.profile.processor.peak_flops.get("float16") else "float32"
            options = CostOptions(io="boxes", optimizer="momentum", dtype=dtype)
            question = FitQuestion("nnU-Net", graph, self.profile, (self.gpus,), options, self.limit_bytes)
            cache[key] = question.need(graph, self.gpus)
        return float(cache[key])


def main(argv: Sequence[str] | None = None) -> int:
    """Plans data sets as nnUNetv2_plan_experiment does, with the largest patch."""
    p = Parser(
        prog="python -m layerwise.integrations.nnunet plan",
        description="nnU-Net's experiment planning, with the largest patch that several GPUs hold together. Extract "
        "the fingerprint before (nnUNetv2_extract_fingerprint).",
    )
    p.add_argument("-d", type=int, nargs="+", required=True, metavar="ID", help="data sets, as nnU-Net numbers them")
    p.add_argument("--gpus", type=count, required=True, metavar="N", help="that train together")
    profile_arguments(p.add_argument_group("machine"))
    p.add_argument("--memory-limit", metavar="14GB", help="of a GPU (default: what it has, less what libraries take)")
    p.add_argument("-pl", default="ExperimentPlanner", metavar="NAME", help="nnU-Net's planner (ResEncUNetPlanner)")
    p.add_argument("-overwrite_plans_name", default=PLANS, metavar="NAME", help=f"of the plans (default: {PLANS})")
    args = p.parse_args(argv)
    settle_machine(args)
    package = "nnunetv2.experiment_planning"
    base = recursive_find_python_class(f"{nnunetv2.__path__[0]}/experiment_planning", args.pl, current_module=package)
    if base is None:
        raise LayerwiseError(f"nnU-Net has no planner {args.pl!r}")
    profile = load(args.profile)
    available = profile.device_graph(1, 1).usable_bytes
    limit = available if args.memory_limit is None else parse_bytes(args.memory_limit, "--memory-limit")
    planner = type(
        f"{args.pl}Layerwise",
        (LargestPatch, base),
        {"gpus": args.gpus, "profile": profile, "limit_bytes": limit},
    )
    for number in args.d:
        plan_experiment_dataset(number, planner, overwrite_plans_name=args.overwrite_plans_name)
    return 0
