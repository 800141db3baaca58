"""The private and unstable names of transformers and torch that lade uses.

What can be imported is imported here, and `NAMES` and `CHECKS` list the rest. If something is missing, importing this
module raises an ImportError that says so; `require_names()` raises one, before anything is patched, if an attribute is
missing, a signature has changed, or small real objects behave differently. tests/test_compat.py finds private names
that are used elsewhere and not listed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from lade.common.version import NEWEST, TESTED, TESTED_TORCH, is_newer_than_tested, version_problem


def incompatible(problem: str) -> ImportError:
    """An error that says the problem, the installed and the tested versions."""
    found = transformers.__version__
    problem = version_problem(found) or f"lade is not compatible with the installed transformers or torch: {problem}"
    remedy = f"; pip install 'transformers=={NEWEST}.*'" if is_newer_than_tested(found) else ""
    return ImportError(
        f"{problem}. Found transformers {found} (tested: {TESTED}) and torch {torch.__version__} "
        f"(tested: {TESTED_TORCH}); nothing has been patched{remedy}"
    )


def origin_of(error: BaseException) -> str:
    """The import error's own cause, such as a torchvision that does not fit, in parentheses; empty without any."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return "" if first is error else f" ({type(first).__name__}: {first})"


try:
    from torch.nn.modules import module as nn_module
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel, cache_utils
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.generation import logits_process
    from transformers.generation import utils as generation_utils
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import GenerateDecoderOnlyOutput
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except (ImportError, AttributeError) as error:
    raise incompatible(f"{error}{origin_of(error)}") from error

# generate() sets this mark on a caller's cache in 5.18, not yet in 5.12; lade sets it in every version.
CALLERS_CACHE_MARK = "_is_user_defined"
# Where generate() keeps the length of a mask that it leaves out because it hides nothing; not in every version.
MASK_LENGTH = "_mask_length"
# The cache among the arguments and outputs of models and of generate(): the name since 5.24, and the older one, which
# 5.24 still takes as an argument. `CACHE_NAME` is the one that this version uses itself.
CACHE_NAMES = ("cache", "past_key_values")
CACHE_NAME = next((name for name in CACHE_NAMES if name in GenerateDecoderOnlyOutput.__dataclass_fields__), "cache")
MAMBA_CACHE_NAME = "cache_params"  # of models without any attention
# Of nn.Module: the hooks around a forward, and all dictionaries that a shadow of it copies.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
OWN_DICTIONARIES = ("_parameters", "_buffers", "_modules", *HOOKS)
# Classes of cache layers that not every version has.
BOTH_LAYER: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
STATE_LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
WINDOWED_BOTH_LAYER: Any = getattr(cache_utils, "LinearAttentionAndSlidingWindowAttentionLayer", None)
INDEXED_LAYER: Any = getattr(cache_utils, "DynamicIndexedLayer", None)  # each query selects its keys
NO_LAYER: Any = getattr(cache_utils, "DummyLayer", None)
# Those that keep every key, except those out of a sliding window, or share another layer's keys.
PLAIN_LAYERS = tuple(kind for kind in (DynamicLayer, DynamicSlidingWindowLayer, NO_LAYER) if kind is not None)
# Arguments that generate() passes with the prompt only; in older versions each model handles them.
PROMPT_ARGUMENTS = frozenset(getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))

# By what has them, the attributes that lade uses. With the arguments that lade passes, which must be the first ones.
NAMES: dict[Any, tuple[str, ...]] = {
    GenerationMixin: (
        "generate(self, inputs)",
        "_sample(self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)",
        "_beam_search",
        "_assisted_decoding",
        "_prefill(self, input_ids, generation_config, model_kwargs)",
        "_has_unfinished_sequences(self, this_peer_finished, synced_gpus, device)",
        "_optimize_model_for_decode(self)",
        "_update_model_kwargs_for_generation(self, outputs, model_kwargs)",
        "prepare_inputs_for_generation(self, input_ids)",
        "init_continuous_batching",
    ),
    PreTrainedModel: ("_is_stateful", "_supports_sdpa", "_can_set_attn_implementation()", "tp_size"),
    PreTrainedConfig: ("get_text_config(self, decoder)", "sub_configs"),
    GenerateDecoderOnlyOutput: ("scores", "logits"),
    transformers.AttentionInterface: ("register",),
    torch.nn.Module: ("_compiled_call_impl",),
    nn_module: ("_global_forward_hooks", "_global_forward_pre_hooks"),
}
if torch.backends.cuda.is_built():
    NAMES[torch._C] = ("_cuda_clearCublasWorkspaces", "_cuda_endAllocateToPool", "_cuda_releasePool")
if torch.distributed.is_available():
    NAMES[torch.distributed.distributed_c10d] = ("_get_default_store()", "default_pg_timeout")
    NAMES[torch.distributed.ProcessGroup] = ("_get_backend",)
    NAMES[torch._C._distributed_c10d.Backend.Options] = ("_timeout",)
# Not checked: without _linear_pointwise, _reorder_linear_weight, _get_mkldnn_enabled or _version no weights are packed,
# without _is_avx512_bf16_supported blocks in bfloat16 stay small on a CPU, without _is_amx_tile_supported weights are
# packed for nothing, and without _torchdynamo_orig_callable a compiled forward counts as patched.


# Each of the following says whether what `CHECKS` names is as lade needs it. An exception counts as no.


def small_config(**settings: Any) -> Any:
    return transformers.LlamaConfig(num_hidden_layers=1, **settings)


def tells_attention() -> bool:
    config = small_config(attn_implementation="eager")
    before, config._attn_implementation = config._attn_implementation, "sdpa"
    return (before, config._attn_implementation) == ("eager", "sdpa")


def tells_ropes() -> bool:
    """Both from `rope_parameters` and from the `rope_scaling` of older configuration files."""
    new = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    configs = small_config(rope_parameters=new), small_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    return [config.rope_parameters.get("rope_type") for config in configs] == ["dynamic"] * 2


def pads_ended_rows() -> bool:
    config: Any = GenerationConfig(pad_token_id=3)
    owner: Any = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    GenerationMixin._prepare_special_tokens(owner, config, True, device="cpu")
    return int(config._pad_token_tensor) == 3


def holds_keys() -> bool:
    cache: Any = transformers.DynamicCache(config=small_config())
    layer, states = cache.layers[0], torch.zeros(1, 1, 2, 1, device="cpu")
    begins = type(layer) is DynamicLayer and layer.keys is layer.values is None and not cache.offloading
    cache.update(states, states, 0)
    return begins and cache.get_seq_length() == 2 and layer.keys.shape == layer.values.shape == states.shape


def slides() -> bool:
    config = small_config()
    config.sliding_window, config.layer_types = 4, ["sliding_attention"]
    layer: Any = transformers.DynamicCache(config=config).layers[0]
    return type(layer) is DynamicSlidingWindowLayer and (layer.sliding_window, layer.cumulative_length) == (4, 0)


def wants_no_more() -> bool:
    known = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    if unknown := sorted(CacheLayerMixin.__abstractmethods__ - known - {"get_max_cache_shape"}):
        raise TypeError(f"a layer needs {', '.join(unknown)}")
    return True


def tell_ends() -> bool:
    length, end = transformers.MaxLengthCriteria(5), transformers.EosTokenCriteria(2)
    criteria = transformers.StoppingCriteriaList([length, end])
    return criteria.max_length == length.max_length == 5 and end.eos_token_id.flatten().tolist() == [2]


def has_names(make: Callable[[], Any], *names: str) -> Callable[[], bool]:
    """A check that an object has attributes. Raises an AttributeError that says which it has not."""
    return lambda: bool(attrgetter(*names)(make()))


# What decides how generate() runs a call, and what it returns.
SETTINGS = ("is_assistant", "prefill_chunk_size", "cache_implementation", "do_sample", "temperature", "max_length")
RETURNED = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Parameters of generate() that are looked up in its frame.
IN_FRAME = {"streamer", "synced_gpus", "assistant_model", "kwargs"}
CHECKS: dict[str, Callable[[], bool]] = {
    "parameters of generate()": lambda: {*inspect.signature(GenerationMixin.generate).parameters} >= IN_FRAME,
    "GenerationConfig": has_names(GenerationConfig, *RETURNED, *SETTINGS),
    "GenerationConfig._pad_token_tensor": pads_ended_rows,
    "StoppingCriteriaList.max_length": tell_ends,
    "RepetitionPenaltyLogitsProcessor": lambda: (
        transformers.RepetitionPenaltyLogitsProcessor(2.0).prompt_ignore_length is None
    ),
    "GenerateDecoderOnlyOutput's cache": lambda: CACHE_NAME in GenerateDecoderOnlyOutput.__dataclass_fields__,
    "PreTrainedModel._is_stateful": lambda: PreTrainedModel._is_stateful is False,
    "PreTrainedModel._supports_sdpa": lambda: PreTrainedModel._supports_sdpa is False,
    "PreTrainedConfig._attn_implementation": tells_attention,
    "PreTrainedConfig.rope_parameters": tells_ropes,
    "attention sdpa": lambda: "sdpa" in ALL_ATTENTION_FUNCTIONS and "sdpa" in ALL_MASK_ATTENTION_FUNCTIONS,
    "CacheLayerMixin": wants_no_more,
    "DynamicLayer": holds_keys,
    "DynamicSlidingWindowLayer": slides,
    "torch.nn.Module": has_names(torch.nn.Module, *OWN_DICTIONARIES),
}


def problems() -> Iterator[str]:
    """The incompatibilities found, a sentence each."""
    for owner, names in NAMES.items():
        for name, _, passed in (each.partition("(") for each in names):
            found: Any = getattr(owner, name, None)
            place = getattr(owner, "__name__", type(owner).__name__)
            if not hasattr(owner, name):
                yield f"{place}.{name} is missing"
            elif passed and not takes_first(found, tuple(filter(None, passed.rstrip(")").split(", ")))):
                yield f"{place}.{name} takes {inspect.signature(found)} instead of ({passed}"
    for name, is_known in CHECKS.items():
        try:
            problem = None if is_known() else "is not what it was"
        except Exception as error:  # a name with another meaning may raise anything
            problem = f"is not what it was ({type(error).__name__}: {error})"
        if problem is not None:
            yield f"{name} {problem}"


def takes_first(function: Callable[..., Any], passed: tuple[str, ...]) -> bool:
    """Whether `passed` are the first parameters, and all others have defaults."""
    signature = inspect.signature(function)
    try:
        signature.bind(*passed)
    except TypeError:
        return False
    return tuple(signature.parameters)[: len(passed)] == passed


def require_names() -> None:
    """Raise an ImportError that lists what in transformers or torch is not as lade needs it. Changes nothing."""
    found = version_problem(transformers.__version__) or "; ".join(problems())
    if found:
        raise incompatible(found)


class CacheLayer(CacheLayerMixin):
    """The base class of lade's cache layers."""

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.18."""
        return int(self.get_max_length())


def logits_processors(names: str) -> frozenset[Any]:
    """The classes among transformers' logits processors with these names, if this version has them.

    One under a new name is treated like a user's own.
    """
    found = vars(logits_process)
    return frozenset(found[name] for name in names.split() if name in found)
