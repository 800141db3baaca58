"""Functions that plain generate() calls in its loop, and lade does not, or not once per token.

Other libraries replace some of them, for instance to quantize or to compress a cache. A replacement would have no
effect on a lookahead call, so that such a call goes to the original `generate()`. Functions are judged by the file and
module of their code, not by comparison with those that were there first, which may have been replaced already.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import types
from typing import Any

LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
OF_CACHES = "get_mask_sizes get_query_offset get_seq_length is_compileable is_dummy is_linear is_sliding update"
OF_LAYERS = "get_mask_sizes get_seq_length lazy_initialization update"
CACHE_METHODS = frozenset(f"{OF_CACHES} {OF_LAYERS}".split()) - {"is_compileable", "is_sliding"}  # set by some layers
# By class or module; tests/test_bypassed.py finds the names by tracing calls. Versions of transformers lack some.
CALLED = {
    "torch": "any argmax cat isin multinomial",
    "torch.nn.functional": "softmax",
    "transformers.generation.utils.GenerationMixin": (
        "_update_model_kwargs_for_generation prepare_inputs_for_generation"
    ),
    "transformers.generation.utils.StopCheck": "__call__ __init__ finish",
    "transformers.generation.utils.DeferredStopCheck": "is_supported",
    "transformers.generation.logits_process.LogitsProcessorList": "__call__",
    "transformers.generation.stopping_criteria.StoppingCriteriaList": "__call__ max_length",
    "transformers.generation.stopping_criteria.EosTokenCriteria": "__call__",
    "transformers.generation.stopping_criteria.MaxLengthCriteria": "__call__",
    "transformers.generation.stopping_criteria.StopStringCriteria": "__call__",
    "transformers.cache_utils.DynamicCache": OF_CACHES,
    **dict.fromkeys((f"transformers.cache_utils.{kind}" for kind in LAYERS), OF_LAYERS),
    "transformers.masking_utils": """
        _ignore_causal_mask_sdpa _non_vmap_expansion_sdpa _preprocess_mask_arguments and_masks causal_mask_function
        create_causal_mask create_masks_for_generate create_sliding_window_causal_mask eager_mask
        find_first_full_attention_index prepare_padding_mask sdpa_mask sliding_window_causal_mask_function
        sliding_window_overlay
    """,
}
IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType)
PACKAGES = ("torch", "transformers")
DECORATORS = (*PACKAGES, "contextlib")

_as_written: dict[tuple[Any, str], tuple[Any, Any]] = {}  # functions that are, and their code


def replaced_function() -> str | None:
    """The path of a function in `CALLED` that its package has not written; None if there is none."""
    return next((path for owner, name, path in _places() if not is_as_written(owner, name)), None)


@functools.cache
def _places() -> tuple[tuple[Any, str, str], ...]:
    """(class or module; name in it; path) of all functions in `CALLED` that this installation has."""
    owners = ((path, pkgutil.resolve_name(path)) for path in CALLED if _exists(path))
    places = ((owner, name, f"{path}.{name}") for path, owner in owners for name in CALLED[path].split())
    return tuple(place for place in places if hasattr(*place[:2]))


def _exists(path: str) -> bool:
    try:
        return bool(pkgutil.resolve_name(path))
    except AttributeError:
        return False


def is_as_written(owner: Any, name: str) -> bool:
    """Whether an attribute of a class or module is the function that torch or transformers defines under that name."""
    found = getattr(owner, name)
    code = getattr(found, "__code__", None)
    if _as_written.get((owner, name)) != (found, code):
        kind = next((kind for kind in getattr(owner, "__mro__", ()) if name in vars(kind)), owner)
        if not _is_of(found, kind, name):
            return False
        _as_written[owner, name] = found, code
    return True


def _is_of(found: Any, owner: Any, name: str) -> bool:
    """Whether a function was defined in a class or module, with no decorators but those of its packages."""
    is_module = isinstance(owner, types.ModuleType)
    home, qualname = (owner.__name__, name) if is_module else (owner.__module__, f"{owner.__qualname__}.{name}")
    if isinstance(found, IN_C):
        return home.partition(".")[0] in PACKAGES and found.__name__ == name
    function = getattr(found, "fget", found)  # of a property
    while isinstance(function, types.FunctionType):
        module = str(function.__globals__.get("__name__"))
        file = os.path.splitext(function.__code__.co_filename)[0].replace(os.sep, "/").removesuffix("/__init__")
        is_there = file.endswith(module.replace(".", "/")) and function.__globals__ is vars(sys.modules.get(module, os))
        if not (is_there and module.partition(".")[0] in DECORATORS):
            return False
        if not hasattr(function, "__wrapped__"):
            return (module, function.__qualname__) == (home, qualname)
        function = function.__wrapped__
    return False
