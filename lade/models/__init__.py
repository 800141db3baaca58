"""Which adapter serves which model, by `model_type`. Floor 3."""

from __future__ import annotations

from transformers import PreTrainedModel

from lade.models.alibi import BloomAdapter, FalconAdapter, MptAdapter
from lade.models.base import ModelAdapter
from lade.models.gpt_neo import GPTNeoAdapter
from lade.models.lfm2 import Lfm2Adapter
from lade.models.limits import DogeAdapter, Phi3Adapter
from lade.models.llama import LlamaAdapter
from lade.models.llama4 import Llama4Adapter
from lade.models.probe import ProbedAdapter
from lade.models.vision import GemmaVisionAdapter, QwenVisionAdapter

__all__ = ["LlamaAdapter", "ModelAdapter", "adapter_for", "register_adapter"]

# Families that differ from transformers' conventions.
SPECIAL: dict[str, type[ModelAdapter]] = {
    "bloom": BloomAdapter,
    "doge": DogeAdapter,
    "falcon": FalconAdapter,
    "gemma3": GemmaVisionAdapter,
    "gemma4": GemmaVisionAdapter,
    "gpt_neo": GPTNeoAdapter,
    "lfm2": Lfm2Adapter,
    "lfm2_moe": Lfm2Adapter,
    "lfm3": Lfm2Adapter,
    "llama": LlamaAdapter,
    "llama4_text": Llama4Adapter,
    "mpt": MptAdapter,
    "phi3": Phi3Adapter,
    "phimoe": Phi3Adapter,
    "qwen2_5_vl": QwenVisionAdapter,
    "qwen2_vl": QwenVisionAdapter,
    "qwen3_vl": QwenVisionAdapter,
}
# Families that do not; tests/test_families.py runs every one of them.
REGULAR = frozenset(
    """mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe gemma gemma2 vaultgemma gemma3_text gemma3n_text gemma4_text phi gpt2 gpt_neox
    gpt_neox_japanese gptj codegen gpt_bigcode opt xglm biogpt starcoder2 stablelm olmo olmo2 olmo3 olmoe flex_olmo cohere cohere2
    granite granitemoe granitemoeshared smollm3 exaone4 nemotron glm glm4 glm4_moe deepseek_v2 deepseek_v3 gpt_oss ministral ministral3
    seed_oss apertus helium hunyuan_v1_dense hunyuan_v1_moe ernie4_5 ernie4_5_moe persimmon minimax_m2 dbrx arcee bitnet diffllama dots1
    jetmoe longcat_flash mistral4 modernbert-decoder""".split()  # noqa: SIM905
)

_adapters: dict[str, type[ModelAdapter]] = dict.fromkeys(REGULAR, ModelAdapter) | SPECIAL


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Serve models whose `config.model_type` is `model_type` with `adapter`, in place of any earlier one."""
    if not isinstance(model_type, str):
        raise TypeError(f"model_type must be a string, got {model_type!r}")
    if not (isinstance(adapter, type) and issubclass(adapter, ModelAdapter)):
        raise TypeError(f"adapter must be a subclass of lade.ModelAdapter, got {adapter!r}")
    _adapters[model_type] = adapter


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """The adapter registered for the model's type, or the base adapter, which then tries the model out first."""
    return _adapters.get(model.config.model_type, ProbedAdapter)(model)
