"""Blocks through lade's own attention: their logits equal those under an additive 4-D mask, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import VOCAB, compare, note_calls, prompt, tiny_llama
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.masking_utils import eager_mask

import lade
from lade.block.kv_cache import LookaheadCache, cache_arguments
from lade.block.mask import AttentionSpan, Block, block_mask
from lade.forward.cuda.kernel import interface as ours
from lade.forward.cuda.kernel import left_padding, pack_mask
from lade.forward.cuda.static_inputs import packed_block_mask
from lade.models.shadow import shadow_model

WINDOW = 9
SIZES = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "pad_token_id": 0}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def double_attention(module, query, key, value, attention_mask, scaling, softcap=None, **_):
    """Eager attention with a soft cap and without eager's rounding to float32."""
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(dim=-1) @ value.repeat_interleave(group, 1)).transpose(1, 2), None


AttentionInterface.register("test_double", double_attention)
AttentionMaskInterface.register("test_double", eager_mask)


def mistral():
    config = MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=12)
    return MistralForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()


def gemma2():
    # The soft cap of Gemma 2 is 50; scores of a random model only feel a small one.
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": None}
    config = Gemma2Config(**SIZES, **caps, sliding_window=WINDOW, head_dim=12)
    return Gemma2ForCausalLM._from_config(config, attn_implementation="test_double").double().eval()


def gpt_oss():
    config = GptOssConfig(**SIZES, sliding_window=WINDOW, head_dim=12, num_local_experts=4, rope_parameters=None)
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)  # the default keeps them near zero
    return model


MODELS = {"llama": tiny_llama, "mistral": mistral, "gemma2": gemma2, "gpt_oss": gpt_oss}


class Case:
    """A batch of prompts in a cache, and a random block behind them."""

    def __init__(self, model, ragged: bool, padded: bool, num_tokens: int = 40) -> None:
        self.model, generator = model, torch.Generator().manual_seed(0)
        batch_size, prompt_length = 2, 23
        ids = torch.randint(3, VOCAB, (batch_size, prompt_length), generator=generator)
        attention_mask = torch.ones_like(ids)
        if padded:
            attention_mask[1, :5] = 0
        first_position = attention_mask.sum(dim=1, keepdim=True)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        self.key_mask = attention_mask.bool() if padded else None
        self.cache = LookaheadCache(model.config.num_hidden_layers, 256)
        self.arguments = cache_arguments(self.cache)
        self.prefill = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": positions}
        model(**self.prefill, **self.arguments)
        self.cache.end_prefill(batch_size)
        if ragged:  # the rows keep 1 and 4 tokens of a first block
            self.draw(generator, 8, first_position)
            self.additive()
            self.cache.commit([[], [1, 2, 3]])
            first_position = first_position + torch.tensor([[1], [4]])
        self.draw(generator, num_tokens, first_position)

    def draw(self, generator, num_tokens, first_position) -> None:
        self.ids = torch.randint(3, VOCAB, (2, num_tokens), generator=generator)
        self.offsets = torch.randint(1, 6, (2, num_tokens), generator=generator)
        self.offsets[:, 0] = 0
        self.positions = first_position + self.offsets
        # A guess sees itself, the root, and some guesses at earlier positions.
        earlier = self.offsets[:, :, None] > self.offsets[:, None, :]
        self.visible = earlier & (torch.rand(2, num_tokens, num_tokens, generator=generator) < 0.4)
        self.visible |= torch.eye(num_tokens, dtype=torch.bool)
        self.visible[:, :, 0] = True
        self.cache.begin_block(num_tokens, torch.device("cpu"))

    @property
    def block(self) -> Block:
        rows = torch.arange(self.ids.shape[1])
        return Block(self.ids, self.offsets, self.positions, self.visible, rows, self.cache.lengths, self.key_mask)

    def additive(self) -> torch.Tensor:
        """Logits by the model's own attention; its windows laid into the mask."""
        full, config = block_mask(self.block, torch.float64), self.model.config
        mask = full
        if getattr(config, "sliding_window", None):
            windowed = block_mask(self.block, torch.float64, AttentionSpan(window=WINDOW))
            types = getattr(config, "layer_types", None)
            mask = {"full_attention": full, "sliding_attention": windowed} if types else windowed
        return self.logits(self.model, mask)

    def packed(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Logits by the block attention."""
        block = self.block if visible is None else replace(self.block, visible=visible)
        padding = None if self.key_mask is None else left_padding(self.key_mask)
        config = self.model.config
        spans = AttentionSpan(), AttentionSpan(window=WINDOW)
        full, near = (packed_block_mask(block, padding, span) for span in spans)
        mask = near if getattr(config, "sliding_window", None) else full
        if getattr(config, "layer_types", None):
            mask = {"full_attention": full, "sliding_attention": near}
        return self.logits(shadow_model(self.model, ours.NAME), mask)

    def logits(self, model, mask) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=self.ids, position_ids=self.positions, attention_mask=mask, **self.arguments).logits


@pytest.fixture
def calls(monkeypatch):
    """How often the block attention was called."""
    return note_calls(monkeypatch, ours, "block_attention", lambda *args, **named: named)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_block_logits_are_those_of_an_additive_mask(name, ragged, padded, calls):
    torch.manual_seed(0)
    case = Case(MODELS[name](), ragged, padded)
    expected = case.additive()
    assert not calls
    found = case.packed()
    assert len(calls) == case.model.config.num_hidden_layers
    assert (found - expected).abs().max() < 1e-10
    assert any(call["softcap"] for call in calls) == (name == "gemma2")
    assert any(call["sinks"] is not None for call in calls) == (name == "gpt_oss")

    causal = torch.ones_like(case.visible).tril()
    assert (case.packed(causal) - expected).abs().max() > 1e-3


def test_what_cannot_go_through_it_is_named():
    assert ours.unsupported_reason(tiny_llama()) is None
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 1]]))
    assert "attention interface" in ours.unsupported_reason(model)
    case = Case(tiny_llama(), ragged=False, padded=False)
    layer = case.model.model.layers[0].self_attn
    query = torch.zeros(2, 4, 40, 12, dtype=torch.float64)
    packed = pack_mask(case.visible, torch.tensor(case.cache.lengths))
    with pytest.raises(NotImplementedError, match="position_bias"):
        ours.lade_block_forward(layer, query, query, query, packed, position_bias=query)
    with pytest.raises(NotImplementedError, match="mask of its own"):
        ours.lade_block_forward(layer, query, query, query, None)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_through_the_block_attention(name, sampling, lade_on, calls):
    model = MODELS[name]()
    inputs = prompt(30, batch_size=3)
    inputs["attention_mask"][1, :7] = 0
    lade.config_lade(USE_FLASH=1)
    stats = compare(model, inputs, max_new_tokens=30, eos_token_id=None, **sampling)
    assert stats.used_kernel
    assert stats.steps < 31
    assert len(calls) == (stats.steps - 1) * model.config.num_hidden_layers
    assert model.config._attn_implementation == "sdpa"


def test_generate_without_it_where_it_cannot(lade_on, calls):
    inputs = prompt(30)
    inputs["attention_mask"][0, 9] = 0
    lade.config_lade(USE_FLASH=1)
    assert "hides tokens" in compare(tiny_llama(), inputs, max_new_tokens=12).reasons.get("kernel")
    assert not calls
