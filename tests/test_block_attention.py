"""Models in block attention mode: the logits of a block equal those under an additive 4-D mask, in float64."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import VOCAB, generate_plain, prompt, tiny_llama
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
from lade import block_attention as ours
from lade.attention import block_mask
from lade.block_attention import block_attention_mode
from lade.kernels import left_padding, pack_mask
from lade.kv_cache import LookaheadCache
from lade.models import LlamaAdapter, adapter_for

WINDOW = 9
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


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


def llama(**changes):
    return tiny_llama(torch.float64, **changes)


def mistral():
    config = MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=12)
    return MistralForCausalLM._from_config(config, attn_implementation="sdpa").double().eval()


def gemma2():
    # The soft cap of Gemma 2 is 50; scores of a random model only feel a small one.
    config = Gemma2Config(
        **SIZES, sliding_window=WINDOW, head_dim=12, attn_logit_softcapping=0.5, final_logit_softcapping=None
    )
    return Gemma2ForCausalLM._from_config(config, attn_implementation="test_double").double().eval()


def gpt_oss():
    config = GptOssConfig(**SIZES, sliding_window=WINDOW, head_dim=12, num_local_experts=4, rope_parameters=None)
    model = GptOssForCausalLM._from_config(config, attn_implementation="eager").double().eval()
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)  # the default keeps them near zero
    return model


MODELS = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "gpt_oss": gpt_oss}


class Block:
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
        self.arguments = {"past_key_values": self.cache, "use_cache": True}
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

    def additive(self) -> torch.Tensor:
        """Logits by the model's own attention; its windows laid into the mask."""
        full = block_mask(self.visible, self.cache.lengths, self.key_mask, torch.float64)
        config, mask = self.model.config, full
        if getattr(config, "sliding_window", None):
            windowed = self.with_window(full)
            types = getattr(config, "layer_types", None)
            mask = {"full_attention": full, "sliding_attention": windowed} if types else windowed
        return self.logits(mask)

    def with_window(self, full: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(self.cache.lengths)[:, None]
        slot_positions = torch.arange(full.shape[-1]).repeat(2, 1)
        slots = lengths + torch.arange(self.ids.shape[1])
        slot_positions.scatter_(1, slots, lengths + self.offsets)
        distance = (lengths + self.offsets)[:, :, None] - slot_positions[:, None, :]
        return full.masked_fill((distance >= WINDOW)[:, None], torch.finfo(torch.float64).min)

    def packed(self, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Logits by the block attention, which the layers tell their windows."""
        visible = self.visible if visible is None else visible
        first_slots = None if self.key_mask is None else left_padding(self.key_mask)
        return self.logits(pack_mask(visible, torch.tensor(self.cache.lengths), self.offsets, first_slots))

    def logits(self, mask) -> torch.Tensor:
        with torch.no_grad():
            return self.model(
                input_ids=self.ids, position_ids=self.positions, attention_mask=mask, **self.arguments
            ).logits


@pytest.fixture
def calls(monkeypatch):
    """How often the block attention was called."""
    seen = []
    inner = ours.block_attention
    monkeypatch.setattr(ours, "block_attention", lambda *args, **named: seen.append(named) or inner(*args, **named))
    return seen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_block_logits_are_those_of_an_additive_mask(name, ragged, padded, calls):
    torch.manual_seed(0)
    block = Block(MODELS[name](), ragged, padded)
    expected = block.additive()
    assert not calls
    with block_attention_mode(block.model):
        found = block.packed()
    assert len(calls) == block.model.config.num_hidden_layers
    assert (found - expected).abs().max() < 1e-10
    assert any(call["window"] for call in calls) == (name != "llama")
    assert any(call["softcap"] for call in calls) == (name == "gemma2")
    assert any(call["sinks"] is not None for call in calls) == (name == "gpt_oss")

    causal = torch.ones_like(block.visible).tril()
    with block_attention_mode(block.model):
        assert (block.packed(causal) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_other_forwards_go_the_models_own_way(name, calls):
    """A prompt, or a processor's own forward, while the mode is on."""
    torch.manual_seed(0)
    model = MODELS[name]()
    block = Block(model, ragged=False, padded=True)
    expected = model(**block.prefill).logits
    with block_attention_mode(model):
        assert torch.equal(model(**block.prefill).logits, expected)
    assert not calls


def test_the_setting_comes_back():
    model = llama()
    with block_attention_mode(model):
        assert model.config._attn_implementation == ours.NAME
        with block_attention_mode(model):
            pass
        assert model.config._attn_implementation == ours.NAME
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), block_attention_mode(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    assert not ours._held


@torch.no_grad()
def test_threads_share_a_model():
    model = llama()
    block = Block(model, ragged=False, padded=False)
    expected = block.additive()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with block_attention_mode(model):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    with block_attention_mode(model):
        thread.start()
        assert entered.wait(60)
    assert torch.equal(block.additive(), expected)  # the other one is still in the mode
    leave.set()
    thread.join()
    assert model.config._attn_implementation == "sdpa"


def test_what_cannot_go_through_it_is_named():
    assert ours.unsupported_reason(llama()) is None
    model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=8, hidden_size=8, num_layers=1, attention_types=[[["global"], 1]], num_heads=1))  # fmt: skip
    assert "attention interface" in ours.unsupported_reason(model)
    chunked = llama()
    chunked.config.attention_chunk_size = 8
    assert "chunks" in ours.unsupported_reason(chunked)

    block = Block(llama(), ragged=False, padded=False)
    layer = block.model.model.layers[0].self_attn
    query = torch.zeros(2, 4, 40, 12, dtype=torch.float64)
    packed = pack_mask(block.visible, torch.tensor(block.cache.lengths), block.offsets)
    with pytest.raises(NotImplementedError, match="position_bias"):
        ours.lade_block_forward(layer, query, query, query, packed, position_bias=query)


class PackedLlama(LlamaAdapter):
    """Blocks by the block attention."""

    def forward_block(self, tokens, positions, visible, logit_rows, cache, key_mask, **arguments):
        cache.begin_block(tokens.shape[1], tokens.device)
        first_slots = None if key_mask is None else left_padding(key_mask)
        offsets = positions - positions[:, :1]
        with block_attention_mode(self.model):
            return self.model(
                input_ids=tokens,
                attention_mask=pack_mask(visible, torch.tensor(cache.lengths), offsets, first_slots),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logit_rows,
                **arguments,
            )


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.4}], ids=["greedy", "sampled"])
def test_generate_through_the_block_attention(sampling, lade_on, calls):
    model = llama()
    inputs = prompt(30, batch_size=3)
    inputs["attention_mask"][1, :7] = 0
    torch.manual_seed(3)
    expected = generate_plain(model, inputs, max_new_tokens=50, **sampling)
    before = type(adapter_for(model))
    lade.register_adapter("llama", PackedLlama)
    try:
        torch.manual_seed(3)
        assert torch.equal(model.generate(**inputs, max_new_tokens=50, **sampling), expected)
    finally:
        lade.register_adapter("llama", before)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert stats.steps < 50
    assert len(calls) == (stats.steps - 1) * model.config.num_hidden_layers
