"""Whether blocks of guesses compute in training mode what single tokens do: two small forwards show it.

A model in training mode without dropout, noise and the like, as in reinforcement-learning rollouts, computes the same
as in eval mode. Settings may change between calls, so each call with modules in training mode is preceded by a trial.
"""

from __future__ import annotations

import torch

from lade.block.kv_cache import cache_arguments
from lade.common.request import Request
from lade.common.state import keeping_state
from lade.common.tolerance import logits_error
from lade.models.base import ModelAdapter
from lade.verification.draws import READABLE, generator_state, keeping_generators

CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # attributes of modules
TEXTS = ((3, 4, 5), (3, 6, 7))  # ids: the first one's logits must not depend on the others


def failed_in_training(request: Request, adapter: ModelAdapter) -> str | None:
    """Models in training mode, or with modules in it, whose blocks may compute something else there."""
    if not any(part.training for part in adapter.parts):
        return None
    if request.synced_gpus:
        return "a model in training mode is tried out first, in which other processes would have to take part"
    return training_reason(adapter)


@torch.no_grad()
def training_reason(adapter: ModelAdapter) -> str | None:
    """Why lookahead cannot run while modules of the model are in training mode, as a sentence; None if it can."""
    weights = [weight.device for weight in adapter.model.parameters()]
    devices = {torch.device("cpu"), *(device for device in weights if device.type in READABLE)}
    ids = torch.tensor(TEXTS, device=adapter.model.get_input_embeddings().weight.device) % adapter.num_tokens
    if any(getattr(part, name, False) for part in adapter.parts if part.training for name in CHECKPOINTING):
        return "gradient checkpointing is on in training mode, where transformers keeps no cache"
    logits = []
    try:
        with keeping_generators(adapter.model), keeping_state(adapter.model):
            before = {device: generator_state(device) for device in devices}
            for text in ids:
                cache = adapter.make_cache(len(text))
                outputs = adapter.model(input_ids=text[None], **cache_arguments(cache))
                logits.append(outputs.logits[0, 0])
            is_random = not all(torch.equal(generator_state(device), before[device]) for device in devices)
    except Exception as problem:  # foreign code may raise anything
        return f"a trial forward in training mode failed ({type(problem).__name__}: {problem})"
    if is_random:
        return "the model draws random numbers in training mode (dropout, noise, ...), which no block of guesses can repeat"
    if logits_error(*logits) is not None:
        return "in training mode the logits of a token are not the same each time, or depend on later tokens"
    return None
