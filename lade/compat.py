"""Every private or unstable name of transformers and torch that lade uses, in one table.

`NAMES` lists where lade uses each name and what must hold of it. `require_names()` checks all of them when the patch is
applied, before anything is changed: each name exists, accepts lade's arguments, and behaves as expected on small real
objects. Names that are deep in transformers or have moved are imported from here (`from lade.compat import
DynamicLayer`) and resolved at first use, so importing this module imports neither torch nor transformers.
tests/test_compat.py finds private names that are missing from the table.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

logger = logging.getLogger("lade")

OLDEST, NEWEST, FIRST_UNSUPPORTED = "5.8", "5.24", "6"  # of transformers; tested with the first two
TESTED = f"{OLDEST} to {NEWEST}"
TESTED_TORCH = "2.13"
# generate() sets this mark on a caller's cache in 5.18, not yet in 5.12; lade sets it in every version.
CALLERS_CACHE_MARK = "_is_user_defined"
# The cache among the arguments and outputs of models and of generate(): the name since 5.24, and the older one, which
# 5.24 still takes as an argument. `CACHE_NAME` is the one that this version uses itself.
CACHE_NAMES = ("cache", "past_key_values")
MAMBA_CACHE_NAME = "cache_params"  # of models without any attention
# Of nn.Module: the hooks around a forward.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# Of nn.Module: dictionaries that a shadow of it copies.
OWN_DICTIONARIES = ("_parameters", "_buffers", "_modules", *HOOKS)
# Methods of lade's cache layers; any other abstract method would be missing.
LAYER_METHODS = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
# Messages of torch's plain RuntimeErrors when an allocation fails.
NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "ALLOC_FAILED")
# Types of rotary embeddings whose frequencies depend on the sequence length.
MOVING_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Name:
    """One name. check: given the named object, returns what is wrong with it, or None; an exception counts as wrong.

    A path that ends in `()` is not resolved: it names an attribute of objects that the check creates.
    """

    path: str
    used_in: str
    check: Callable[[Any], str | None] = lambda found: None
    is_here: Callable[[], bool] = lambda: True  # whether this installation should have it
    is_late: bool = False  # checked when used, because its module is slow to import

    def problem(self) -> str | None:
        """What is wrong, as a sentence; None if nothing is."""
        try:
            found = None if self.path.endswith("()") else resolve(self.path)
        except (AttributeError, ImportError) as error:
            return f"{self.path} is missing, and {self.used_in} needs it{origin_of(error)}"
        try:
            wrong = self.check(found)
        except Exception as error:  # a name with another meaning may raise anything
            wrong = f"is not what it was ({type(error).__name__}: {error})"
        return None if wrong is None else f"{self.path.removesuffix('()')} {wrong}, and {self.used_in} needs it"


def origin_of(error: BaseException) -> str:
    """What failed to import first, in parentheses; empty if nothing did.

    Where a package does not fit, such as torchvision, transformers reports that a name of its own cannot be imported.
    """
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return "" if first is error else f" ({type(first).__name__}: {first})"


def resolve(path: str) -> Any:
    """The object at a dotted path; modules are imported as needed. Raises AttributeError or ImportError."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(".".join(parts[:count]))
    return found


# Checks.


def accepts(*passed: str) -> Callable[[Any], str | None]:
    """Check that `passed` are the first parameters, and that all others have defaults."""

    def check(function: Any) -> str | None:
        signature = inspect.signature(function)
        first = tuple(signature.parameters)[: len(passed)]
        try:
            signature.bind(*passed)
        except TypeError:
            first = ()
        return None if first == passed else f"takes {signature} instead of ({', '.join(passed)})"

    return check


def unless(condition: Any, problem: str) -> str | None:
    """The problem, unless the condition holds."""
    return None if condition else problem


def contains(names_of: Callable[[Any], Iterable[str]], *names: str) -> Callable[[Any], str | None]:
    """Check that all these names are among those that `names_of` returns."""

    def check(found: Any) -> str | None:
        missing = sorted({*names}.difference(names_of(found)))
        return unless(not missing, f"has no {', '.join(missing)}")

    return check


def small_config(**settings: Any) -> Any:
    return resolve("transformers.LlamaConfig")(num_hidden_layers=1, **settings)


def check_attention_name(_: Any) -> str | None:
    config = small_config(attn_implementation="eager")
    before, config._attn_implementation = config._attn_implementation, "sdpa"
    return unless(
        (before, config._attn_implementation) == ("eager", "sdpa"), "does not say what attention a model uses"
    )


def check_ropes(_: Any) -> str | None:
    """With `rope_parameters`, and with the `rope_scaling` of older configuration files."""
    new = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    configs = small_config(rope_parameters=new), small_config(rope_scaling={"type": "dynamic", "factor": 2.0})
    found = [config.rope_parameters.get("rope_type") for config in configs]
    return unless(found == ["dynamic"] * 2, "does not say of what type the rotary frequencies are")


def check_pad_token(_: Any) -> str | None:
    generation = resolve("transformers.GenerationMixin")
    config = resolve("transformers.GenerationConfig")(pad_token_id=3)
    owner = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    generation._prepare_special_tokens(owner, config, True, device="cpu")
    return unless(int(config._pad_token_tensor) == 3, "is not what generate() pads ended rows with")


def check_dynamic_layer(kind: Any) -> str | None:
    import torch

    cache = resolve("transformers.DynamicCache")(config=small_config())
    layer, states = cache.layers[0], torch.zeros(1, 1, 2, 1, device="cpu")
    is_known = type(layer) is kind and layer.keys is layer.values is None and not cache.offloading
    cache.update(states, states, 0)
    is_known &= cache.get_seq_length() == 2 and layer.keys.shape == layer.values.shape == states.shape
    return unless(is_known, "does not hold the keys and values of its layer in `keys` and `values`")


def check_sliding_layer(kind: Any) -> str | None:
    config = small_config()
    config.sliding_window, config.layer_types = 4, ["sliding_attention"]
    layer = resolve("transformers.DynamicCache")(config=config).layers[0]
    is_known = type(layer) is kind and (layer.sliding_window, layer.cumulative_length) == (4, 0)
    return unless(is_known, "does not tell what falls out of its window")


def check_static_layer(kind: Any) -> str | None:
    layer = resolve("transformers.StaticCache")(config=small_config(), max_cache_len=4).layers[0]
    return unless(type(layer) is kind and layer.keys is layer.values is None, "is not the layer of a static cache")


def check_layer_methods(mixin: Any) -> str | None:
    unknown = sorted(mixin.__abstractmethods__ - LAYER_METHODS - {"get_max_cache_shape"})
    return unless(not unknown, f"wants {', '.join(unknown)} of a layer")


def check_criteria(_: Any) -> str | None:
    length, end = resolve("transformers.MaxLengthCriteria")(5), resolve("transformers.EosTokenCriteria")(2)
    criteria = resolve("transformers.StoppingCriteriaList")([length, end])
    is_known = criteria.max_length == length.max_length == 5 and end.eos_token_id.flatten().tolist() == [2]
    return unless(is_known, "does not say when a text ends")


def check_cache_name(kind: Any) -> str | None:
    return unless({*CACHE_NAMES} & {*fields_of(kind)}, f"names the cache neither {' nor '.join(CACHE_NAMES)}")


def attributes_of_one(kind: Any) -> Iterable[str]:
    """Of an object of a class."""
    return vars(kind())


def fields_of(kind: Any) -> Iterable[str]:
    return tuple(kind.__dataclass_fields__)


def parameters_of(function: Any) -> Iterable[str]:
    return inspect.signature(function).parameters


def is_false(value: Any) -> str | None:
    return unless(value is False, f"is {value!r} for a model in general")


def has_cuda() -> bool:
    return bool(resolve("torch.cuda.is_available")())


def has_processes() -> bool:
    return bool(resolve("torch.distributed.is_available")())


GENERATION, MODEL = "transformers.GenerationMixin.", "transformers.PreTrainedModel."
CACHES, MODULE = "transformers.cache_utils.", "torch.nn.modules.module."
DISTRIBUTED, ATEN = "torch.distributed.distributed_c10d.", "torch.ops.aten."
LOOP = ("self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
OUTPUTS = ("sequences", "scores", "logits", "attentions", "hidden_states")
RETURNED = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
SETTINGS = ("is_assistant", "prefill_chunk_size", "cache_implementation", "do_sample", "temperature", "max_length")
# What a function given as custom_generate looks up in the frame of generate(), whose parameters are local names.
DROPPED = ("streamer", "synced_gpus", "assistant_model", "kwargs")
NAMES = (
    # The decoding loop.
    Name(GENERATION + "generate", "augment.py", accepts("self", "inputs")),
    Name(GENERATION + "generate", "switch.py", contains(parameters_of, *DROPPED)),
    Name(GENERATION + "_beam_search", "augment.py"),
    Name(GENERATION + "_assisted_decoding", "augment.py"),
    Name("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", "switch.py", accepts(), is_late=True),
    Name("transformers.integrations.fsdp.is_fsdp_managed_module", "switch.py", accepts("module"), is_late=True),
    Name(GENERATION + "_sample", "augment.py", accepts(*LOOP)),
    Name(GENERATION + "_prefill", "decoding.py", accepts("self", "input_ids", "generation_config", "model_kwargs")),
    Name(
        GENERATION + "_has_unfinished_sequences",
        "decoding.py",
        accepts("self", "this_peer_finished", "synced_gpus", "device"),
    ),
    Name(GENERATION + "_optimize_model_for_decode", "decoding.py", accepts("self")),
    Name(
        GENERATION + "_valid_auto_compile_criteria",
        "eligibility.py",
        accepts("self", "model_kwargs", "generation_config"),
    ),
    Name(GENERATION + "init_continuous_batching", "augment.py"),
    Name(GENERATION + "prepare_inputs_for_generation", "models/reasons.py", accepts("self", "input_ids")),
    Name(
        GENERATION + "_update_model_kwargs_for_generation",
        "models/reasons.py",
        accepts("self", "outputs", "model_kwargs"),
    ),
    Name("transformers.GenerationConfig._pad_token_tensor()", "verification/selection.py", check_pad_token),
    Name("transformers.GenerationConfig", "eligibility.py", contains(attributes_of_one, *RETURNED, *SETTINGS)),
    Name("transformers.StoppingCriteriaList.max_length()", "verification/selection.py", check_criteria),
    Name("transformers.generation.logits_process", "verification/selection.py"),
    Name(
        "transformers.RepetitionPenaltyLogitsProcessor",
        "verification/selection.py",
        lambda kind: unless(kind(2.0).prompt_ignore_length is None, "has another prompt_ignore_length"),
    ),
    Name("transformers.generation.GenerateDecoderOnlyOutput", "verification/outputs.py", contains(fields_of, *OUTPUTS)),
    Name("transformers.generation.GenerateDecoderOnlyOutput", "decoding.py", check_cache_name),
    Name("transformers.generation.BaseStreamer", "commands/chat/streaming.py"),
    # Models and their settings.
    Name(MODEL + "_is_stateful", "models/base.py", is_false),
    Name(MODEL + "_supports_sdpa", "models/base.py", is_false),
    Name(MODEL + "_can_set_attn_implementation", "models/base.py", accepts()),
    Name(MODEL + "tp_size", "forward/cuda/static_shapes.py"),
    Name("transformers.PreTrainedConfig._attn_implementation()", "models/base.py", check_attention_name),
    Name("transformers.PreTrainedConfig.rope_parameters()", "models/base.py", check_ropes),
    Name("transformers.PreTrainedConfig.get_text_config", "models/base.py", accepts("self", "decoder")),
    Name("transformers.PreTrainedConfig.sub_configs", "models/shadow.py"),
    Name("transformers.modeling_outputs.CausalLMOutputWithPast", "forward/cuda/path.py", contains(fields_of, "logits")),
    Name("transformers.AttentionInterface.register", "forward/cuda/kernel/interface.py"),
    Name("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", "models/foreign.py", contains(iter, "sdpa")),
    Name("transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS", "models/foreign.py", contains(iter, "sdpa")),
    Name("transformers.integrations.sdpa_attention.sdpa_attention_forward", "models/foreign.py"),
    Name("transformers.models.falcon.modeling_falcon.build_alibi_tensor", "models/alibi.py", is_late=True),
    # Caches.
    Name(CACHES + "CacheLayerMixin", "block/kv_cache.py", check_layer_methods),
    Name(CACHES + "DynamicLayer", "eligibility.py", check_dynamic_layer),
    Name(CACHES + "DynamicSlidingWindowLayer", "eligibility.py", check_sliding_layer),
    Name(CACHES + "StaticLayer", "eligibility.py", check_static_layer),
    # torch.
    Name("torch.nn.Module", "models/shadow.py", contains(attributes_of_one, *OWN_DICTIONARIES)),
    Name("torch.nn.Module._compiled_call_impl", "models/shadow.py"),
    Name("torch.nn.Module._call_impl", "models/compiled.py"),
    Name("torch.nn.Module._wrapped_call_impl", "models/compiled.py"),
    # Attributes of torch.compile's result. Without them a compiled model is treated as patched.
    Name("torch.compile()._torchdynamo_orig_callable", "models/compiled.py", is_late=True),
    Name("torch.compile()._torchdynamo_orig_backend", "models/compiled.py", is_late=True),
    Name(MODULE + "_global_forward_hooks", "models/foreign.py"),
    Name(MODULE + "_global_forward_pre_hooks", "models/foreign.py"),
    Name("torch.utils._python_dispatch.TorchDispatchMode", "forward/cuda/graphs.py"),
    Name("torch.utils._pytree.tree_leaves", "forward/cuda/graphs.py"),
    *(Name(ATEN + name, "forward/cuda/graphs.py") for name in ("_local_scalar_dense", "_unique2", "_to_copy")),
    # Without them no weights are packed, and nothing else changes.
    Name("torch.ops.mkldnn._linear_pointwise", "forward/cpu/packed.py", is_late=True),
    Name("torch.ops.mkldnn._reorder_linear_weight", "forward/cpu/packed.py", is_late=True),
    Name("torch._C._get_mkldnn_enabled", "forward/cpu/packed.py", is_late=True),
    Name("torch.Tensor._version", "forward/cpu/packed.py", is_late=True),
    Name("torch._C._cuda_clearCublasWorkspaces", "forward/cuda/graphs.py", is_here=has_cuda),
    Name("torch._C._cuda_endAllocateToPool", "forward/cuda/graphs.py", is_here=has_cuda),
    Name("torch._C._cuda_releasePool", "forward/cuda/graphs.py", is_here=has_cuda),
    Name(DISTRIBUTED + "_get_default_store", "parallel/communicator.py", accepts(), is_here=has_processes),
    Name(DISTRIBUTED + "default_pg_timeout", "parallel/communicator.py", is_here=has_processes),
    Name("torch.distributed.ProcessGroup._get_backend", "parallel/communicator.py", is_here=has_processes),
    Name("torch._C._distributed_c10d.Backend.Options._timeout", "parallel/communicator.py", is_here=has_processes),
)


def require_names() -> None:
    """Raise an ImportError that lists what in transformers or torch is not as lade needs it. Changes nothing."""
    import transformers

    problem = version_problem(transformers.__version__)
    if problem is None:
        found = (name.problem() for name in NAMES if not name.is_late and name.is_here())
        wrong = "; ".join(filter(None, found))
        problem = f"lade is not compatible with the installed transformers or torch: {wrong}" if wrong else None
    if problem is not None:
        remedy = f"; pip install 'transformers=={NEWEST}.*'" if is_newer_than_tested(transformers.__version__) else ""
        raise ImportError(f"{problem}. {installed()}; nothing has been patched{remedy}")


def installed() -> str:
    """The installed and the tested versions, as a sentence."""
    import torch
    import transformers

    return (
        f"Found transformers {transformers.__version__} (tested: {TESTED}) and torch {torch.__version__} "
        f"(tested: {TESTED_TORCH})"
    )


def version_problem(found: str) -> str | None:
    """Why lade does not support this version of transformers, as a sentence; None if it does."""
    from packaging.version import Version

    if Version(OLDEST) <= Version(found) < Version(FIRST_UNSUPPORTED):
        return None
    return f"lade needs transformers >={OLDEST},<{FIRST_UNSUPPORTED}, found {found}"


@functools.cache
def is_newer_than_tested(found: str) -> bool:
    """Whether this version of transformers is a later minor release than those tested."""
    from packaging.version import Version

    return Version(found).release[:2] > Version(NEWEST).release[:2]


@functools.cache
def warn_if_newer(found: str) -> None:
    """Warn once per process and version."""
    if is_newer_than_tested(found):
        logger.warning(
            "lade: transformers %s is newer than the versions that lade was tested with (%s); all that lade uses of it "
            "is as it was, and lookahead runs.",
            found,
            TESTED,
        )


# What other modules import from here, besides the names in the table.


def cache_layer() -> Any:
    """The base class of a cache's layers."""
    mixin = resolve(CACHES + "CacheLayerMixin")

    class CacheLayer(mixin):  # type: ignore[misc, valid-type]
        def get_max_cache_shape(self) -> int:
            """The name of `get_max_length` before transformers 5.18."""
            return int(self.get_max_length())

    return CacheLayer


def plain_layers() -> tuple[Any, ...]:
    """Classes of layers that keep every key, except those out of a sliding window, or share another layer's keys."""
    late = vars(resolve("transformers.cache_utils")).get("DummyLayer")  # not in 5.18
    return tuple(filter(None, (resolve(CACHES + "DynamicLayer"), resolve(CACHES + "DynamicSlidingWindowLayer"), late)))


def prompt_arguments() -> frozenset[str]:
    """Arguments that generate() passes with the prompt only; in older versions each model handles them."""
    found = getattr(resolve("transformers.generation.utils"), "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ())
    return frozenset(found)


def logits_processors(names: Iterable[str]) -> frozenset[Any]:
    """The classes among transformers' logits processors with these names, if this version has them.

    One under a new name is treated like a user's own.
    """
    found = vars(resolve("transformers.generation.logits_process"))
    return frozenset(found[name] for name in names if name in found)


def cache_name() -> str:
    """What this version of transformers calls the cache among the arguments and outputs of models."""
    fields = fields_of(resolve("transformers.generation.GenerateDecoderOnlyOutput"))
    return next((name for name in CACHE_NAMES if name in fields), CACHE_NAMES[0])


def layer_of_this_version(name: str) -> Callable[[], Any]:
    """A class of cache layers; None where this version of transformers has none of that name."""
    return lambda: vars(resolve("transformers.cache_utils")).get(name)


COMPUTED: dict[str, Callable[[], Any]] = {
    "BOTH_LAYER": layer_of_this_version("LinearAttentionAndFullAttentionLayer"),
    "STATE_LAYER": layer_of_this_version("LinearAttentionLayer"),
    "NO_LAYER": layer_of_this_version("DummyLayer"),
    "CacheLayer": cache_layer,
    "CACHE_NAME": cache_name,
    "PLAIN_LAYERS": plain_layers,
    "PROMPT_ARGUMENTS": prompt_arguments,
}


def __getattr__(name: str) -> Any:
    entry = next((entry for entry in NAMES if entry.path.rpartition(".")[2] == name), None)
    if entry is None and name not in COMPUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = resolve(entry.path) if entry is not None else COMPUTED[name]()
    except (AttributeError, ImportError) as error:
        what = entry.problem() if entry is not None else str(error)
        raise ImportError(
            f"lade is not compatible with the installed transformers or torch: {what}. {installed()}"
        ) from error
    globals()[name] = value
    return value


def num_tokens_of(model: Any) -> int:
    """Token ids that have an embedding, by its rows: they may have been changed without the configuration."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    embedding = model.get_input_embeddings()
    weight: Any = getattr(embedding, "weight", None)
    has_rows = weight is not None and weight.ndim == 2 and weight.is_floating_point()  # otherwise quantized
    rows = weight.shape[0] if has_rows else getattr(embedding, "num_embeddings", vocab_size)
    return min(int(rows), int(vocab_size))


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Settings of a model's rotary embeddings: one per layer type if they differ, none without any."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_type = [rope for rope in ropes.values() if isinstance(rope, dict)]
    return by_type or ([ropes] if ropes else [])


def has_unknown_rope(config: Any, parts: Iterable[Any]) -> bool:
    """Whether a module's rotary frequencies depend on the sequence length, unknown to the configuration.

    parts: the model and all its modules.
    """
    if rope_settings(config):
        return False
    return any(map(is_moving_rope, parts))


def is_moving_rope(part: Any) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the sequence length."""
    found = vars(part).get("rope_type")
    return any(kind in MOVING_ROPES for kind in (found.values() if isinstance(found, dict) else (found,)))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. The CPU allocator raises a plain RuntimeError."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
