"""Fifty networks that no other table has, taken by a rule before any was run (2026-11-26).

timm: of every module that no table has a network of, the variant with the fewest parameters, where those are at most
30 million once blocks that repeat are left out. transformers: of the families that no table has, in alphabetical order,
the first of every stretch of equal length whose small configuration (`SMALL`, whatever the family) PyTorch itself runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.example import SAMPLES, Build, Example, images, shallow, text
from benchmarks.zoo.networks.of_transformers import LENGTH, WORDS

SIZE = 64  # of timm's images, where PyTorch takes that
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "top_k"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "max_position_embeddings", "n_positions"), 64),
    **{"head_dim": 8, "vocab_size": WORDS, "image_size": 32, "patch_size": 8, "pad_token_id": 0, "bos_token_id": 1},
    "eos_token_id": 2,
}


def timm_network(name: str) -> Example:
    """The variant with blocks that repeat left out, at 64 x 64 pixels where PyTorch takes those, else at its own."""
    import timm

    for options, size in (({"img_size": SIZE}, SIZE), ({}, SIZE), ({}, None)):
        try:
            model = shallow(timm.create_model(name, pretrained=False, num_classes=7, **options))
            example = images(model, size or model.default_cfg["input_size"][-1])
            _runs(example)
        except Exception:  # whatever this variant says of a size that is not its own
            if size is None:
                raise
            continue
        return example
    raise AssertionError


def transformers_network(family: str) -> Example:
    """The family's base model in a small configuration, called with its main input."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config = _small(CONFIG_MAPPING[family])
    kind = MODEL_MAPPING[type(config)]
    model: nn.Module = (kind[0] if isinstance(kind, tuple) else kind)(config)
    name = model.main_input_name
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        example = images(model, getattr(vision, "image_size", 32), getattr(vision, "num_channels", 3))
    elif name == "input_ids":
        example = text(model, WORDS, LENGTH)
        if config.is_encoder_decoder:
            ids = (*example.inputs, torch.randint(3, WORDS, (SAMPLES, LENGTH - 3)))
            example = Example(model, ids, ("input_ids", "decoder_input_ids"))
    else:
        raise ValueError(f"its main input is {name}")
    _runs(example)
    return example


def _small(kind: type, made: Any = None) -> Any:
    """A configuration with small sizes, in its parts too; nothing dropped, and no keys and values returned."""
    made = kind() if made is None else made
    options: dict[str, Any] = {}
    for name, value in vars(made).items():
        if hasattr(value, "to_dict"):
            options[name] = _small(type(value), value)
        elif name in SMALL and isinstance(value, int):
            options[name] = SMALL[name]
        elif isinstance(value, float) and "drop" in name:
            options[name] = 0.0
        elif name == "use_cache":
            options[name] = False
    return kind(**options)


def _runs(example: Example) -> None:
    """Raises whatever PyTorch raises."""
    positional, named = example.call(example.inputs)
    with torch.no_grad():
        example.model.eval()(*positional, **named)


TIMM = (
    "convit_tiny",
    "convmixer_768_32",
    "cpubone_nano",
    "csatv2",
    "cspnext_tiny",
    "efficientvim_m1",
    "fasternet_t0",
    "hardcorenas_b",
    "sam2_hiera_tiny",
    "iformer_t",
    "inception_resnet_v2",
    "lcnetv2_small",
    "lowformer_b0",
    "naflexvit_base_patch16_parfac_gap",
    "repghostnet_050",
    "legacy_seresnet18",
    "shvit_s1",
    "swiftformer_xs",
    "tresnet_m",
    "vit_tiny_r_s16_p8_224",
    "vitamin_small_224",
    "xception41p",
)
TRANSFORMERS = (
    "afmoe",
    "bert-generation",
    "clip_text_model",
    "cpmant",
    "deepseek_vl",
    "embedding_gemma2",
    "exaone_moe",
    "gemma4_unified",
    "glmasr",
    "gpt_oss",
    "helium",
    "ijepa",
    "jina_embeddings_v3",
    "lfm3",
    "mbart",
    "minimax_m2",
    "molmo2_text",
    "mvp",
    "olmo3",
    "pegasus_x",
    "prophetnet",
    "qwen3_5",
    "radio",
    "sam3_vision_model",
    "siglip_vision_model",
    "timm_wrapper",
    "video_llama_3",
    "xglm",
)

NETWORKS: dict[str, Build] = {
    **{f"timm {name}": partial(timm_network, name) for name in TIMM},
    **{f"transformers {family}": partial(transformers_network, family) for family in TRANSFORMERS},
}
