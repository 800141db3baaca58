"""`lade warmup`: compile ahead what a model's calls need, so that no first answer waits for it."""

from __future__ import annotations

import os
import sys

import lade
from lade.commands import model as models
from lade.switch import current_config


def main(arguments: list[str]) -> int:
    """Load a model, run `lade.warmup` for each length, and say what it took."""
    parser = models.Parser(
        "lade warmup",
        description=(
            "Compiles what calls of a model need, and captures CUDA graphs to see that it works. Compiled kernels are stored on disk by "
            "Triton and by torch, for later processes; graphs are not: a server calls lade.warmup(model) itself, with these arguments."
        ),
    )
    models.add_model_arguments(parser, max_new_tokens=1024)
    parser.add_argument("--prompt_tokens", default="256", help="of the calls to come, several separated by commas")
    parser.add_argument("--batch_size", type=int, default=1, help="of the calls to come")
    args = models.parse(parser, arguments)
    try:
        lengths = [int(part) for part in args.prompt_tokens.split(",")]
    except ValueError:
        parser.error(f"--prompt_tokens must be integers, separated by commas, got {args.prompt_tokens!r}")
    os.environ["USE_LADE"] = "1"
    model, _ = models.load(args)
    write = sys.stdout.write
    write(f"settings: {current_config().description}\n")
    try:
        for length in lengths:
            found = lade.warmup(model, length, args.max_new_tokens, args.batch_size, **models.how_to_choose(args))
            sizes = ", ".join(map(str, found.block_tokens)) or "none"
            write(f"prompts of {length} tokens: {found.seconds:.1f} s, blocks captured or compiled: {sizes}\n")
            for reason in found.reasons:
                write(f"  {reason}\n")
    except ValueError as error:
        parser.error(str(error))
    return 0
