"""TrainedFolder: what nnU-Net wrote of a trained network, read as data: no class that it names is imported unasked."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.volumes.sources import foreign

ARCHITECTURES = ("PlainConvUNet", "ResidualEncoderUNet")  # of dynamic_network_architectures
TORCH = frozenset(f"{kind}{dims}d" for kind in ("Conv", "InstanceNorm", "BatchNorm", "Dropout") for dims in (2, 3)) | {
    "LeakyReLU",
    "ReLU",
    "GELU",
    "SiLU",
    "ELU",
    "PReLU",
}  # what plans name of torch.nn
READERS = ("SimpleITKIO", "NibabelIO")  # they read volumes (z, y, x), as they lie in the file
LONG = 80  # letters of a trainer's name, of which matching takes a time that doubles with each of its parts
# nnU-Net's own trainers whose network is that of the plans.
TRAINERS = re.compile(
    r"nnUNetTrainer(_?(\d+ep(och)?s?|NoMirroring|onlyMirror01|NoDA|(DA5)?_?DASegOrd0|DA5|(Seg)?ord0|noDummy2DDA|warmup|"
    r"CosAnneal|(Vanilla)?Ada[mn](\den\d)?|(Dice|CE|DiceCE|Topk10|DiceTopK10)Loss(_noSmooth|LS01)?|NoDeepSupervision|"
    r"probabilisticOversampling(_\d+)?))*"
)
# What numpy numbers in a checkpoint's log are made of; none of it runs code of the file.
NUMBERS: list[Any] = [
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    np.dtype,
    *(type(np.dtype(name)) for name in ("f2", "f4", "f8", "i4", "i8", "?")),
]

LOCK = threading.Lock()  # torch has one list of safe globals for all threads


@dataclass(frozen=True)
class TrainedFolder:
    """A network that nnU-Net trained, as its folder has it.

    Attributes:
        plans: How cases are prepared, of all configurations.
        configuration: Its own, inherited parts included.
        labels: Names and numbers, or tuples of numbers for regions.
        regions: By output channel, the label of a region; None: channels are labels.
        channels: Images of a case.
        mirror: Spatial dimensions, from 0, along which it may be mirrored.
        weights: Its state dict.
    """

    plans: Mapping[str, Any]
    configuration: Mapping[str, Any]
    labels: Mapping[str, Any]
    regions: tuple[int, ...] | None
    channels: int
    mirror: tuple[int, ...]
    weights: Mapping[str, Tensor]

    @staticmethod
    def read(folder: str | os.PathLike[str], fold: int | str, checkpoint: str, *, built: bool) -> TrainedFolder:
        """LayerwiseError where it is none, or asks for what layerwise does not do. built: the user has its network."""
        path = Path(folder)
        plans, dataset = (_json(path / name) for name in ("plans.json", "dataset.json"))
        saved = read_checkpoint(path / f"fold_{fold}" / checkpoint)
        with foreign(f"nnU-Net's folder {os.fspath(path)!r} cannot be read"):
            configuration = _inherited(plans, saved["init_args"]["configuration"])
            labels = {name: value for name, value in dataset["labels"].items() if name != "ignore"}
            regional = any(isinstance(value, list) and len(value) > 1 for value in labels.values())
            made = TrainedFolder(
                plans,
                configuration,
                labels,
                tuple(map(int, dataset["regions_class_order"])) if regional else None,
                len(dataset["modality"] if "modality" in dataset else dataset["channel_names"]),
                tuple(saved.get("inference_allowed_mirroring_axes") or ()),
                saved["network_weights"],
            )
            made._check("" if built else str(saved["trainer_name"]))
        return made

    @property
    def classes(self) -> int:
        """Output channels: of every label, or of every region but the background."""
        if self.regions is not None:
            return len(self.regions)
        return len({int(value[0] if isinstance(value, list) else value) for value in self.labels.values()})

    @property
    def patch(self) -> tuple[int, ...]:
        """Extents of the windows that it was trained with."""
        return tuple(map(int, self.configuration["patch_size"]))

    def network(self) -> nn.Module:
        """The network that the plans name, with the trained values. LayerwiseError where the plans name another."""
        architecture = self.configuration.get("architecture") or _before_2_5(self.configuration)
        name, arguments = str(architecture["network_class_name"]), dict(architecture["arch_kwargs"])
        kind = name.rpartition(".")[2]
        if not name.startswith("dynamic_network_architectures.") or kind not in ARCHITECTURES:
            raise LayerwiseError(
                f"the plans name the network {name!r}, and layerwise builds {' and '.join(ARCHITECTURES)} of "
                "dynamic_network_architectures alone: build it yourself, and give network="
            )
        try:
            from dynamic_network_architectures.architectures import unet
        except ImportError as error:
            raise LayerwiseError(f"install dynamic-network-architectures, or give network= ({error})") from error
        for argument in architecture["_kw_requires_import"]:
            if arguments[argument] is not None:
                arguments[argument] = _of_torch(str(arguments[argument]))
        with foreign(f"{kind} cannot be built of its plans"):
            made: nn.Module = getattr(unet, kind)(
                input_channels=self.channels, num_classes=self.classes, **arguments | {"deep_supervision": False}
            )
        return made

    def load_into(self, network: nn.Module) -> nn.Module:
        """The network with the trained values, in evaluation. LayerwiseError where they are another network's."""
        try:
            network.load_state_dict(dict(self.weights))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise LayerwiseError(f"the checkpoint is not of the network that its plans name: {reason}") from error
        return network.eval()

    def _check(self, trainer: str) -> None:
        """LayerwiseError where the plans ask for what is not done here."""
        plans, configuration = self.plans, self.configuration
        cascade = configuration.get("previous_stage")
        refused = {
            f"the trainer {trainer}, whose network may be its own: build that, and give network=":
                bool(trainer) and (len(trainer) > LONG or TRAINERS.fullmatch(trainer) is None),
            f"a cascade (it continues {cascade!r})": cascade is not None,
            "a 2-D configuration": len(self.patch) != 3,
            f"the reader {plans['image_reader_writer']} ({' and '.join(READERS)} are)":
                plans["image_reader_writer"] not in READERS,
            f"the preprocessor {configuration['preprocessor_name']}":
                configuration["preprocessor_name"] != "DefaultPreprocessor",
            f"the labels of a {plans.get('label_manager')}":
                plans.get("label_manager", "LabelManager") != "LabelManager",
        }  # fmt: skip
        for what, refuse in refused.items():
            if refuse:
                raise LayerwiseError(f"layerwise does not predict with {what}")


def _json(path: Path) -> dict[str, Any]:
    with foreign(f"nnU-Net's file {os.fspath(path)!r} cannot be read"):
        read = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise LayerwiseError(f"nnU-Net's file {os.fspath(path)!r} has no object")
        return read


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What torch.save wrote: tensors, numbers and text; anything else is refused, and nothing in it is run."""
    if not path.is_file():
        raise LayerwiseError(f"nnU-Net's folder has no {path.parent.name}/{path.name}: give fold= or checkpoint=")
    with foreign(f"{os.fspath(path)!r} is no checkpoint of tensors and numbers alone"):
        with LOCK, torch.serialization.safe_globals(NUMBERS):
            read = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(read, dict) or "network_weights" not in read:
            raise LayerwiseError(f"{os.fspath(path)!r} is no checkpoint of nnU-Net's")
        return read


def _inherited(plans: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration, with what it inherits."""
    own = plans["configurations"][name]
    parent = own.get("inherits_from")
    return own if parent is None else {**_inherited(plans, parent), **own}


def _of_torch(name: str) -> type[nn.Module]:
    """The class of torch.nn that plans name."""
    kind = name.rpartition(".")[2]
    if not name.startswith("torch.nn.") or kind not in TORCH:
        raise LayerwiseError(f"the plans name {name!r}, which is no layer of torch.nn that nnU-Net uses")
    made: type[nn.Module] = getattr(nn, kind)
    return made


def _before_2_5(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture as plans of nnU-Net 2.5 have it, of older ones."""
    kind, convs = configuration["UNet_class_name"], configuration["n_conv_per_stage_encoder"]
    most, base = configuration["unet_max_num_features"], configuration["UNet_base_num_features"]
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": {
            "n_stages": len(convs),
            "features_per_stage": [min(base * 2**stage, most) for stage in range(len(convs))],
            "conv_op": "torch.nn.Conv3d",
            "kernel_sizes": configuration["conv_kernel_sizes"],
            "strides": configuration["pool_op_kernel_sizes"],
            "n_conv_per_stage" if kind == "PlainConvUNet" else "n_blocks_per_stage": convs,
            "n_conv_per_stage_decoder": configuration["n_conv_per_stage_decoder"],
            "conv_bias": True,
            "norm_op": "torch.nn.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "nonlin"],
    }
