"""Small random models of many `transformers` architectures, with inputs made on the spot.

Every row of `ARCHITECTURES` names one architecture, builds it, and makes inputs for it.
No weights are downloaded. Sizes are tiny: two or three layers, a hidden size of 16 or 32,
a vocabulary of 100. A forward pass takes well under a second on a CPU.

`build()` seeds the global torch generator with 0, so its weights are the same every time.
The model it returns is in eval mode. `inputs(seed)` uses a generator of its own. Its shapes
do not depend on the seed. Token ids lie in 5..99, so no special token is among them, save
placeholders for images. Masks that leave something out leave out the same for every seed.

A forward pass is a function of its inputs. Wav2Vec2, HuBERT and WavLM still draw from the
global generator in eval mode, for a layer drop that is then not applied.

`transformers` is imported when a model is built, not when this file is imported.

Most rows turn the key-value cache off, so their outputs hold tensors only. Rows whose
outputs also hold a cache object say so in a comment.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

BATCH = 2
LENGTH = 12
VOCAB = 100
IMAGE = 32
IMAGE_TOKEN = 3
VISION_START = 4
IMAGE_PATCH = 16
IMAGE_TOKENS = (IMAGE // IMAGE_PATCH) ** 2
SAMPLES = 1600
MEL_BINS = 16
FRAMES = 40


class MakeInputs(Protocol):
    """Makes the keyword inputs of a forward pass. The shapes are the same for every seed."""

    def __call__(self, seed: int = 0) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: how to build a tiny model of it, and what to feed the model.

    `family` is one of "text", "encoder", "encoder-decoder", "moe", "state-space", "vision",
    "audio", "time-series" and "multimodal".
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: MakeInputs


def _build(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds the class `model` from the class `config` and settings."""

    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config)(**copy.deepcopy(settings))
        torch.manual_seed(0)
        module: nn.Module = getattr(transformers, model)(made)
        return module.eval()

    return build


def _tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, VOCAB, (BATCH, length), generator=generator)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _text(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = _tokens(_generator(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _text_pair(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = _generator(seed)
    ids = _tokens(generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "decoder_input_ids": _tokens(generator, 7),
    }


def _pixels(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=_generator(seed))}


def _wave(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, SAMPLES, generator=_generator(seed))}


def _spectrogram(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, FRAMES, MEL_BINS, generator=_generator(seed))}


def _speech_to_text(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = _generator(seed)
    return {
        "input_features": torch.randn(BATCH, MEL_BINS, FRAMES, generator=generator),
        "decoder_input_ids": _tokens(generator, 7),
    }


def _masked_wave(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two sounds of different length; how long is told by the mask alone."""
    mask = torch.ones(BATCH, SAMPLES, dtype=torch.long)
    mask[1, 1200:] = 0
    return _wave(seed) | {"attention_mask": mask}


def _masked_features(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = _generator(seed)
    mask = torch.ones(BATCH, FRAMES, dtype=torch.long)
    mask[1, 30:] = 0
    return {
        "input_features": torch.randn(BATCH, FRAMES, MEL_BINS, generator=generator),
        "attention_mask": mask,
        "decoder_input_ids": _tokens(generator, 7),
    }


def _channels(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 1, 640, generator=_generator(seed))}


def _masked_pixels(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two pictures of different height."""
    mask = torch.ones(BATCH, IMAGE, IMAGE, dtype=torch.long)
    mask[1, 20:] = 0
    return _pixels(seed) | {"pixel_mask": mask}


def _noisy_pixels(seed: int = 0) -> dict[str, torch.Tensor]:
    """The noise says which patches are masked."""
    return _pixels(seed) | {"noise": torch.rand(BATCH, 16, generator=_generator(seed + 9))}


def _frames(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 4, 3, IMAGE, IMAGE, generator=_generator(seed))}


def _points(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = _generator(seed)
    return {
        "pixel_values": torch.randn(1, 3, IMAGE, IMAGE, generator=generator),
        "input_points": torch.rand(1, 1, 2, 2, generator=generator) * IMAGE,
    }


def _series(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(BATCH, 32, 3, generator=_generator(seed))}


def _table(seed: int = 0) -> dict[str, torch.Tensor]:
    kinds = torch.zeros(BATCH, LENGTH, 7, dtype=torch.long)
    return _text(seed) | {"token_type_ids": kinds}


def _regions(seed: int = 0) -> dict[str, torch.Tensor]:
    """Text, and features of regions of a picture."""
    generator = _generator(seed + 9)
    return _text(seed) | {
        "visual_embeds": torch.randn(BATCH, 4, 16, generator=generator),
        "visual_attention_mask": torch.ones(BATCH, 4),
    }


def _boxes(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = _generator(seed + 9)
    return _text(seed) | {
        "visual_feats": torch.randn(BATCH, 4, 16, generator=generator),
        "visual_pos": torch.rand(BATCH, 4, 4, generator=generator),
    }


def _text_and_masked_pixels(seed: int = 0) -> dict[str, torch.Tensor]:
    return _text(seed) | _masked_pixels(seed)


def _text_around_pictures(seed: int = 0) -> dict[str, torch.Tensor]:
    """A list of pictures for each text."""
    made = _text_around_pixels(seed)
    return made | {"pixel_values": made["pixel_values"][:, None]}


def _text_around_grids(seed: int = 0) -> dict[str, torch.Tensor]:
    """Pictures as patches in one row; a tensor says how each is laid out."""
    generator = _generator(seed)
    ids = _tokens(generator, 16)
    ids[:, 2] = VISION_START
    ids[:, 3:7] = IMAGE_TOKEN
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


def _both(seed: int = 0) -> dict[str, torch.Tensor]:
    return _text(seed) | _pixels(seed)


def _text_around_pixels(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens and pixels, where placeholder tokens mark the place of the image in the text."""
    made = _both(seed)
    made["input_ids"][:, 2 : 2 + IMAGE_TOKENS] = IMAGE_TOKEN
    return made


# Settings which many configs share. Configs differ in how they spell the same sizes.
_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_WIDE: dict[str, Any] = {**_LAYERS, "intermediate_size": 64}
_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64}
_ENCODER: dict[str, Any] = {**_WIDE, **_SMALL}
_DECODER: dict[str, Any] = {**_ENCODER, **_IDS, "use_cache": False}
_GROUPED: dict[str, Any] = {**_DECODER, "num_key_value_heads": 2}
_NARROW: dict[str, Any] = {**_LAYERS, **_SMALL, **_IDS, "use_cache": False}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_SEQ2SEQ: dict[str, Any] = {
    **_IDS,
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_BART: dict[str, Any] = {**_SEQ2SEQ, "max_position_embeddings": 64}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}
_GRID: dict[str, Any] = {"image_size": IMAGE, "patch_size": 8}
_PATCHES: dict[str, Any] = {**_WIDE, **_GRID}
_STAGES: dict[str, Any] = {"num_channels": 3, "hidden_sizes": [16, 32], "depths": [1, 1]}
_SPEECH: dict[str, Any] = {
    **_WIDE,
    "vocab_size": VOCAB,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_DISENTANGLED: dict[str, Any] = {"pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_CLS_SEP: dict[str, Any] = {"cls_token_id": 1, "sep_token_id": 2}
_EXPERTS: dict[str, Any] = {
    **_GROUPED,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_MAMBA: dict[str, Any] = {
    **_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "use_cache": False,
}
_CHUNKS: dict[str, Any] = {"n_groups": 1, "chunk_size": 8}
_WINDOWS: dict[str, Any] = {"image_size": IMAGE, "patch_size": 4, "window_size": 4}
_PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}
_TOWERS: dict[str, Any] = {
    "text_config": {**_ENCODER, **_IDS},
    "vision_config": _PATCHES,
}
_RETRIEVAL: dict[str, Any] = {
    "text_config": {**_ENCODER, **_IDS, "sep_token_id": 2},
    "vision_config": _PATCHES,
    "projection_dim": 16,
    "image_text_hidden_size": 16,
}
_LLAVA: dict[str, Any] = {
    "text_config": {"model_type": "llama", **_GROUPED},
    "vision_config": {
        "model_type": "clip_vision_model",
        **_WIDE,
        "image_size": IMAGE,
        "patch_size": IMAGE_PATCH,
    },
    "image_token_index": IMAGE_TOKEN,
    "image_seq_length": IMAGE_TOKENS,
}


_ROUTED: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_DETR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 5,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 16,
        "layer_type": "basic",
        "out_features": ["stage2"],
        **_STAGES,
    },
}
_SAM: dict[str, Any] = {
    "vision_config": {
        **_LAYERS,
        **_GRID,
        "output_channels": 16,
        "mlp_dim": 64,
        "num_pos_feats": 8,
        "global_attn_indexes": [1],
        "window_size": 2,
    },
    "prompt_encoder_config": {"hidden_size": 16, "mask_input_channels": 4, **_GRID},
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 32,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
}
_HORIZON: dict[str, Any] = {
    "num_input_channels": 3,
    "context_length": 32,
    "patch_length": 8,
    "patch_stride": 8,
    "prediction_length": 4,
    "loss": "mse",
}
_REFORMER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "attention_head_size": 8,
    "num_attention_heads": 4,
    "attn_layers": ["local", "lsh"],
    "axial_pos_shape": [4, 4],
    "axial_pos_embds_dim": [16, 16],
    "chunk_size_feed_forward": 0,
    "feed_forward_size": 64,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "max_position_embeddings": 16,
    "num_buckets": 2,
    "num_hashes": 1,
    "hash_seed": 0,
    "pad_token_id": 0,
    "is_decoder": False,
}
_PROPHET: dict[str, Any] = {
    **_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "ngram": 2,
    "use_cache": False,
}
_JAMBA: dict[str, Any] = {
    **_GROUPED,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
_BAMBA: dict[str, Any] = {
    **_GROUPED,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
}
_FUNNEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "block_sizes": [1, 1],
    "d_model": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
    "num_decoder_layers": 1,
}
_CANINE: dict[str, Any] = {
    **_WIDE,
    "max_position_embeddings": 64,
    "downsampling_rate": 4,
    "local_transformer_stride": 4,
    "upsampling_kernel_size": 4,
    "num_hash_buckets": 32,
    "num_hash_functions": 2,
}
_GROUPS: dict[str, Any] = {
    f"{part}_groups": 2 for part in ("q", "k", "v", "post_attention", "intermediate", "output")
}
_QWEN_VL: dict[str, Any] = {
    "text_config": {
        **_GROUPED,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": 97,
    "video_token_id": 98,
}
_GRID_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_PAIRED_TEXT: dict[str, Any] = {"text_config": {**_ENCODER, **_IDS}, "vision_config": _PATCHES}
_LARGE_PATCHES: dict[str, Any] = {**_WIDE, "image_size": IMAGE, "patch_size": IMAGE_PATCH}
_OPT: dict[str, Any] = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, **_NARROW}

_GEMMA3: dict[str, Any] = {**_GROUPED, "head_dim": 8, "sliding_window": 6}
_GPT_NEO: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
    "use_cache": False,
}
_MPT: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
_XGLM: dict[str, Any] = {
    "d_model": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 4,
    "use_cache": False,
}
_XLNET: dict[str, Any] = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
_LANDMARKS: dict[str, Any] = {
    "num_landmarks": 4,
    "segment_means_seq_len": LENGTH,
    "conv_kernel_size": 3,
}
_LED: dict[str, Any] = {
    "attention_window": 4,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_JETMOE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "intermediate_size": 64,
    "use_cache": False,
}
_NLLB: dict[str, Any] = {
    "num_experts": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "expert_capacity": 64,
}
_RWKV: dict[str, Any] = {
    "vocab_size": VOCAB,
    "context_length": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "use_cache": False,
}
_GRIFFIN: dict[str, Any] = {
    "lru_width": 32,
    "attention_window_size": 8,
    "conv1d_width": 4,
    "head_dim": 8,
    "block_types": ["recurrent", "attention"],
}
_POOLS: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "padding": [2, 1],
}
_PVT: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2],
    "sequence_reduction_ratios": [2, 1],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
    "mlp_ratios": [2, 2],
}
_FOCAL: dict[str, Any] = {
    "embed_dim": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "focal_levels": [1, 1],
    "focal_windows": [3, 3],
    "patch_size": 4,
}
_YOLOS: dict[str, Any] = {
    **_WIDE,
    "image_size": [IMAGE, IMAGE],
    "patch_size": 8,
    "num_detection_tokens": 5,
}
_ENCODEC: dict[str, Any] = {
    "hidden_size": 16,
    "num_filters": 4,
    "codebook_size": 16,
    "codebook_dim": 16,
    "upsampling_ratios": [4, 4],
    "num_lstm_layers": 1,
    "target_bandwidths": [3000.0],
    "compress": 2,
}


def _row(
    family: str, name: str, model: str, config: str, inputs: MakeInputs, **settings: Any
) -> Architecture:
    return Architecture(name, family, _build(model, config, **settings), inputs)


def _causal(name: str, stem: str, family: str = "text", **settings: Any) -> Architecture:
    """A row for `<stem>ForCausalLM`, fed with tokens."""
    return _row(family, name, f"{stem}ForCausalLM", f"{stem}Config", _text, **settings)


def _masked(name: str, stem: str, **settings: Any) -> Architecture:
    """A row for `<stem>ForMaskedLM`, fed with tokens."""
    return _row("encoder", name, f"{stem}ForMaskedLM", f"{stem}Config", _text, **settings)


def _image(name: str, stem: str, **settings: Any) -> Architecture:
    """A row for `<stem>ForImageClassification`, fed with pixels."""
    model = f"{stem}ForImageClassification"
    return _row("vision", name, model, f"{stem}Config", _pixels, **settings)


def _pair(
    name: str, model: str, config: str, family: str = "encoder-decoder", **settings: Any
) -> Architecture:
    """A row for an encoder-decoder, fed with tokens on both sides."""
    return _row(family, name, model, config, _text_pair, **settings)


ARCHITECTURES: tuple[Architecture, ...] = (
    # Text decoders.
    _causal("llama", "Llama", **_GROUPED),
    _causal("qwen2", "Qwen2", **{**_GROUPED, "use_cache": True}),  # Outputs hold a cache.
    _causal("qwen3", "Qwen3", head_dim=8, **_GROUPED),
    _causal("mistral", "Mistral", sliding_window=6, **_GROUPED),
    _causal("gemma", "Gemma", head_dim=8, **_GROUPED),
    _causal("gemma2", "Gemma2", head_dim=8, sliding_window=6, **_GROUPED),
    _causal("phi", "Phi", **_DECODER),
    _causal("phi3", "Phi3", **_GROUPED),
    _causal("olmo2", "Olmo2", **_GROUPED),
    _causal("stablelm", "StableLm", **_GROUPED),
    _causal("starcoder2", "Starcoder2", **_GROUPED),
    # Outputs hold a cache.
    _row("text", "gpt2", "GPT2LMHeadModel", "GPT2Config", _text, vocab_size=VOCAB, **_GPT2, **_IDS),
    _causal("gpt-neox", "GPTNeoX", **_DECODER),
    _causal("gptj", "GPTJ", rotary_dim=4, vocab_size=VOCAB, use_cache=False, **_GPT2, **_IDS),
    _causal("opt", "OPT", ffn_dim=64, word_embed_proj_dim=32, **_NARROW),
    _causal("bloom", "Bloom", vocab_size=VOCAB, use_cache=False, **_LAYERS, **_IDS),
    _causal("falcon", "Falcon", ffn_hidden_size=64, **_NARROW),
    _row("text", "gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", _text, **_GEMMA3),
    _causal("cohere", "Cohere", **_GROUPED),
    _causal("glm4", "Glm4", head_dim=8, **_GROUPED),
    _causal("smollm3", "SmolLM3", **_GROUPED),
    _causal("granite", "Granite", **_GROUPED),
    _causal("exaone4", "Exaone4", sliding_window=6, **_GROUPED),
    _causal("persimmon", "Persimmon", **_DECODER),
    _causal("gpt-bigcode", "GPTBigCode", vocab_size=VOCAB, use_cache=False, **_GPT2, **_IDS),
    _causal("gpt-neo", "GPTNeo", **_GPT_NEO, **_SMALL, **_IDS),
    _causal("codegen", "CodeGen", rotary_dim=4, vocab_size=VOCAB, use_cache=False, **_GPT2, **_IDS),
    _causal("mpt", "Mpt", vocab_size=VOCAB, use_cache=False, **_MPT, **_IDS),
    _causal("xglm", "XGLM", **_XGLM, **_SMALL, **_IDS),
    _row("text", "xlnet", "XLNetLMHeadModel", "XLNetConfig", _text, vocab_size=VOCAB, **_XLNET),
    # Text encoders.
    _masked("bert", "Bert", **_ENCODER),
    _masked("roberta", "Roberta", **_ENCODER),
    _masked("distilbert", "DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4, **_SMALL),
    _masked("albert", "Albert", embedding_size=16, **_ENCODER),
    _masked("electra", "Electra", embedding_size=16, **_ENCODER),
    _masked("mpnet", "MPNet", **_ENCODER),
    _masked("deberta-v2", "DebertaV2", relative_attention=True, **_DISENTANGLED, **_ENCODER),
    _masked("modernbert", "ModernBert", local_attention=8, **_ENCODER, **_IDS, **_CLS_SEP),
    _masked("xlm-roberta", "XLMRoberta", **_ENCODER),
    _masked("convbert", "ConvBert", embedding_size=16, conv_kernel_size=3, **_ENCODER),
    _masked("squeezebert", "SqueezeBert", embedding_size=32, **{**_GROUPS, **_ENCODER}),
    _masked("longformer", "Longformer", attention_window=[4, 4], pad_token_id=0, **_ENCODER),
    _masked("big-bird", "BigBird", attention_type="original_full", **_ENCODER, **_IDS),
    _masked("nystromformer", "Nystromformer", **_LANDMARKS, **_ENCODER),
    _masked("roformer", "RoFormer", embedding_size=32, **_ENCODER),
    _masked("esm", "Esm", pad_token_id=0, mask_token_id=4, **_ENCODER),
    _masked("deberta", "Deberta", relative_attention=True, **_DISENTANGLED, **_ENCODER),
    _masked("ibert", "IBert", **_ENCODER),
    _masked("fnet", "FNet", hidden_size=32, num_hidden_layers=2, intermediate_size=64, **_SMALL),
    _masked("funnel", "Funnel", **_FUNNEL),
    _masked("reformer", "Reformer", **_REFORMER),
    _row("encoder", "canine", "CanineForTokenClassification", "CanineConfig", _text, **_CANINE),
    _row("encoder", "tapas", "TapasForMaskedLM", "TapasConfig", _table, **_ENCODER),
    # Encoder-decoders.
    _pair("t5", "T5ForConditionalGeneration", "T5Config", **_T5),
    _pair("bart", "BartForConditionalGeneration", "BartConfig", **_BART),
    _pair("marian", "MarianMTModel", "MarianConfig", **_BART),
    _pair("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_BART),
    _pair("mbart", "MBartForConditionalGeneration", "MBartConfig", **_BART),
    _pair("m2m-100", "M2M100ForConditionalGeneration", "M2M100Config", **_BART),
    _pair("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", **_BART),
    _pair("led", "LEDForConditionalGeneration", "LEDConfig", **_LED, **_SEQ2SEQ),
    _pair("longt5", "LongT5ForConditionalGeneration", "LongT5Config", local_radius=3, **_T5),
    _pair("prophetnet", "ProphetNetForConditionalGeneration", "ProphetNetConfig", **_PROPHET),
    _pair("mt5", "MT5ForConditionalGeneration", "MT5Config", **_T5),
    # Mixtures of experts.
    _causal("mixtral", "Mixtral", "moe", num_local_experts=4, **_GROUPED),
    _causal("qwen2-moe", "Qwen2Moe", "moe", **_EXPERTS, shared_expert_intermediate_size=32),
    _causal("qwen3-moe", "Qwen3Moe", "moe", head_dim=8, **_EXPERTS),
    _causal("olmoe", "Olmoe", "moe", num_experts=4, num_experts_per_tok=2, **_GROUPED),
    _pair(
        "switch-transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        "moe",
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        **_T5,
    ),
    _causal("deepseek-v3", "DeepseekV3", "moe", **_DEEPSEEK, **_LATENT, **_DECODER),
    _causal("gpt-oss", "GptOss", "moe", head_dim=8, sliding_window=6, **_ROUTED, **_GROUPED),
    _causal("granitemoe", "GraniteMoe", "moe", **_ROUTED, **_GROUPED),
    _causal("phimoe", "Phimoe", "moe", **_ROUTED, **_GROUPED),
    _causal("jetmoe", "JetMoe", "moe", **_JETMOE, **_ROUTED, **_SMALL, **_IDS),
    _pair("nllb-moe", "NllbMoeForConditionalGeneration", "NllbMoeConfig", "moe", **_NLLB, **_BART),
    # State space models.
    _causal("mamba", "Mamba", "state-space", **_MAMBA, time_step_rank=4),
    _causal("mamba2", "Mamba2", "state-space", **_MAMBA, num_heads=8, head_dim=8, **_CHUNKS),
    _causal("falcon-mamba", "FalconMamba", "state-space", **_MAMBA, time_step_rank=4),
    _causal("jamba", "Jamba", "state-space", **_JAMBA),
    _causal("bamba", "Bamba", "state-space", **_BAMBA),
    _causal("rwkv", "Rwkv", "state-space", **_RWKV, **_IDS),
    _causal("recurrent-gemma", "RecurrentGemma", "state-space", **_GRIFFIN, **_GROUPED),
    _causal("qwen3-next", "Qwen3Next", "state-space", **_DELTA),
    # Vision.
    _image("vit", "ViT", **_PATCHES),
    _image("deit", "DeiT", **_PATCHES),
    _image("beit", "Beit", layer_scale_init_value=1.0, **_PATCHES),
    _image("dinov2", "Dinov2", mlp_ratio=2, **_LAYERS, **_GRID),
    _image("swin", "Swin", embed_dim=16, num_heads=[2, 4], depths=[2, 1], **_WINDOWS),
    _image("convnext", "ConvNext", num_stages=2, layer_scale_init_value=1.0, **_STAGES),
    _image("resnet", "ResNet", embedding_size=16, layer_type="basic", **_STAGES),
    _image("segformer", "Segformer", **_PYRAMID),
    _image("swinv2", "Swinv2", embed_dim=16, num_heads=[2, 4], depths=[2, 1], **_WINDOWS),
    _image("mobilenet-v2", "MobileNetV2", image_size=IMAGE, depth_multiplier=0.25, min_depth=8),
    _image("poolformer", "PoolFormer", **_POOLS),
    _image("pvt", "Pvt", image_size=IMAGE, **_PVT),
    _image("focalnet", "FocalNet", image_size=IMAGE, **_FOCAL),
    _row("vision", "yolos", "YolosForObjectDetection", "YolosConfig", _pixels, **_YOLOS),
    _row("vision", "detr", "DetrForObjectDetection", "DetrConfig", _masked_pixels, **_DETR),
    _row(
        "vision",
        "conditional-detr",
        "ConditionalDetrForObjectDetection",
        "ConditionalDetrConfig",
        _masked_pixels,
        **_DETR,
    ),
    _row(
        "vision",
        "deformable-detr",
        "DeformableDetrForObjectDetection",
        "DeformableDetrConfig",
        _masked_pixels,
        num_feature_levels=1,
        **_DETR,
    ),
    _row(
        "vision",
        "videomae",
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        _frames,
        num_frames=4,
        **_PATCHES,
    ),
    _row(
        "vision",
        "timesformer",
        "TimesformerForVideoClassification",
        "TimesformerConfig",
        _frames,
        num_frames=4,
        **_PATCHES,
    ),
    _row("vision", "sam", "SamModel", "SamConfig", _points, **_SAM),
    _row("vision", "vit-mae", "ViTMAEModel", "ViTMAEConfig", _noisy_pixels, **_PATCHES),
    # Audio.
    _row("audio", "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _wave, **_SPEECH),
    _row("audio", "hubert", "HubertForCTC", "HubertConfig", _wave, **_SPEECH),
    _row("audio", "wavlm", "WavLMForCTC", "WavLMConfig", _wave, **_SPEECH),
    _row(
        "audio",
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _speech_to_text,
        **_SEQ2SEQ,
        num_mel_bins=MEL_BINS,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
    ),
    _row(
        "audio",
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        "ASTConfig",
        _spectrogram,
        patch_size=8,
        frequency_stride=4,
        time_stride=4,
        num_mel_bins=MEL_BINS,
        max_length=FRAMES,
        **_WIDE,
    ),
    _row(
        "audio",
        "wav2vec2-masked",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _masked_wave,
        feat_extract_norm="layer",
        **_SPEECH,
    ),
    _row("audio", "unispeech-sat", "UniSpeechSatForCTC", "UniSpeechSatConfig", _wave, **_SPEECH),
    _row("audio", "sew", "SEWForCTC", "SEWConfig", _masked_wave, squeeze_factor=2, **_SPEECH),
    _row(
        "audio",
        "data2vec-audio",
        "Data2VecAudioForCTC",
        "Data2VecAudioConfig",
        _masked_wave,
        **_SPEECH,
    ),
    _row(
        "audio",
        "speech-to-text",
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        _masked_features,
        input_feat_per_channel=MEL_BINS,
        conv_channels=32,
        conv_kernel_sizes=(3, 3),
        max_source_positions=64,
        max_target_positions=32,
        **_SEQ2SEQ,
    ),
    _row("audio", "encodec", "EncodecModel", "EncodecConfig", _channels, **_ENCODEC),
    # Time series.
    _row(
        "time-series",
        "patchtst",
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        _series,
        d_model=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=64,
        **_HORIZON,
    ),
    _row(
        "time-series",
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        "PatchTSMixerConfig",
        _series,
        d_model=16,
        num_layers=2,
        **_HORIZON,
    ),
    # Text with images.
    _row("multimodal", "clip", "CLIPModel", "CLIPConfig", _both, projection_dim=16, **_TOWERS),
    _row("multimodal", "siglip", "SiglipModel", "SiglipConfig", _both, **_TOWERS),
    _row("multimodal", "blip", "BlipForImageTextRetrieval", "BlipConfig", _both, **_RETRIEVAL),
    _row(
        "multimodal",
        "llava",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        _text_around_pixels,
        **_LLAVA,
    ),
    _row(
        "multimodal",
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        _text_around_pixels,
        text_config={"model_type": "gemma", "head_dim": 8, **_GROUPED},
        vision_config={
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            **_LARGE_PATCHES,
        },
        image_token_index=IMAGE_TOKEN,
        projection_dim=32,
    ),
    _row(
        "multimodal",
        "qwen2-vl",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        _text_around_grids,
        vision_config={"embed_dim": 32, "mlp_ratio": 2, **_GRID_TOWER},
        **_QWEN_VL,
    ),
    _row(
        "multimodal",
        "qwen2.5-vl",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        _text_around_grids,
        vision_config={
            "out_hidden_size": 32,
            "intermediate_size": 64,
            "window_size": 8,
            "fullatt_block_indexes": [1],
            **_GRID_TOWER,
        },
        **_QWEN_VL,
    ),
    _row(
        "multimodal",
        "idefics3",
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        _text_around_pictures,
        text_config={"model_type": "llama", **_GROUPED},
        vision_config=_PATCHES,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    ),
    _row(
        "multimodal",
        "blip-2",
        "Blip2ForConditionalGeneration",
        "Blip2Config",
        _text_around_pixels,
        vision_config=_PATCHES,
        qformer_config={"encoder_hidden_size": 32, "cross_attention_frequency": 1, **_ENCODER},
        text_config=_OPT,
        num_query_tokens=4,
        image_token_index=IMAGE_TOKEN,
    ),
    _row(
        "multimodal",
        "vilt",
        "ViltForQuestionAnswering",
        "ViltConfig",
        _text_and_masked_pixels,
        **_ENCODER,
        **_GRID,
    ),
    _row(
        "multimodal",
        "git",
        "GitForCausalLM",
        "GitConfig",
        _both,
        vision_config=_PATCHES,
        **_DECODER,
    ),
    _row(
        "multimodal",
        "clipseg",
        "CLIPSegForImageSegmentation",
        "CLIPSegConfig",
        _both,
        projection_dim=32,
        extract_layers=[0, 1],
        reduce_dim=16,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=32,
        **_PAIRED_TEXT,
    ),
    _row(
        "multimodal",
        "owlvit",
        "OwlViTModel",
        "OwlViTConfig",
        _both,
        projection_dim=16,
        **_PAIRED_TEXT,
    ),
    _row(
        "multimodal",
        "visual-bert",
        "VisualBertForPreTraining",
        "VisualBertConfig",
        _regions,
        visual_embedding_dim=16,
        **_ENCODER,
    ),
    _row(
        "multimodal",
        "lxmert",
        "LxmertModel",
        "LxmertConfig",
        _boxes,
        visual_feat_dim=16,
        l_layers=1,
        x_layers=1,
        r_layers=1,
        **_ENCODER,
    ),
)
