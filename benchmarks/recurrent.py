"""Speed of generate() on a model with recurrent states, with the shape of Qwen3.5-0.8B and random weights.

    python benchmarks/recurrent.py --dtype bfloat16

First what a block of q rows costs, relative to plain's forward of one token. Then the speed at given tokens per step
on a text that is known in advance (see known_acceptance.py): chains of guesses, of which so much is right. Last what
transformers' prompt lookup says to such a model. Prints medians over the trials, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness
import known_acceptance
import shapes
import step_cost
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

import lade
from lade import models
from lade.block.kv_cache import cache_arguments
from lade.forward.base import BlockCall, path_for
from lade.models import adapter_for
from lade.models.chains import ChainAdapter

ROWS = (1, 2, 4, 8, 16)
SIZES = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim vocab_size
""".split()  # noqa: SIM905
SHAPES = {
    "tiny": (64, 128, 4, 4, 2, 16, 4, 4, 16, 16, 256),  # nobody's: to see whether the command works
    "0b8": (1024, 3584, 24, 8, 2, 256, 16, 16, 128, 128, 248_320),  # Qwen3.5-0.8B
}


def model_of(args: argparse.Namespace) -> Any:
    """A model that says its last token again, by a margin that no rounding reaches."""
    sizes = dict(zip(SIZES, SHAPES[args.shape], strict=True))
    config = Qwen3_5TextConfig(**sizes, tie_word_embeddings=True, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM._from_config(config, dtype=getattr(torch, args.dtype)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(known_acceptance.LARGE)
    return model


@torch.no_grad()
def block_costs(model: Any, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of plain's forward of one token, and of blocks by their rows."""
    cache, ids = DynamicCache(config=model.config), torch.randint(3, model.config.vocab_size, (1, args.context))
    model(input_ids=ids, **cache_arguments(cache))
    calls = [lambda: model(input_ids=ids[:, :1], **cache_arguments(cache))]
    for num_rows in ROWS:
        path = path_for(BlockCall(adapter=adapter_for(model), device=model.device, num_slots=args.context + num_rows))
        filled = step_cost.filled_cache(path, args.context, num_rows, 1)
        block = step_cost.make_block(path.adapter, filled, num_rows, 1)
        calls.append(lambda path=path, block=block, filled=filled: path.forward(block, filled))
    times = step_cost.milliseconds(calls, lambda: harness.synchronize(model), args.trials)
    found = {name: time["median"] for name, time in zip(("plain", *map(str, ROWS)), times, strict=True)}
    for name, time in found.items():
        print(f"{name:>6} {time:>9.2f} ms {time / found['plain']:>7.2f}")
    return found


def said_to_prompt_lookup(model: Any) -> str | None:
    inputs = shapes.random_prompts(model, 1, 1, 16)[0]
    with lade.enabled(False):
        try:
            model.generate(**inputs, max_new_tokens=4, prompt_lookup_num_tokens=3)
        except ValueError as error:
            return str(error)
    return None


@contextmanager
def known_to_lade() -> Iterator[None]:
    """No self-check, which sees no effect of states beside embeddings as large as these."""
    models.register_adapter(Qwen3_5TextConfig.model_type, ChainAdapter)
    try:
        yield
    finally:
        models._vouched_for.discard(Qwen3_5TextConfig.model_type)
        models._adapters.pop(Qwen3_5TextConfig.model_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0b8", choices=list(SHAPES))
    known_acceptance.add_arguments(parser, block=8)
    args = parser.parse_args()
    lade.augment_all()
    model = model_of(args)
    names = ("shape", "block", "context", "max_new_tokens", "trials", "prompts")
    figures: dict[str, Any] = {"benchmark": "recurrent", "environment": harness.environment(model)}
    figures |= {name: getattr(args, name) for name in names}
    with harness.reporting(figures, args.out), known_to_lade():
        figures["milliseconds"] = block_costs(model, args)
        figures["methods"] = known_acceptance.measure(model, args)
        figures["prompt_lookup"] = said_to_prompt_lookup(model)
        print(f"prompt lookup: {figures['prompt_lookup']}")


if __name__ == "__main__":
    main()
