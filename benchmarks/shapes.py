"""Models with the shape of known ones and random weights, for when only the cost of a step is wanted.

Random weights have no real text: what such a model says tells nothing about how well a drafter guesses.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# hidden size, inner size of the MLP, layers, query heads, key/value heads, vocabulary, tied embeddings
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256, True),  # nobody's: to see whether a command works
    "1b": (2048, 8192, 16, 32, 8, 128_256, True),  # Llama-3.2-1B
    "1b6": (2048, 8192, 6, 32, 8, 32_000, True),  # six layers of that and a smaller vocabulary: 0.4 billion weights
    "7b": (4096, 11_008, 32, 32, 32, 32_000, False),  # Llama-2-7B
    "8b": (4096, 14_336, 32, 32, 8, 128_256, False),  # Llama-3.1-8B
    "13b": (5120, 13_824, 40, 40, 40, 32_000, False),  # Llama-2-13B
    "70b": (8192, 28_672, 80, 64, 8, 32_000, False),  # Llama-2-70B
}


def add_shape_argument(parser: argparse.ArgumentParser, why: str) -> None:
    parser.add_argument(
        "--shape", choices=list(SHAPES), help=f"random weights of this shape in place of --model_path: {why}"
    )


def shape_config(name: str, max_positions: int = 4096) -> LlamaConfig:
    """The configuration of a shape; it never ends a text by itself."""
    hidden, inner, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
        max_position_embeddings=max_positions,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )


def random_model(name: str, device: str, dtype: torch.dtype, max_positions: int = 4096) -> Any:
    """A model of that shape, its weights drawn on the device itself."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(shape_config(name, max_positions), dtype=dtype)
    return model.to(device).eval()


def random_prompts(model: Any, count: int, batch_size: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Batches of random ids. Each: input_ids and attention_mask, [batch_size, length]."""
    numbers = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = torch.randint(3, model.config.vocab_size, (batch_size, length), generator=numbers).to(model.device)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return batches


def repeating_model(name: str, dtype: torch.dtype, max_positions: int) -> Any:
    """A model of that shape whose weights repeat 4 million drawn numbers: drawing all takes minutes on a CPU."""
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(shape_config(name, max_positions), dtype=dtype)
    model = model.to_empty(device="cpu").eval()
    drawn = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    for weight in model.parameters():
        for part in weight.data.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)  # whose frequencies are not among the weights
    model.tie_weights()
    return model
