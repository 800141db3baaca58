"""Record what 400 calls of generate() with lade give, and compare a later version with the recording.

    python tests/record_calls.py BEFORE.json                       # on the version before a change
    python tests/record_calls.py AFTER.json --against BEFORE.json  # after it; exit status 1 if they differ

Each call has a family, arguments and settings of its own, drawn from the call's number. Compared are the tokens, the
generator's state and why lookahead did not run, exactly; scores within rounding, since the sizes of blocks may follow
a clock. float64 and float32 on one machine: other machines round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]
os.environ |= {"USE_LADE": "1", "LADE_CACHE": "0"}

from support import VOCAB, tiny_llama  # noqa: E402
from support.families import FAMILIES, OTHERS, RECURRENT, named  # noqa: E402

import lade  # noqa: E402

NUM_CALLS = 400
SCORE_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}  # of a sum of absolute scores, relative


@cache
def model_of(name: str, dtype: torch.dtype) -> Any:
    if name == "tiny":
        return tiny_llama(dtype)
    return named(name).build() if dtype == torch.float64 else named(name).build().to(dtype)


def names() -> list[str]:
    return [family.name for family in (*FAMILIES, *OTHERS, *RECURRENT) if family.exists]


def arguments_of(draw: random.Random) -> dict[str, Any]:
    """Arguments of generate() in which some of everything appears."""
    do_sample = draw.random() < 0.5
    found: dict[str, Any] = {"max_new_tokens": draw.randint(5, 28), "do_sample": do_sample}
    if do_sample:
        found |= {"temperature": draw.choice([0.4, 0.7, 1.0]), "top_k": draw.choice([None, 5, 20])}
        found |= {"top_p": draw.choice([None, 0.9]), "num_return_sequences": draw.choice([1, 1, 1, 2])}
    if draw.random() < 0.3:
        found["repetition_penalty"] = draw.choice([0.9, 1.3])
    if draw.random() < 0.2:
        found["no_repeat_ngram_size"] = 3
    if draw.random() < 0.3:
        found["eos_token_id"] = draw.sample(range(3, VOCAB), 4)
    if draw.random() < 0.2:
        found["prefill_chunk_size"] = draw.randint(3, 9)
    if draw.random() < 0.2:
        found["cache_implementation"] = draw.choice(["dynamic", "static"])
    if draw.random() < 0.4:
        found |= {"return_dict_in_generate": True, "output_scores": True}
    return found


def settings_of(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        sizes = {"LEVEL": draw.randint(2, 5), "WINDOW_SIZE": draw.randint(1, 5), "GUESS_SET_SIZE": draw.randint(1, 5)}
        return {"MODE": "lookahead", "ADAPTIVE": draw.choice([0, 1]), **sizes}
    return {"MODE": "tree", "ADAPTIVE": draw.choice([0, 1]), "MAX_BLOCK": draw.choice([4, 16, 32])}


def call(number: int) -> dict[str, Any]:
    """Make one call. Returns what it gave, or the error that it raised."""
    draw = random.Random(number)
    every = names()
    name = "tiny" if number % 3 == 0 else every[number // 3 * 2 % len(every) + number % 3 - 1 - len(every)]
    dtype = torch.float64 if draw.random() < 0.7 else torch.float32
    model = model_of(name, dtype)
    batch_size, length = draw.choice([1, 1, 2, 3]), draw.randint(4, 26)
    ids = torch.tensor([[draw.randint(3, 3 + draw.choice([6, 40])) for _ in range(length)] for _ in range(batch_size)])
    mask = torch.ones_like(ids)
    if batch_size > 1 and draw.random() < 0.5:
        mask[0, : length // 3] = 0
    lade.config_lade(**settings_of(draw))
    arguments = arguments_of(draw)
    torch.manual_seed(number)
    found: dict[str, Any] = {"family": name, "dtype": str(dtype).removeprefix("torch.")}
    try:
        result = model.generate(ids, attention_mask=mask, pad_token_id=0, **arguments)
    except Exception as error:  # what it raises is part of the recording
        return found | {"error": f"{type(error).__name__}: {error}"[:200]}
    if arguments.get("return_dict_in_generate"):
        finite = [scores[scores.isfinite()].double().abs().sum().item() for scores in result.scores]
        found["scores"], result = finite, result.sequences
    stats = lade.last_stats()
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
    return found | {"tokens": result.tolist(), "generator": state, "reason": stats.fallback_reason}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first part in which two records of a call differ, as a sentence; None if there is none."""
    for part in sorted({*found, *expected} - {"scores"}, reverse=True):
        if found.get(part) != expected.get(part):
            return f"{part}: {expected.get(part)!r} -> {found.get(part)!r}"
    pairs = zip(found.get("scores", ()), expected.get("scores", ()), strict=True)
    off = max((abs(one - other) / max(1.0, abs(other)) for one, other in pairs), default=0.0)
    return f"scores are off by {off:.2g}" if off > SCORE_TOLERANCE[found["dtype"]] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="a recording to compare with")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    lade.augment_all()
    calls = [call(number) for number in range(NUM_CALLS)]
    options.out.write_text(json.dumps(calls, indent=0), encoding="utf-8")
    by_lookahead = sum("tokens" in found and found["reason"] is None for found in calls)
    print(f"{len(calls)} calls, {by_lookahead} by lookahead, {sum('error' in found for found in calls)} raised")
    if options.against is None:
        return
    before = json.loads(options.against.read_text(encoding="utf-8"))
    found = [(number, difference(*pair)) for number, pair in enumerate(zip(calls, before, strict=True))]
    differing = [(number, text) for number, text in found if text is not None]
    for number, text in differing:
        print(f"call {number} ({calls[number]['family']}): {text}"[:400])
    print(f"{len(differing)} calls differ")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
