"""Small random models of many `transformers` architectures, with inputs made on the spot.

Every row of `ARCHITECTURES` names one architecture, builds it, and makes inputs for it.
No weights are downloaded. Sizes are tiny: two or three layers, a hidden size of 16 or 32,
a vocabulary of 100. A forward pass takes well under a second on a CPU.

`build()` seeds the global torch generator with 0, so its weights are the same every time.
The model it returns is in eval mode. `inputs(seed)` uses a generator of its own. Its shapes
do not depend on the seed. Token ids lie in 5..99, so no special token is among them, save
the image placeholders of LLaVA.

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
    "audio" and "multimodal".
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
    # Text encoders.
    _masked("bert", "Bert", **_ENCODER),
    _masked("roberta", "Roberta", **_ENCODER),
    _masked("distilbert", "DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4, **_SMALL),
    _masked("albert", "Albert", embedding_size=16, **_ENCODER),
    _masked("electra", "Electra", embedding_size=16, **_ENCODER),
    _masked("mpnet", "MPNet", **_ENCODER),
    _masked("deberta-v2", "DebertaV2", relative_attention=True, **_DISENTANGLED, **_ENCODER),
    _masked("modernbert", "ModernBert", local_attention=8, **_ENCODER, **_IDS, **_CLS_SEP),
    # Encoder-decoders.
    _pair("t5", "T5ForConditionalGeneration", "T5Config", **_T5),
    _pair("bart", "BartForConditionalGeneration", "BartConfig", **_BART),
    _pair("marian", "MarianMTModel", "MarianConfig", **_BART),
    _pair("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_BART),
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
    # State space models.
    _causal("mamba", "Mamba", "state-space", **_MAMBA, time_step_rank=4),
    _causal("mamba2", "Mamba2", "state-space", **_MAMBA, num_heads=8, head_dim=8, **_CHUNKS),
    # Vision.
    _image("vit", "ViT", **_PATCHES),
    _image("deit", "DeiT", **_PATCHES),
    _image("beit", "Beit", layer_scale_init_value=1.0, **_PATCHES),
    _image("dinov2", "Dinov2", mlp_ratio=2, **_LAYERS, **_GRID),
    _image("swin", "Swin", embed_dim=16, num_heads=[2, 4], depths=[2, 1], **_WINDOWS),
    _image("convnext", "ConvNext", num_stages=2, layer_scale_init_value=1.0, **_STAGES),
    _image("resnet", "ResNet", embedding_size=16, layer_type="basic", **_STAGES),
    _image("segformer", "Segformer", **_PYRAMID),
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
)
