"""Blocks through lade's own attention: tokens and logits are those of plain generate(), which adds up 4-D masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import compare, generate_plain, note_calls, padded_prompt, prompt, tiny, tiny_llama
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import lade
from lade.forward.cuda import kernel_path
from lade.forward.cuda.kernel import interface as ours
from lade.forward.cuda.kernel import pack_mask

SIZES = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9}


def mistral():
    return tiny(MistralForCausalLM, MistralConfig, attn_implementation="sdpa", **SIZES)


def gemma2():
    # The soft cap of Gemma 2 is 50; scores of a random model only feel a small one.
    return tiny(Gemma2ForCausalLM, Gemma2Config, **SIZES, attn_logit_softcapping=0.01)


def gpt_oss():
    model = tiny(GptOssForCausalLM, GptOssConfig, **SIZES, num_local_experts=4, rope_parameters=None)
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)  # the default keeps them near zero
    return model


MODELS = {"llama": tiny_llama, "mistral": mistral, "gemma2": gemma2, "gpt_oss": gpt_oss}
WANTED = {"max_new_tokens": 30, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def calls(lade_on, monkeypatch):
    """Arguments of each call of the block attention, which is asked for."""
    lade.config_lade(USE_FLASH=1)
    return note_calls(monkeypatch, ours, "block_attention", lambda *args, **named: named)


def difference(model, inputs):
    """The largest one of logits from plain generate()'s."""
    expected, found = generate_plain(model, inputs, **WANTED).logits, model.generate(**inputs, **WANTED).logits
    return float((torch.stack(found) - torch.stack(expected)).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_block_logits_are_plain_ones(name, calls):
    model = MODELS[name]()
    inputs = prompt(batch_size=3) if model.config._attn_implementation == "eager" else padded_prompt()
    assert difference(model, inputs) < (1e-5 if name == "gemma2" else 1e-10)  # whose eager softmax is float32's
    stats = lade.last_stats()
    assert stats.used_kernel
    assert len(calls) == (stats.steps - 1) * model.config.num_hidden_layers
    assert any(call["softcap"] for call in calls) == (name == "gemma2")
    assert any(call["sinks"] is not None for call in calls) == (name == "gpt_oss")


def test_a_wrong_mask_would_be_seen(calls, monkeypatch):
    """The negative control."""
    masks_of, inputs = kernel_path.masks_of, padded_prompt()

    def causal(block, *others):
        return masks_of(replace(block, visible=torch.ones_like(block.visible).tril()), *others)

    monkeypatch.setattr(kernel_path, "masks_of", causal)
    assert difference(tiny_llama(), inputs) > 1e-3


def test_what_cannot_go_through_it_is_named():
    assert ours.unsupported_reason(tiny_llama()) is None
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 1]]))
    assert "attention interface" in ours.unsupported_reason(model)
    layer, query = tiny_llama().model.layers[0].self_attn, torch.zeros(1, 4, 5, 12)
    packed = pack_mask(torch.eye(5).bool()[None], torch.tensor([7]))
    with pytest.raises(NotImplementedError, match="position_bias"):
        ours.lade_block_forward(layer, query, query, query, packed, position_bias=query)
    with pytest.raises(NotImplementedError, match="mask of its own"):
        ours.lade_block_forward(layer, query, query, query, None)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sampled_texts_are_plain_ones(name, calls):
    model = MODELS[name]()
    assert compare(model, padded_prompt(), do_sample=True, temperature=0.4).used_kernel
    assert model.config._attn_implementation == "sdpa"


def test_generate_without_it_where_it_cannot(calls):
    inputs = prompt(30)
    inputs["attention_mask"][0, 9] = 0
    assert "hides tokens" in compare(tiny_llama(), inputs, max_new_tokens=12).reasons.get("kernel")
    assert not calls
