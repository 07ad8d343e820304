"""Small random models of many architectures: transformers' config classes made tiny, timm's models on small images.

Nothing is downloaded and no architecture has code of its own: a table says what a setting is made, by the name of the setting.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Built = tuple[nn.Module, dict[str, Tensor]]

# What a setting of a config becomes, where the config has it and its own value is larger: the value, then the names.
_SIZES = """
1 moe_num_shared_experts first_k_dense_replace num_global_layers num_nextn_predict_layers
2 num_hidden_layers num_layers n_layer n_layers depth encoder_layers decoder_layers num_decoder_layers num_encoder_layers
2 decoder_num_hidden_layers num_blocks num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok moe_topk
2 moe_k top_k n_shared_experts num_shared_experts topk_group n_group
4 num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads attention_heads
4 decoder_num_attention_heads index_n_heads linear_num_value_heads mamba_n_heads rotary_dim time_step_rank
4 num_experts num_local_experts n_routed_experts moe_num_experts num_codebooks num_conv_pos_embedding_groups
6 num_queries num_labels num_conv_pos_embeddings
8 head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim qk_head_dim linear_key_head_dim linear_value_head_dim
8 attention_head_dim global_head_dim index_head_dim query_pre_attn_scalar attention_hidden_size kv_lora_rank q_lora_rank
8 state_size mamba_d_state ssm_state_size chunk_size mamba_chunk_size sliding_window window local_attention attention_window
8 index_topk dim_head o_lora_rank patch_size num_buckets relative_attention_num_buckets num_groups n_groups mamba_n_groups
16 num_mel_bins input_feat_per_channel codevector_dim proj_codevector_dim num_codevectors_per_group classifier_proj_size
16 hidden_size_per_layer_input lru_width num_filters
24 moe_intermediate_size shared_expert_intermediate_size dense_intermediate_size expert_ffn_hidden_size
32 hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim output_hidden_size encoder_hidden_size
32 decoder_hidden_size hidden_dim embedding_dim out_hidden_size feature_size projection_dim text_hidden_size
32 encoder_hidden_dim fusion_hidden_size conv_dim bottleneck_features image_size pretrain_image_size
48 intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner mlp_dim ffn_hidden_size dim_feedforward
48 encoder_intermediate_size decoder_intermediate_size shared_intermediate_size dim_ff dff
64 max_position_embeddings n_positions max_source_positions max_target_positions block_size n_ctx context_length max_seq_len
64 max_2d_position_embeddings max_sequence_length seq_length
120 vocab_size src_vocab_size tgt_vocab_size encoder_vocab_size decoder_vocab_size vocab_size_per_layer_input
"""
SIZES = {name: int(value) for value, *names in map(str.split, _SIZES.strip().splitlines()) for name in names}
TOKENS = ("_token_id", "_token_index", "_idx")  # ids have to lie in the vocabulary
WIDTHS = ("sizes", "dims", "dim", "channels", "depth_multiplier", "embed_dim", "hidden")  # lists: a width for each stage
DEPTHS = ("depths", "num_layers", "num_blocks", "layer")  # lists: layers of each stage
TASKS = """
SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ MASKED_LM CAUSAL_LM IMAGE_CLASSIFICATION CTC AUDIO_CLASSIFICATION OBJECT_DETECTION
SEMANTIC_SEGMENTATION UNIVERSAL_SEGMENTATION DEPTH_ESTIMATION VIDEO_CLASSIFICATION SEQUENCE_CLASSIFICATION IMAGE_TEXT_TO_TEXT
ZERO_SHOT_IMAGE_CLASSIFICATION IMAGE_TO_IMAGE MASK_GENERATION BACKBONE
"""
# Settings that no rule by name gets right, because they depend on each other.
MORE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "hiera": {"image_size": [64, 64]},
    "rwkv": {"attention_hidden_size": 32},
    "swin": {"embed_dim": 16, "num_heads": [2, 2, 4, 4], "window_size": 2, "patch_size": 2},
    "swinv2": {"embed_dim": 16, "num_heads": [2, 2, 4, 4], "window_size": 4, "patch_size": 2},
    "maskformer-swin": {"embed_dim": 16, "num_heads": [2, 2, 4, 4], "window_size": 4, "patch_size": 2},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 4],
              "key_dim": [8, 8, 8]},
    "cvt": {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 4]},
    **{name: {"head_dim": 8, "qk_rope_head_dim": 8, "num_key_value_heads": 4} for name in ("deepseek_v3", "deepseek_v32")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "wav2vec2-bert": {"vocab_size": 32, "feature_projection_input_dim": 16}, "wav2vec2-conformer": {"vocab_size": 32},
    "xlm": {"n_words": 120, "emb_dim": 32}, "luke": {"entity_vocab_size": 50},
    "perceiver": {"num_latents": 16, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 2},
    "efficientnet": {"hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.3},
    "llama4_text": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny(kind: Any, thirds: bool = False, **given: Any) -> Any:
    """A small instance of a transformers config class, and of the configs inside it. `thirds`: heads have three parts."""
    plain = kind()
    chosen: dict[str, Any] = {}
    for name in getattr(kind, "sub_configs", {}):
        inner = getattr(plain, name, None)
        if inner is not None and hasattr(type(inner), "model_type"):
            chosen[name] = tiny(type(inner), thirds)
    for name, value in list(vars(plain).items()):
        if name.startswith("_") or name in chosen or isinstance(value, bool):
            continue
        small = _smaller(name, value)
        if small is not None:
            chosen[name] = small
    chosen |= _fitting(plain, {**chosen, **given}, thirds)
    accepted = _accepted(kind)
    return kind(**{k: v for k, v in {**chosen, **given}.items() if accepted is None or k in accepted})


def _fitting(plain: Any, chosen: dict[str, Any], thirds: bool) -> dict[str, Any]:
    """Settings that are about others: a kind for each layer, and which parts of a head rotate with which of three positions."""
    found: dict[str, Any] = {}
    kinds = list(dict.fromkeys(getattr(plain, "layer_types", None) or ()))
    if len(kinds) > 1:
        found = {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(plain, name, None)
        if isinstance(rope, dict) and (rope.get("mrope_section") or thirds) and "num_attention_heads" in chosen:
            share = rope.get("partial_rotary_factor") or getattr(plain, "partial_rotary_factor", None) or 1.0
            half = int((chosen.get("head_dim") or chosen["hidden_size"] // chosen["num_attention_heads"]) * share) // 2
            found[name] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return found


def _accepted(kind: Any) -> set[str] | None:
    parameters = inspect.signature(kind.__init__).parameters
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else set(parameters)


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, int):
        if name.endswith(TOKENS):
            return value if value < 110 else 100 + value % 9
        return SIZES[name] if name in SIZES and value > SIZES[name] else None
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        if any(name.endswith(w) for w in WIDTHS) and max(value) > 32:
            return type(value)(max(8, 8 * round(v * 4 / max(value))) if v > 4 else v for v in value)  # images have 3 channels
        if any(name.endswith(w) for w in DEPTHS):
            return type(value)(min(v, 2) for v in value)
        if name == "image_size":
            return type(value)(min(v, 64) for v in value)
        if name.endswith("heads"):
            return type(value)(min(v, 4) for v in value)
    return None


def kinds() -> dict[str, tuple[str, Callable[[], Built]]]:
    """name -> (what it is for, how it is built): every model type of transformers that has a small form."""
    from transformers.models.auto import configuration_auto, modeling_auto

    found: dict[str, tuple[str, Callable[[], Built]]] = {}
    tasks = [(t.lower(), getattr(modeling_auto, f"MODEL_FOR_{t}_MAPPING_NAMES", {})) for t in TASKS.split()]
    tasks.append(("plain", modeling_auto.MODEL_MAPPING_NAMES))
    for name in configuration_auto.CONFIG_MAPPING_NAMES:
        for task, mapping in tasks:
            if name in mapping:
                kind = mapping[name] if isinstance(mapping[name], str) else mapping[name][0]
                found[name] = (task, lambda name=name, kind=kind: build(name, kind))
                break
    return found


def build(name: str, kind: str) -> Built:
    """A tiny model of one type, and inputs that it runs on."""
    import transformers
    from transformers.models.auto import configuration_auto

    config_class = configuration_auto.CONFIG_MAPPING[name]
    errors: list[str] = []
    for given in ({}, {"num_key_value_heads": 4}, {"num_attention_heads": 2}, {"thirds": True}):
        torch.manual_seed(0)
        try:
            model = getattr(transformers, kind)(tiny(config_class, **{**given, **MORE.get(name, {})}))
            if sum(p.numel() for p in model.parameters()) > 6_000_000:
                raise RuntimeError("stays large")
            return settled(model), inputs_for(model.eval())
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    raise RuntimeError(errors[0])


def settled(model: nn.Module) -> nn.Module:
    """No parameter at a value where mistakes hide (zeros, ones)."""
    draw = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            p.data += torch.randn(p.shape, generator=draw) * (0.1 if p.dim() < 2 else 0.02)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(generator=draw)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2, generator=draw)
    return model.eval()


def inputs_for(model: nn.Module) -> dict[str, Tensor]:
    """The first of the usual inputs that the model runs on."""
    first = ""
    for given in _tries(model):
        try:
            with torch.no_grad():
                answers = [v for v in tree_leaves(dict(model(**given))) if isinstance(v, Tensor) and v.is_floating_point()]
            if all(v.isfinite().all() for v in answers[:1]):
                return given
        except Exception as error:
            first = first or f"{type(error).__name__}: {error}"
    raise RuntimeError(f"no inputs: {first}")


def _tries(model: nn.Module) -> list[dict[str, Tensor]]:
    """What the model says is its main input, in the usual forms; all that it cannot do without; then anything usual."""
    usual, forms = _usual(model.config), _forms(model.config)
    named = forms.get(str(getattr(model, "main_input_name", "input_ids")), [])
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    asked = [{name: usual[name] for name in needed}] if needed and usual.keys() >= set(needed) else []
    return [*named, *asked, {k: usual[k] for k in ("input_ids", "pixel_values")}, *({k: usual[k]} for k in forms)]


def _usual(config: Any) -> dict[str, Tensor]:
    """Inputs by their names, of the sizes that the config speaks of."""
    draw = torch.Generator().manual_seed(2)

    def number(*names: str, default: int) -> int:
        found = next((value for name in names if (value := getattr(config, name, None))), default)
        return int(found[0] if isinstance(found, list | tuple) else found)

    text = getattr(config, "text_config", None) or config
    vision = getattr(config, "vision_config", None) or config
    vocab = min(90, int(getattr(text, "vocab_size", None) or 90) - 1)
    side = getattr(vision, "image_size", None) or 32
    side = side[0] if isinstance(side, list | tuple) else side
    channels = getattr(vision, "num_channels", 3) or 3
    mels, frames = number("num_mel_bins", "input_feat_per_channel", default=16), number("num_frames", default=4)
    ids, wave = torch.randint(3, max(vocab, 5), (2, 7), generator=draw), torch.randn(2, 1600, generator=draw)
    patch = number("in_channels", "num_channels", default=3) * number("temporal_patch_size", default=1)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, channels, side, side, generator=draw),
        "input_values": wave,
        "input_features": torch.randn(2, 64, mels, generator=draw),
        "input_features_mask": torch.ones(2, 64, dtype=torch.long),
        "pixel_values_videos": torch.randn(2, frames, channels, side, side, generator=draw),
        "decoder_input_ids": ids[:, :5],
        "qformer_input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "bbox": torch.zeros(2, 7, 4, dtype=torch.long),
        "query_embeds": torch.randn(2, 6, number("hidden_size", default=32), generator=draw),
        "past_values": torch.randn(
            2, number("context_length", default=32), number("num_input_channels", default=1), generator=draw
        ),
        "hidden_states": torch.randn(32, patch * number("patch_size", default=8) ** 2, generator=draw),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),  # two pictures of four by four patches
    }


def _forms(config: Any) -> dict[str, list[dict[str, Tensor]]]:
    """Main input -> the forms in which models take it."""
    usual, draw = _usual(config), torch.Generator().manual_seed(3)
    ids, decoder, wave = usual["input_ids"], {"decoder_input_ids": usual["decoder_input_ids"]}, usual["input_values"]
    image, mels = usual["pixel_values"], usual["input_features"].shape[-1]
    frames = 2 * int(getattr(config, "max_source_positions", None) or 32)
    sides = [n for n in (32, 64, 96) if n != image.shape[-1]]
    pictures = [image, *(torch.randn(*image.shape[:2], n, n, generator=draw) for n in sides), usual["pixel_values_videos"]]
    return {
        "input_ids": [{"input_ids": ids}, {"input_ids": ids, **decoder}, {"input_ids": ids.repeat(1, 4)}],
        "pixel_values": [{"pixel_values": picture} for picture in pictures],
        "pixel_values_videos": [{"pixel_values_videos": pictures[-1]}],
        "input_values": [{"input_values": v} for v in (wave, wave[:, None], torch.randn(2, 64, mels, generator=draw))],
        "input_features": [
            {"input_features": torch.randn(shape, generator=draw), **more}
            for shape in ((2, 64, mels), (2, mels, frames), (2, mels, 64))
            for more in ({}, decoder)
        ],
    }


# One small model of each family of timm, with the side of the images where it may be chosen.
TIMM = """
resnet18 resnet50:64 resnext26ts:64 seresnet18:64 ecaresnet26t:64 skresnet18:64 resnest14d:64 res2net50_26w_4s:64
resnetv2_50:64 resnetv2_18d:64 nf_resnet26:64 nf_regnet_b0:64 eca_nfnet_l0:64 regnetx_002:64 regnety_002:64 regnetz_005:64
densenet121:64 dla34:64 dpn48b:64 dpn68:64 vovnet39a:64 ese_vovnet19b_dw:64 selecsls42b:64 inception_v3:96 xception41:96
legacy_xception:96 hrnet_w18_small:64 darknet17:64 cspresnet50:64 cspdarknet53:64 mobilenetv2_050:64 mobilenetv3_small_050:64
mobilenetv1_100:64 mobilenetv4_conv_small_050:64 mobileone_s0:64 fastvit_t8:64 repvit_m0_9:64 repvgg_a0:64 repghostnet_050:64
ghostnet_050:64 ghostnetv2_100:64 efficientnet_b0:64 efficientnetv2_rw_t:64 mnasnet_small:64 tinynet_e:64 lcnet_035:64
fbnetc_100:64 hardcorenas_a:64 mixnet_s:64 spnasnet_100:64 rexnet_100:64 starnet_s1:64 hgnetv2_b0:64 convnext_atto:64
convnextv2_atto:64 convmixer_768_32:28 edgenext_xx_small:64 mobilevit_xxs:64 mobilevitv2_050:64 inception_next_atto:64
poolformer_s12:64 poolformerv2_s12:64 caformer_s18:64 convformer_s18:64 visformer_tiny:224 convit_tiny:224
vit_tiny_patch16_224@64 deit_tiny_patch16_224@64 deit3_small_patch16_224@64 vit_relpos_small_patch16_224@64
vit_srelpos_small_patch16_224@64 eva02_tiny_patch14_224@56 flexivit_small@64 cait_xxs24_224@64 xcit_nano_12_p16_224@64
swin_tiny_patch4_window7_224@56 swinv2_cr_tiny_ns_224@64 swin_s3_tiny_224@56 twins_svt_small:64 twins_pcpvt_small@64
pvt_v2_b0:64 pit_ti_224:224 levit_128s@64 levit_conv_128s@64 tnt_s_patch16_224@64 coat_tiny@64 coatnet_nano_rw_224@64
coatnext_nano_rw_224@64 maxvit_rmlp_pico_rw_256@64 crossvit_tiny_240:240 mvitv2_tiny@64 nest_tiny@64 gcvit_xxtiny@64
davit_tiny:64 focalnet_tiny_srf:64 tiny_vit_5m_224:224 efficientvit_b0:64 efficientvit_m0:224 efficientformer_l1:224
efficientformerv2_s0@64 hiera_tiny_224@64 hieradet_small:64 mixer_s16_224@64 resmlp_12_224@64 gmlp_ti16_224@64
gmixer_12_224@64 sequencer2d_s@32 volo_d1_224@64 nextvit_small:64 halonet26t:256 lambda_resnet26t:64 botnet26t_256@64
gcresnet33ts:64 rdnet_tiny:64 mambaout_femto:64 shvit_s1:64 swiftformer_xs:64 vitamin_small_224@64
"""


def _with_torchvision() -> None:
    """Imports torchvision; where its compiled part does not load, it misses operators, which are declared for it."""
    try:
        import torchvision
    except RuntimeError:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        keep = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):
                keep.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(keep)
        import torchvision  # noqa: F401


def images() -> dict[str, tuple[str, Callable[[], Built]]]:
    """timm's models, where it and its torchvision can be imported. `name:side` runs on that side, `name@side` is built so."""
    try:
        _with_torchvision()
        import timm
    except ImportError:
        return {}
    known = set(timm.list_models())
    found: dict[str, tuple[str, Callable[[], Built]]] = {}
    for entry in TIMM.split():
        name, at, side = entry.partition("@") if "@" in entry else entry.partition(":")
        if name in known:
            found[f"timm/{name}"] = ("timm", lambda n=name, a=at, s=int(side or 64): build_image(n, a, s))
    return found


_libraries: list[Any] = []


def build_image(name: str, at: str, side: int) -> Built:
    import timm

    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": side} if at == "@" else {}
    model = timm.create_model(name, num_classes=10, **options)
    given = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        settled(model)(given)
    return model, {"x": given}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The libraries' own remarks are not what is measured."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
