"""Calls with lade beside the same calls without it, in threads, and watched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

import lade
from support.models import generate_plain, prompt, seeded


def run_both(model, inputs=None, cache=None, **arguments):
    """Figures of a call whose text is plain generate()'s from the same seed, as is the state of torch's generator.

    cache: makes the `past_key_values` of each call.
    """
    inputs, arguments = prompt() if inputs is None else inputs, {"max_new_tokens": 24} | arguments
    caches = [{"past_key_values": cache()} if cache else {} for _ in range(2)]
    expected, states = seeded(generate_plain, model, inputs, **arguments, **caches[0])
    found, states_after = seeded(model.generate, **inputs, **arguments, **caches[1])
    stats = lade.last_stats()
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    assert all(map(torch.equal, states_after, states))
    return stats


def compare(model, inputs=None, reason=None, **arguments):
    """`run_both`. reason: part of why lookahead does not run; None where it does, with blocks of several tokens."""
    stats = run_both(model, inputs, **arguments)
    if reason is not None:
        assert stats.fallback_reason is not None
        assert reason in stats.fallback_reason
        return stats
    assert stats.fallback_reason is None
    assert len(stats.block_tokens) == stats.steps - 1
    assert max(stats.block_tokens, default=2) > 1  # the prompt's forward may have given all tokens
    return stats


def in_threads(function, *values):
    """What a function returns for each value, called with all of them at once."""
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(function, values))


def note_calls(monkeypatch, owner, name, note=lambda *args, **named: args):
    """A list of what note() says of the arguments of each call of owner's function `name`."""
    noted, function = [], getattr(owner, name)

    def watched(*args, **named):
        noted.append(note(*args, **named))
        return function(*args, **named)

    monkeypatch.setattr(owner, name, watched)
    return noted
