"""The registry of adapters, keyed by `config.model_type`."""

from __future__ import annotations

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from lade.models.base import ModelAdapter
from lade.models.chains import ChainAdapter
from lade.models.declared import DogeAdapter, GemmaVisionAdapter, GPT2Adapter, QwenVisionAdapter
from lade.models.foreign import allow_hook
from lade.models.llama import LlamaAdapter
from lade.models.phi3 import Phi3Adapter

__all__ = ["LlamaAdapter", "ModelAdapter", "adapter_for", "allow_hook", "needs_self_check", "register_adapter"]

# Model types that need an adapter of their own.
ADAPTERS: dict[type[ModelAdapter], str] = {
    ChainAdapter: "bloom falcon gpt_neo llama4 llama4_text mpt",
    DogeAdapter: "doge",
    GemmaVisionAdapter: "gemma3 gemma4",
    GPT2Adapter: "codegen gpt2 gpt_bigcode gptj",
    LlamaAdapter: """
        arcee aria_text cwm dots1 gemma hy_v3 jais2 llama ministral mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
        solar_open starcoder2
    """,
    Phi3Adapter: "phi3 phimoe",
    QwenVisionAdapter: "glm4v qwen2_5_vl qwen2_vl qwen3_vl qwen3_vl_moe",
}
# Families that the base adapter serves; tests/test_families.py runs each of them.
REGULAR = frozenset(
    """
    afmoe apertus axk1 aya_vision beam biogpt bitnet cohere cohere2 cohere2_moe dbrx deepseek_v2 deepseek_v3
    diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma2 gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hyperclovax idefics2 idefics3 internvl jetmoe kolibri1 laguna llava llava_next
    llava_onevision longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral3 mistral4
    modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi smollm3 smolvlm stablelm
    vaultgemma xglm youtu
    """.split()  # noqa: SIM905
)

# Layer types that take chains of guesses in models that are not marked as stateful.
CHAIN_LAYERS = frozenset(
    {"chunked_attention", "conv", "hybrid", "hybrid_sliding", "indexed_attention", "linear_attention"}
)

_adapters: dict[str, type[ModelAdapter]] = dict.fromkeys(REGULAR, ModelAdapter)
_adapters |= {model_type: adapter for adapter, types in ADAPTERS.items() for model_type in types.split()}
if Version(transformers.__version__) >= Version("5.18"):  # older ones' convolutions may begin anew with several tokens
    _adapters |= dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm3"), ChainAdapter)
_vouched_for: set[str] = set()  # model types registered by the user


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Serve models whose `config.model_type` is `model_type` with `adapter`.

    An earlier adapter of that type is replaced. Raises TypeError if model_type is no string or adapter is no subclass
    of `ModelAdapter`.
    """
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a string, got {model_type!r}")
    if not (isinstance(adapter, type) and issubclass(adapter, ModelAdapter)):
        raise TypeError(f"adapter must be a subclass of lade.ModelAdapter, got {adapter!r}")
    _adapters[model_type] = adapter
    _vouched_for.add(model_type)


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """A new adapter for the model, of the class registered for its type; otherwise the base adapter.

    Lade's own registrations apply only to classes defined in transformers: other code may reuse a `model_type`.
    """
    model_type = model.config.model_type
    is_of_family = model_type in _vouched_for or type(model).__module__.startswith("transformers.models.")
    kind = _adapters.get(model_type) if is_of_family else None
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    takes_chains = model._is_stateful or not CHAIN_LAYERS.isdisjoint(layer_types)
    return (kind or (ChainAdapter if takes_chains else ModelAdapter))(model)


def needs_self_check(adapter: ModelAdapter) -> bool:
    """Whether the model must pass a self-check before lookahead runs on it.

    Not needed for a known family that runs code of transformers alone, nor for a model type registered by the user.
    Foreign functions and hooks always need one: registering an adapter vouches for a family's classes, not for later
    changes to a model.
    """
    code, model_type = adapter.code, adapter.model.config.model_type
    if code.functions or code.hooks:
        return True
    if model_type in _vouched_for:
        return False
    return model_type not in _adapters or bool(code.classes)
