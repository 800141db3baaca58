"""Layers as those of peft's LoRA are known code, and may be merged or disabled between calls."""

import copy

import pytest
import torch
from support import assert_same_state, generate_plain, prompt, tiny_llama
from torch import nn

import lade
from lade.forward.cpu import packed
from lade.models import foreign


class Adapted(nn.Module):
    """As `peft.tuners.lora.layer.Linear`."""

    def __init__(self, base_layer):
        super().__init__()
        sizes, dtype = (base_layer.in_features, 4, base_layer.out_features), base_layer.weight.dtype
        self.lora_A, self.lora_B = (nn.Linear(*pair, bias=False, dtype=dtype) for pair in (sizes[:2], sizes[1:]))
        self.lora_B.weight.data *= 20  # enough to decide the text
        self.base_layer, self.merged_adapters, self.disable_adapters = base_layer, [], False

    @property
    def merged(self):
        return bool(self.merged_adapters)

    def forward(self, input):
        if self.disable_adapters and self.merged:
            self.merged_adapters.pop()
            self.base_layer.weight.data -= self.lora_B.weight @ self.lora_A.weight
        result = self.base_layer(input)
        return result if self.merged or self.disable_adapters else result + self.lora_B(self.lora_A(input))

    def merge(self):
        self.merged_adapters.append("default")
        self.base_layer.weight.data += self.lora_B.weight @ self.lora_A.weight


@pytest.fixture
def model(lade_on, monkeypatch):
    lade.config_lade(PACK=1)
    monkeypatch.setattr(packed, "least_elements", lambda dtype: 1)
    monkeypatch.setattr(foreign, "LORA", f"{__name__}.Adapted")
    monkeypatch.setattr(foreign, "AUTHORS_OF_LORA", foreign.AUTHORS | {__name__})
    model = tiny_llama(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


def assert_same(model, twin):
    """A call of both gives the same text and leaves the same weights. Returns the statistics of lade's."""
    expected = generate_plain(twin, prompt(), max_new_tokens=40)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=40), expected)
    assert_same_state(model, twin)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert max(stats.block_tokens) > 1
    return stats


@pytest.mark.skipif(packed.packing_error(torch.float32) is not None, reason="oneDNN packs nothing here")
def test_plain_lora_is_known(model, trials):
    """It computes each token by itself: nothing is tried out, and the weights inside are packed."""
    assert assert_same(model, copy.deepcopy(model)).packed_weights == 15 + 4
    assert not trials


@pytest.mark.parametrize("change", ["class", "method", "variant"])
def test_other_adapters_are_not(model, trials, monkeypatch, change):
    """Other classes, a method that somebody has replaced, DoRA."""
    if change == "class":
        monkeypatch.setattr(foreign, "LORA", "peft.tuners.lora.layer.Linear")
    elif change == "method":
        monkeypatch.setattr(Adapted, "merge", copy.copy)
    else:
        model.model.layers[1].self_attn.q_proj.lora_variant = {"default": "DoRA"}
    assert assert_same(model, copy.deepcopy(model)).packed_weights == 0
    assert trials


@pytest.mark.parametrize("is_training", [False, True])  # as peft leaves its adapters: each call has a trial forward
@pytest.mark.parametrize("is_known", [False, True])  # before the adapters are merged
def test_merged_adapters_that_are_disabled(model, is_training, is_known):
    """The next forward takes them out of the weights. That may be one of lade's own, which must not do it twice."""
    model.train(is_training)
    twin = copy.deepcopy(model)
    if is_known:
        assert_same(model, twin)
    adapted = [layer.self_attn.q_proj for each in (model, twin) for layer in each.model.layers]
    for layer in adapted:
        layer.merge()
    if is_known:
        assert_same(model, twin)
    for layer in adapted:
        layer.disable_adapters = True
    for _ in range(2):
        assert_same(model, twin)
