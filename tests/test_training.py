"""Models in training mode: served where nothing in them depends on it, as in rollouts of reinforcement learning."""

import copy
import re

import pytest
import torch
from support import assert_same_state, compare, generate_plain, inference_tensors, prompt, tiny_llama
from support.families import COMPOSITE, FAMILIES, named, of_each_class
from torch import nn
from transformers import GenerationMixin

import lade
from lade.models import adapter_for, training
from lade.models.training import training_reason

pytestmark = pytest.mark.usefixtures("small_block")
RANDOM = re.compile("drop|jitter|noise")
DRAWS = ("PhimoeForCausalLM",)  # whatever its settings; until transformers 5.17 XGLM as well
HAS_NO_DROPOUT = ("DiffLlamaForCausalLM", "Lfm2VlForConditionalGeneration")  # for text, whatever its settings


def set_randomness(model, value):
    """Give all dropout and the like this value. Returns how many settings there are."""
    count = 0
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p, count = value, count + 1
        for owner in (part, vars(part).get("config")):
            names = [name for name, found in vars(owner or part).items() if isinstance(found, float)]
            for name in filter(RANDOM.search, names):
                setattr(owner or part, name, value)
                count += owner is part
    return count


OFTEN = """llama mixtral gemma3n_text phimoe gpt2 gpt_neo opt bloom falcon mpt xglm biogpt deepseek_v3 gpt_oss llama4_text
    jetmoe diffllama qwen2_vl lfm2_vl mllama"""


@pytest.mark.parametrize("family", of_each_class([*FAMILIES, *COMPOSITE], OFTEN))
def test_families(family):
    if not family.exists:
        pytest.skip(f"this transformers runs no {family.model_class}")
    model = family.build().train()
    set_randomness(model, 0.0)
    reason = adapter_for(model).unsupported_reason()
    assert reason == adapter_for(copy.deepcopy(model).eval()).unsupported_reason()
    if reason is not None:
        return
    inputs = prompt(20) if family.inputs is None else family.inputs(False)
    twin = copy.deepcopy(model)
    reason = training_reason(adapter_for(model))
    assert_same_state(model, twin)
    if family.model_class in DRAWS:
        assert "random numbers" in reason
        return
    assert reason is None
    compare(model, inputs, max_new_tokens=8)
    assert not inference_tensors(model)
    model(**inputs).logits.sum().backward()
    if set_randomness(model, 0.1) and family.model_class not in HAS_NO_DROPOUT:
        assert "random numbers" in training_reason(adapter_for(model))


@pytest.mark.parametrize("name", ["mixtral", "falcon-alibi"])
def test_a_loop_of_reinforcement_learning(name):
    """Rollouts and training steps in turn: the same tokens and the same weights with lade as without."""
    first = named(name).build().train()
    set_randomness(first, 0.0)
    models = first, copy.deepcopy(first)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    inputs, texts = prompt(16, batch_size=2), []
    for _ in range(3):
        rollouts = []
        for model, optimizer, is_plain in zip(models, optimizers, (True, False), strict=True):
            torch.manual_seed(7)
            arguments = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.5}
            text = generate_plain(model, inputs, **arguments) if is_plain else model.generate(**inputs, **arguments)
            model(input_ids=text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rollouts.append(text)
        assert torch.equal(*rollouts)
        assert lade.last_stats().fallback_reason is None
        assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
        assert not inference_tensors(models[1])
        texts.append(rollouts[1])
    assert not torch.equal(texts[0], texts[-1])  # the weights did change


@pytest.mark.parametrize("name", ["llama", "falcon-alibi"])
def test_active_dropout_falls_back(name):
    model = named(name).build().train()
    set_randomness(model, 0.1)
    assert len({compare(model, reason="random numbers").fallback_reason for _ in range(2)}) == 1
    model.eval()
    compare(model)


def test_one_part_in_training_mode():
    """Within a model in eval mode: only where that part has something random."""
    model = tiny_llama(attention_dropout=0.4)
    compare(model)
    model.model.layers[1].self_attn.train()
    compare(model, reason="random numbers", do_sample=True)
    model.model.layers[1].self_attn.attention_dropout = 0.0
    compare(model)
    model.train()  # the other layer's is still there
    compare(model, reason="random numbers", do_sample=True)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")  # the name in older versions of transformers
def test_checkpointing():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    compare(model)
    model.train()
    compare(model, reason="checkpointing")
    model.gradient_checkpointing_disable()
    compare(model)


class Noisy(nn.Linear):
    """Somebody's own layer."""

    noise = 0.0

    def forward(self, x):
        y = super().forward(x)
        return y + self.noise * torch.randn_like(y) if self.training and self.noise else y


class WithFunction(nn.Linear):
    """Its dropout is no setting."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Restored(nn.Module):
    def forward(self, x):
        return x[None]


@pytest.mark.parametrize("kind", [Noisy, WithFunction, nn.BatchNorm1d, nn.Dropout1d])
def test_modules_of_other_kinds(kind):
    """Refused by what they do in training mode, torch's own modules included."""
    model = tiny_llama()
    mlp = model.model.layers[0].mlp
    if issubclass(kind, nn.Linear):
        down = kind(64, 48, bias=False).double()
        down.weight.data.copy_(mlp.down_proj.weight)
        mlp.down_proj = down
    else:
        layer = kind(64) if kind is nn.BatchNorm1d else kind()
        mlp.act_fn = nn.Sequential(nn.Flatten(0, -2), layer, Restored()).double()
    compare(model.eval())
    twin = copy.deepcopy(model.train())
    reason = training_reason(adapter_for(model))
    assert_same_state(model, twin)
    if kind is Noisy:
        assert reason is None
        compare(model)
        mlp.down_proj.noise = 0.1
        compare(model, reason="random numbers", do_sample=True)
    else:
        assert "in training mode" in reason


@pytest.mark.parametrize("asks", [False, True])
def test_a_forward_put_in_place_of_a_modules_own(asks):
    model = tiny_llama().train()
    mlp = model.model.layers[0].mlp
    stock = mlp.forward

    def with_dropout(x):
        return nn.functional.dropout(stock(x), 0.5, mlp.training)

    mlp.forward = lade.allow_hook(with_dropout if asks else lambda x: stock(x))
    compare(model, reason="in training mode" if asks else None)


def test_processes_that_wait_for_each_other(monkeypatch):
    """The trial would be a forward that the others do not take part in."""
    monkeypatch.setattr(training, "training_reason", None)
    monkeypatch.setattr(
        GenerationMixin, "_has_unfinished_sequences", lambda self, is_finished, *_, **__: not is_finished
    )
    compare(tiny_llama().train(), reason="other processes", synced_gpus=True)
