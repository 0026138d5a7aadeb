"""timm: its smallest variants, with blocks that repeat left out, and fewer or narrower stages where they take that."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.zoo.example import Build, images, shallow

CLASSES = 7
NARROW = {"embed_dim": 48, "depth": 2, "num_heads": 4}  # of plain vision transformers


def _named(name: str, size: int = 64, **options: Any) -> Build:
    """With blocks that repeat left out."""
    return lambda: images(shallow(_created(name, options)), size)


def _whole(name: str, size: int = 64, **options: Any) -> Build:
    return lambda: images(_created(name, options), size)


def _created(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


NETWORKS: dict[str, Build] = {
    # Convolutional networks
    "resnet10t": _named("resnet10t"),
    "seresnext": _named("seresnext26t_32x4d"),
    "ecaresnet26t": _named("ecaresnet26t"),
    "resnest14d": _named("resnest14d"),
    "skresnet18": _named("skresnet18"),
    "res2net": _named("res2net50_14w_8s"),
    "resnetv2 (BiT)": _named("resnetv2_50x1_bit"),
    "nf_resnet": _named("nf_resnet50"),
    "nfnet_l0": _named("nfnet_l0"),
    "nf_regnet_b0": _named("nf_regnet_b0"),
    "dla46_c": _named("dla46_c"),
    "dpn48b": _named("dpn48b"),
    "hrnet_w18_small": _whole("hrnet_w18_small"),
    "selecsls42b": _named("selecsls42b"),
    "cspresnet50": _named("cspresnet50"),
    "cs3darknet_s": _named("cs3darknet_s"),
    "ese_vovnet19b_dw": _named("ese_vovnet19b_dw"),
    "densenet121": _named("densenet121", block_config=(2, 2, 2, 2)),
    "xception": _named("legacy_xception"),
    "inception_v4": _named("inception_v4", 96),
    "inception_next_atto": _named("inception_next_atto"),
    "regnetx_002": _named("regnetx_002"),
    "regnety_002": _named("regnety_002"),
    "rexnet_100": _named("rexnet_100"),
    "repvgg_a0": _named("repvgg_a0"),
    "mobileone_s0": _named("mobileone_s0"),
    "efficientnet_lite0": _named("efficientnet_lite0"),
    "tf_efficientnetv2_b0": _named("tf_efficientnetv2_b0"),
    "mixnet_s": _named("mixnet_s"),
    "tinynet_e": _named("tinynet_e"),
    "ghostnet_050": _named("ghostnet_050"),
    "lcnet_035": _whole("lcnet_035"),
    "mobilenetv3_small_050": _whole("mobilenetv3_small_050"),
    "mobilenetv4_conv_small": _named("mobilenetv4_conv_small"),
    "mobilenetv4_hybrid_medium": _named("mobilenetv4_hybrid_medium"),
    "convnext_atto": _named("convnext_atto", depths=(1, 1, 1, 1)),
    "convnextv2_atto": _named("convnextv2_atto", depths=(1, 1, 1, 1)),
    "hgnetv2_b0": _named("hgnetv2_b0"),
    "starnet_s1": _named("starnet_s1"),
    "gernet_s": _named("gernet_s"),
    "focalnet": _named("focalnet_tiny_srf"),
    "mambaout_femto": _named("mambaout_femto"),
    "rdnet_tiny": _named("rdnet_tiny"),
    # Convolution and attention
    "botnet26t": _named("botnet26t_256", 64, img_size=64),
    "halonet26t": _named("halonet26t", 256),
    "lambda_resnet26t": _named("lambda_resnet26t", 64),
    "bat_resnext26ts": _named("bat_resnext26ts", 256),
    "edgenext_xx_small": _named("edgenext_xx_small"),
    "mobilevit_xxs": _named("mobilevit_xxs"),
    "mobilevitv2_050": _named("mobilevitv2_050"),
    "efficientformer_l1": _named("efficientformer_l1", 224),
    "efficientformerv2_s0": _named("efficientformerv2_s0", 224),
    "efficientvit_b0": _named("efficientvit_b0"),
    "efficientvit_m0": _named("efficientvit_m0", 224),
    "fastvit_t8": _named("fastvit_t8"),
    "repvit_m0_9": _named("repvit_m0_9"),
    "poolformer_s12": _named("poolformer_s12"),
    "caformer_s18": _named("caformer_s18"),
    "convformer_s18": _named("convformer_s18"),
    "coatnet_pico_rw": _named("coatnet_pico_rw_224", 64, img_size=64),
    "maxvit_pico_rw": _named("maxvit_pico_rw_256", 64, img_size=64),
    "visformer_tiny": _named("visformer_tiny", 64, img_size=64),
    "levit_128s": _whole("levit_128s", 224),
    "nextvit_small": _named("nextvit_small"),
    # Transformers
    "vit": _whole("vit_tiny_patch16_224", 64, img_size=64, **NARROW),
    "vit (register tokens)": _whole("vit_small_patch16_224", 64, img_size=64, reg_tokens=2, qk_norm=True, **NARROW),
    "vit_relpos": _whole("vit_relpos_small_patch16_224", 64, img_size=64, **NARROW),
    "vit_srelpos": _whole("vit_srelpos_small_patch16_224", 64, img_size=64, **NARROW),
    "deit (distilled)": _whole("deit_tiny_distilled_patch16_224", 64, img_size=64, **NARROW),
    "deit3": _whole("deit3_small_patch16_224", 64, img_size=64, **NARROW),
    "beit": _whole("beit_base_patch16_224", 64, img_size=64, **NARROW),
    "eva02": _whole("eva02_tiny_patch14_224", 56, img_size=56, **NARROW),
    "samvit": _named("samvit_base_patch16", 64, img_size=64, window_size=2, global_attn_indexes=(1,), **NARROW),
    "cait": _whole("cait_xxs24_224", 64, img_size=64, **NARROW),
    "xcit": _named("xcit_nano_12_p16_224", 64, img_size=64, depth=2),
    "volo": _named("volo_d1_224", 64, img_size=64),
    "tnt": _named("tnt_s_legacy_patch16_224", 64, img_size=64, depth=2),
    "pit": _named("pit_ti_224", 64, img_size=64, depth=[1, 1, 1]),
    "pvt_v2_b0": _named("pvt_v2_b0"),
    "nest": _named("nest_tiny", 64, img_size=64),
    "coat_lite": _named("coat_lite_tiny", 64, img_size=64),
    "crossvit": _named("crossvit_tiny_240", 240, depth=[[1, 1, 0]] * 3),
    "swin": _whole("swin_tiny_patch4_window7_224", 64, img_size=64, window_size=4, embed_dim=24, depths=(2, 2, 1, 1)),
    "swinv2": _named("swinv2_tiny_window8_256", 64, img_size=64, window_size=4, embed_dim=24, depths=(2, 2, 1, 1)),
    "swinv2_cr": _named("swinv2_cr_tiny_ns_224", 64, img_size=64, embed_dim=24, depths=(2, 2, 1, 1)),
    "twins_svt": _named("twins_svt_small", 64, img_size=64, depths=(1, 1, 2, 1)),
    "twins_pcpvt": _named("twins_pcpvt_small", 64, img_size=64, depths=(1, 1, 2, 1)),
    "mvitv2": _named("mvitv2_tiny", 64, img_size=64),
    "davit": _named("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(24, 48, 96, 192)),
    "gcvit": _named("gcvit_xxtiny", 64, img_size=64),
    "hiera": _named("hiera_tiny_224", 64, img_size=64, embed_dim=24),
    "tiny_vit_5m": _named("tiny_vit_5m_224", 64),
    "mixer": _named("mixer_s32_224", 64, img_size=64),
    "resmlp": _named("resmlp_12_224", 64, img_size=64),
    "gmlp": _named("gmlp_ti16_224", 64, img_size=64),
    "sequencer2d": _named("sequencer2d_s", 64, img_size=64, layers=(1, 1, 1, 1)),
}
