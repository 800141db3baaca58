"""The block attention as a setting of transformers' attention interface, named "lade_block".

While a model is in `block_attention_mode`, a forward whose `attention_mask` is a packed mask (`lade.kernels.pack_mask`) goes
through `lade.kernels.block_attention`; any other forward of it, a prompt's or one that a logits processor makes, goes through
the model's own attention and mask, as before. The layer itself says which window, soft cap and sinks it has. Floor 2.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.kernels import block_attention, is_packed

NAME = "lade_block"
# Arguments of some families' layers that change the scores and that the kernel does not know.
REFUSED_ARGUMENTS = ("position_bias", "indices", "block_indices", "sinks")


@dataclass
class _Held:
    """A configuration's own attention while it is set to lade's, and how many threads need it so."""

    own: str
    holders: int = 0


_held: dict[int, _Held] = {}  # by id() of the configuration, which lives as long as the model in the mode
_lock = threading.Lock()


@contextmanager
def block_attention_mode(model: PreTrainedModel) -> Iterator[None]:
    """Set the model's attention to "lade_block" and back, also after an exception. Threads may share a model."""
    AttentionInterface.register(NAME, lade_block_forward)
    AttentionMaskInterface.register(NAME, lade_block_mask)
    config = model.config.get_text_config(decoder=True)
    with _lock:
        held = _held.setdefault(id(config), _Held(config._attn_implementation))
        held.holders += 1
        config._attn_implementation = {"": NAME}  # the "" leaves sub-configurations alone
    try:
        yield
    finally:
        with _lock:
            held.holders -= 1
            if not held.holders:
                config._attn_implementation = {"": held.own}
                del _held[id(config)]


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why blocks of this model cannot go through the block attention, as a sentence; None when they can."""
    config = model.config.get_text_config(decoder=True)
    if not model._can_set_attn_implementation():
        return f"{type(model).__name__} does not use transformers' attention interface"
    if getattr(config, "attention_chunk_size", None):
        return "attention in chunks is known to the mask alone, and a packed mask has no chunks"
    return None


def lade_block_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in each layer. query: [B, H, q, D]; key, value: [B, H_kv, C, D] of the whole cache.

    Returns [B, q, H, D_v] and None for the weights, which are never formed.
    """
    if not is_packed(attention_mask):
        return _own_attention(module)(module, query, key, value, attention_mask, **arguments)
    refused = [name for name in REFUSED_ARGUMENTS if arguments.get(name) is not None]
    if refused:
        raise NotImplementedError(
            f"the block attention knows nothing of {refused[0]}, passed by {type(module).__name__}"
        )
    scale = arguments.get("scaling")
    output = block_attention(
        query,
        key,
        value,
        attention_mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
        window=arguments.get("sliding_window"),
    )
    return output, None


def lade_block_mask(*arguments: Any, config: Any, **named: Any) -> Any:
    """The mask that the model's own attention wants; 4-D masks, packed ones too, never get here."""
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS.get(_own_name(config))
    return make_mask(*arguments, config=config, **named) if make_mask else None


def _own_name(config: Any) -> str:
    held = _held.get(id(config))
    own = held.own if held else config._attn_implementation  # another thread may just have left the mode
    return "eager" if own == NAME else own  # a copy made in the mode does not know; eager is right for every family


def _own_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What the module would have called by itself; its eager attention stands beside its class."""
    eager: Any = getattr(inspect.getmodule(type(module)), "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(_own_name(module.config), eager)
