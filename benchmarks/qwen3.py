"""Shared by the benchmarks: Qwen3 from transformers, deep and narrow.

Random weights, hidden size 64, 16 tokens, no cache: small tensors, so that what a compiler adds
around them can be seen. tripwire isn't imported here: some processes must do without it.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

WIDTH = 64
TOKENS = 16
VOCABULARY = 256


class LogitsOf(nn.Module):
    """A language model that returns its logits alone: torch.jit takes no ModelOutput."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def build_qwen3(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """A narrow Qwen3 with random weights, and tokens for it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=WIDTH // 4,
        max_position_embeddings=128,
        use_cache=False,
    )
    model = LogitsOf(Qwen3ForCausalLM(config)).eval()
    return model, torch.randint(0, VOCABULARY, (1, TOKENS))
