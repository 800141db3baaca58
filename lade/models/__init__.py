"""Which adapter serves which model, by `model_type`. Floor 3."""

from __future__ import annotations

from transformers import PreTrainedModel

from lade.models.base import ModelAdapter
from lade.models.llama import LlamaAdapter

__all__ = ["LlamaAdapter", "ModelAdapter", "adapter_for", "register_adapter"]


class NoAdapter(ModelAdapter):
    """Stands for a family that nobody has tested yet."""

    def unsupported_reason(self) -> str | None:
        return f"no adapter is registered for model_type {self.model.config.model_type!r}"


_adapters: dict[str, type[ModelAdapter]] = {"llama": LlamaAdapter}


def register_adapter(model_type: str, adapter: type[ModelAdapter]) -> None:
    """Serve models whose `config.model_type` is `model_type` with `adapter`, in place of any earlier one."""
    if not (isinstance(adapter, type) and issubclass(adapter, ModelAdapter)):
        raise TypeError(f"adapter must be a subclass of lade.ModelAdapter, got {adapter!r}")
    _adapters[model_type] = adapter


def adapter_for(model: PreTrainedModel) -> ModelAdapter:
    """The adapter registered for the model's type, or one that refuses it."""
    return _adapters.get(model.config.model_type, NoAdapter)(model)
