"""Hugging Face's transformers: small configurations, random weights, nothing dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.zoo.example import SAMPLES, Build, Example, images, text

WORDS, LENGTH, CLASSES = 99, 12, 7
ENCODER: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WRITING = ENCODER | {"vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
GROUPED = WRITING | {"num_key_value_heads": 2}
PATCHES = ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
STAGES: dict[str, Any] = {"num_labels": CLASSES, "depths": [1, 1, 1, 1]}
SPEAKING = ENCODER | {
    "vocab_size": WORDS,
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": CLASSES,
}
BART: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def _model(kind: str, config: str, **options: Any) -> nn.Module:
    """Random weights; what the configuration has of dropout is 0, and no keys and values are returned."""
    import transformers

    made = getattr(transformers, f"{config}Config")(**options)
    parts = [made, *(part for part in vars(made).values() if hasattr(part, "to_dict"))]
    for part in parts:
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name):
                setattr(part, name, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model: nn.Module = getattr(transformers, f"{config}{kind}")(made)
    return model


def _text(config: str, kind: str, *, masked: bool = False, **options: Any) -> Build:
    return lambda: text(_model(kind, config, **options), WORDS, LENGTH, masked=masked)


def _both(config: str, kind: str, **options: Any) -> Build:
    """An encoder and a decoder, each with tokens."""

    def build() -> Example:
        ids = torch.randint(3, WORDS, (SAMPLES, LENGTH)), torch.randint(3, WORDS, (SAMPLES, LENGTH - 3))
        return Example(_model(kind, config, **options), ids, ("input_ids", "decoder_input_ids"))

    return build


def _image(config: str, kind: str, size: int = 32, **options: Any) -> Build:
    return lambda: images(_model(kind, config, **options), size)


def _sound(config: str, kind: str, **options: Any) -> Build:
    return lambda: Example(_model(kind, config, **options), (torch.randn(SAMPLES, 400),))


def _whisper() -> Example:
    options = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
    model = _model(
        "ForConditionalGeneration",
        "Whisper",
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        **options,
    )
    given = torch.randn(SAMPLES, 8, 20), torch.randint(3, WORDS, (SAMPLES, 6))
    return Example(model, given, ("input_features", "decoder_input_ids"))


def _clip() -> Example:
    import transformers

    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config=options | {"vocab_size": WORDS, "max_position_embeddings": 32},
        vision_config=options | {"image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    given = torch.randint(3, WORDS, (SAMPLES, LENGTH)), torch.randn(SAMPLES, 3, 32, 32)
    return Example(transformers.CLIPModel(config), given, ("input_ids", "pixel_values"))


LM, CLASSIFIER, PICTURE = "ForCausalLM", "ForSequenceClassification", "ForImageClassification"

NETWORKS: dict[str, Build] = {
    # Encoders of text
    "bert": _text("Bert", CLASSIFIER, **WRITING),
    "bert (mask given)": _text("Bert", CLASSIFIER, masked=True, **WRITING),
    "roberta": _text("Roberta", CLASSIFIER, **WRITING | {"max_position_embeddings": 40}),
    "distilbert": _text("DistilBert", CLASSIFIER, vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "albert": _text("Albert", CLASSIFIER, embedding_size=16, **WRITING),
    "electra": _text("Electra", CLASSIFIER, embedding_size=16, **WRITING),
    "deberta": _text("DebertaV2", CLASSIFIER, relative_attention=True, pos_att_type=["p2c", "c2p"], **WRITING),
    "mpnet": _text("MPNet", CLASSIFIER, **WRITING | {"max_position_embeddings": 40}),
    "modernbert": _text("ModernBert", CLASSIFIER, local_attention=4, **WRITING),
    "fnet": _text("FNet", CLASSIFIER, **WRITING),
    "squeezebert": _text("SqueezeBert", CLASSIFIER, embedding_size=32, **WRITING),
    "convbert": _text("ConvBert", CLASSIFIER, embedding_size=32, conv_kernel_size=3, **WRITING),
    "xlnet": _text("XLNet", CLASSIFIER, vocab_size=WORDS, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "longformer": _text("Longformer", CLASSIFIER, attention_window=4, **WRITING | {"max_position_embeddings": 40}),
    # Decoders of text
    "gpt2": _text("GPT2", "LMHeadModel", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "gpt_neo": _text(
        "GPTNeo",
        LM,
        vocab_size=WORDS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=32,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    "gpt_neox": _text("GPTNeoX", LM, **WRITING),
    "gptj": _text("GPTJ", LM, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4),
    "opt": _text(
        "OPT",
        LM,
        vocab_size=WORDS,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=4,
        max_position_embeddings=32,
    ),
    "bloom": _text("Bloom", LM, vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4),
    "mpt": _text("Mpt", LM, vocab_size=WORDS, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
    "falcon": _text("Falcon", LM, **{k: v for k, v in WRITING.items() if k != "intermediate_size"}),
    "llama": _text("Llama", LM, **GROUPED),
    "llama (mask given)": _text("Llama", LM, masked=True, **GROUPED),
    "mistral": _text("Mistral", LM, sliding_window=5, **GROUPED),
    "qwen2": _text("Qwen2", LM, **GROUPED),
    "qwen3": _text("Qwen3", LM, head_dim=8, **GROUPED),
    "gemma": _text("Gemma", LM, head_dim=8, **GROUPED),
    "gemma2": _text("Gemma2", LM, head_dim=8, sliding_window=5, **GROUPED),
    "phi": _text("Phi", LM, **GROUPED),
    "phi3": _text("Phi3", LM, **GROUPED),
    "stablelm": _text("StableLm", LM, **GROUPED),
    "olmo": _text("Olmo", LM, **GROUPED),
    "cohere": _text("Cohere", LM, **GROUPED),
    "starcoder2": _text("Starcoder2", LM, **GROUPED),
    "mixtral": _text("Mixtral", LM, num_local_experts=2, experts_implementation="batched_mm", **GROUPED),
    "mamba": _text("Mamba", LM, vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, state_size=4, time_step_rank=4),
    # Both
    "t5": _both("T5", "ForConditionalGeneration", **T5),
    "mt5": _both("MT5", "ForConditionalGeneration", **T5),
    "bart": _both("Bart", "ForConditionalGeneration", **BART),
    "pegasus": _both("Pegasus", "ForConditionalGeneration", **BART),
    "marian": _both("Marian", "MTModel", **BART),
    "whisper": _whisper,
    # Images
    "vit": _image("ViT", PICTURE, **PATCHES),
    "deit": _image("DeiT", PICTURE, **PATCHES),
    "beit": _image("Beit", PICTURE, use_relative_position_bias=True, **PATCHES),
    "dinov2": _image("Dinov2", PICTURE, **PATCHES),
    "swin": _image(
        "Swin",
        PICTURE,
        num_labels=CLASSES,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    "swinv2": _image(
        "Swinv2",
        PICTURE,
        num_labels=CLASSES,
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _image("ConvNext", PICTURE, 64, hidden_sizes=[8, 8, 16, 16], **STAGES),
    "convnextv2": _image("ConvNextV2", PICTURE, 64, hidden_sizes=[8, 8, 16, 16], **STAGES),
    "poolformer": _image("PoolFormer", PICTURE, 64, hidden_sizes=[8, 8, 16, 16], **STAGES),
    "resnet": _image("ResNet", PICTURE, 64, embedding_size=8, hidden_sizes=[8, 8, 16, 16], **STAGES),
    "bit": _image("Bit", PICTURE, 64, embedding_size=32, num_groups=8, hidden_sizes=[32, 32, 64, 64], **STAGES),
    "mobilevit": _image("MobileViT", PICTURE, 64, num_labels=CLASSES, image_size=64),
    "segformer": _image(
        "Segformer",
        "ForSemanticSegmentation",
        64,
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        **STAGES,
    ),
    "upernet": _image("UperNet", "ForSemanticSegmentation", 64, hidden_size=16, auxiliary_channels=16),
    "dpt": _image(
        "DPT",
        "ForDepthEstimation",
        **PATCHES | {"num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        is_hybrid=False,
    ),
    "vit_mae": _image(
        "ViTMAE",
        "ForPreTraining",
        decoder_hidden_size=32,
        decoder_num_attention_heads=4,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=64,
        **PATCHES,
    ),
    "sam (vision)": _image(
        "SamVision",
        "Model",
        32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
        mlp_dim=64,
        window_size=4,
        global_attn_indexes=[1],
        output_channels=16,
    ),
    "vivit": lambda: Example(
        _model(
            "ForVideoClassification",
            "Vivit",
            num_frames=4,
            tubelet_size=[2, 8, 8],
            **{k: v for k, v in PATCHES.items() if k != "patch_size"},
        ),
        (torch.randn(SAMPLES, 4, 3, 32, 32),),
    ),
    "timesformer": lambda: Example(
        _model("ForVideoClassification", "Timesformer", num_frames=4, **PATCHES),
        (torch.randn(SAMPLES, 4, 3, 32, 32),),
    ),
    "videomae": lambda: Example(
        _model("ForVideoClassification", "VideoMAE", num_frames=4, **PATCHES), (torch.randn(SAMPLES, 4, 3, 32, 32),)
    ),
    "clip": _clip,
    # Sound
    "wav2vec2": _sound("Wav2Vec2", "ForCTC", **SPEAKING),
    "hubert": _sound("Hubert", "ForCTC", **SPEAKING),
    "wavlm": _sound("WavLM", "ForCTC", **SPEAKING),
    "ast": lambda: Example(
        _model(
            "ForAudioClassification",
            "AST",
            max_length=32,
            num_mel_bins=16,
            patch_size=8,
            num_labels=CLASSES,
            frequency_stride=8,
            time_stride=8,
            **ENCODER,
        ),
        (torch.randn(SAMPLES, 32, 16),),
    ),
    "encodec": lambda: Example(
        _model(
            "Model",
            "Encodec",
            num_filters=4,
            hidden_size=16,
            num_lstm_layers=1,
            upsampling_ratios=[4, 2],
            codebook_size=16,
        ),
        (torch.randn(SAMPLES, 1, 256),),
    ),
    # Numbers
    "patchtst": lambda: Example(
        _model(
            "ForPrediction",
            "PatchTST",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
            d_model=16,
            num_attention_heads=2,
            num_hidden_layers=2,
            ffn_dim=32,
        ),
        (torch.randn(SAMPLES, 32, 3),),
        ("past_values",),
    ),
    "patchtsmixer": lambda: Example(
        _model(
            "ForPrediction",
            "PatchTSMixer",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
            d_model=16,
            num_layers=2,
        ),
        (torch.randn(SAMPLES, 32, 3),),
        ("past_values",),
    ),
    "focalnet": _image("FocalNet", PICTURE, 64, image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_labels=CLASSES),
}
