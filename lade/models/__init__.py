"""Which adapter serves which model, by `model_type`."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel

from lade.compat import is_newer_than_tested
from lade.models.alibi import BloomAdapter, FalconAdapter, MptAdapter
from lade.models.base import ModelAdapter
from lade.models.doge import DogeAdapter
from lade.models.foreign import allow_hook
from lade.models.gpt2 import GPT2Adapter
from lade.models.gpt_neo import GPTNeoAdapter
from lade.models.lfm2 import Lfm2Adapter
from lade.models.llama import LlamaAdapter
from lade.models.llama4 import Llama4Adapter
from lade.models.phi3 import Phi3Adapter, PhimoeAdapter
from lade.models.vision import GemmaVisionAdapter, QwenVisionAdapter
from lade.models.xglm import XGLMAdapter

__all__ = ["LlamaAdapter", "ModelAdapter", "adapter_for", "allow_hook", "needs_self_check", "register_adapter"]

# Families that differ from transformers' conventions.
SPECIAL: dict[str, type[ModelAdapter]] = {
    "bloom": BloomAdapter,
    "codegen": GPT2Adapter,
    "doge": DogeAdapter,
    "falcon": FalconAdapter,
    "gemma3": GemmaVisionAdapter,
    "gemma4": GemmaVisionAdapter,
    "glm4v": QwenVisionAdapter,
    "gpt2": GPT2Adapter,
    "gpt_bigcode": GPT2Adapter,
    "gpt_neo": GPTNeoAdapter,
    "gptj": GPT2Adapter,
    "lfm2": Lfm2Adapter,
    "lfm2_moe": Lfm2Adapter,
    "lfm2_vl": Lfm2Adapter,
    "lfm3": Lfm2Adapter,
    "llama": LlamaAdapter,
    "llama4": Llama4Adapter,
    "llama4_text": Llama4Adapter,
    "mpt": MptAdapter,
    "phi3": Phi3Adapter,
    "phimoe": PhimoeAdapter,
    "qwen2_5_vl": QwenVisionAdapter,
    "qwen2_vl": QwenVisionAdapter,
    "qwen3_vl": QwenVisionAdapter,
    "qwen3_vl_moe": QwenVisionAdapter,
    "xglm": XGLMAdapter,
}
# Families that do not; tests/test_families.py runs every one of them.
REGULAR = frozenset(
    """
    afmoe apertus arcee aria_text axk1 aya_vision beam biogpt bitnet cohere cohere2 cohere2_moe cwm dbrx
    deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma
    gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    gpt_neox gpt_neox_japanese gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax idefics2 idefics3 internvl jais2 jetmoe kolibri1
    laguna llava llava_next llava_onevision longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral
    ministral3 mistral mistral3 mistral4 mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 smolvlm solar_open stablelm starcoder2 vaultgemma
    youtu
    """.split()  # noqa: SIM905
)

_adapters: dict[str, type[ModelAdapter]] = dict.fromkeys(REGULAR, ModelAdapter) | SPECIAL
_vouched_for: set[str] = set()  # model types that the user registered


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Serve models whose `config.model_type` is `model_type` with `adapter`, in place of any earlier one."""
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a string, got {model_type!r}")
    if not (isinstance(adapter, type) and issubclass(adapter, ModelAdapter)):
        raise TypeError(f"adapter must be a subclass of lade.ModelAdapter, got {adapter!r}")
    _adapters[model_type] = adapter
    _vouched_for.add(model_type)


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """The adapter registered for the model's type, or the base adapter; a name alone does not make a model of a family."""
    model_type = model.config.model_type
    is_of_family = model_type in _vouched_for or type(model).__module__.startswith("transformers.models.")
    return (_adapters.get(model_type, ModelAdapter) if is_of_family else ModelAdapter)(model)


def needs_self_check(adapter: ModelAdapter) -> bool:
    """Whether nobody has vouched for the model: neither its family here, with code of transformers alone, nor the user.

    Whoever registers an adapter vouches for a family's classes, and for nothing that is put on a model later. Adapters with a view of
    their own reach into the modules of their family: nobody has seen these of a version newer than tested.
    """
    code, model_type = adapter.code, adapter.model.config.model_type
    if code.functions or code.hooks:
        return True
    if model_type in _vouched_for:
        return False
    is_new = type(adapter).block_model is not ModelAdapter.block_model and is_newer_than_tested(
        transformers.__version__
    )
    return is_new or model_type not in _adapters or bool(code.classes)
