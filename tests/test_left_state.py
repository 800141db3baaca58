"""A call leaves every buffer and attribute as plain generate() does; test_families.py has it for every family."""

import copy
import functools
from collections import Counter, deque
from contextlib import nullcontext

import pytest
import torch
from support import assert_same_state, generate_plain, prompt, tiny_llama
from support.families import LONGROPE, named, rope
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import lade
from lade.models import eligibility

LIMIT = 40
ROPES = {  # those that follow the length, and one that does not
    "default": rope("default"),
    "dynamic": rope("dynamic", factor=2.0),
    "longrope": LONGROPE | {"original_max_position_embeddings": LIMIT},
}


def with_rope(kind, **settings):
    return tiny_llama(max_position_embeddings=LIMIT, rope_parameters=dict(ROPES[kind]), **settings)


def assert_same_lives(model, prompts, num_new=20, **arguments):
    """The same calls with lade and, on a copy, without. Returns how many fell back."""
    twin, num_plain = copy.deepcopy(model), 0
    for inputs in prompts:
        expected = generate_plain(twin, inputs, max_new_tokens=num_new, do_sample=False, **arguments)
        assert torch.equal(model.generate(**inputs, max_new_tokens=num_new, do_sample=False, **arguments), expected)
        assert_same_state(model, twin)
        num_plain += lade.last_stats().fallback_reason is not None
    return num_plain


@pytest.mark.parametrize(("mode", "num_key_value_heads"), [("tree", 2), ("lookahead", 4)])
@pytest.mark.parametrize("kind", ROPES)
def test_ropes(lade_on, kind, mode, num_key_value_heads):
    """Behind and before the boundary: what a call leaves decides the next one's text, with shadow models as without."""
    lade.config_lade(MODE=mode)
    model = with_rope(kind, num_key_value_heads=num_key_value_heads)
    assert assert_same_lives(model, [prompt(60), prompt(45), prompt(12), prompt(LIMIT), prompt(20, batch_size=2)]) == 0
    assert max(lade.last_stats().block_tokens) > 1


class Unknown(LlamaForCausalLM):
    """Counts its forwards and remembers their sizes in all kinds of containers and a buffer."""

    def __init__(self, config):
        super().__init__(config)
        self.num_forwards, self.sizes, self.by_size = 0, [], {}
        self.nested, self.counts, self.latest = {"sizes": []}, Counter(), deque(maxlen=2)
        self.register_buffer("largest", torch.zeros((), dtype=torch.long))

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, **arguments):
        self.num_forwards += 1
        self.sizes.append(input_ids.shape[1])
        self.by_size[input_ids.shape[1]] = input_ids
        self.counts[input_ids.shape[1]] += 1
        for sizes in (self.nested["sizes"], self.latest):
            sizes.append(input_ids.shape[1])
        self.largest.fill_(max(int(self.largest), input_ids.shape[1]))
        self.just_added = input_ids
        return super().forward(input_ids=input_ids, **arguments)


@pytest.fixture
def short_calls_fall_back(lade_on, monkeypatch):
    monkeypatch.setattr(eligibility, "LEAST_TOKENS", 3)


def test_own_forwards_leave_nothing(short_calls_fall_back):
    """A warm-up, and a self-check that refuses, on models in which an earlier call has left something."""
    for kind in (LlamaForCausalLM, Unknown):
        model = kind(with_rope("dynamic").config).double().eval()
        model.generation_config.eos_token_id = None
        assert assert_same_lives(model, [prompt(60)], num_new=2) == 1  # too short for lade
        twin = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="Unknown keeps something") if kind is Unknown else nullcontext():
            lade.warmup(model, prompt_tokens=8, max_new_tokens=8)
        assert_same_state(model, twin)
    model(**prompt(30))  # the control
    with pytest.raises(AssertionError):
        assert_same_state(model, twin)


class Stateful(nn.Linear):
    """Keeps what keep(self, x) says."""

    def forward(self, x):
        self.keep(x)
        return super().forward(x)


KEEPERS = {
    "a number": lambda self, x: setattr(self, "calls", vars(self).get("calls", 0) + 1),
    "a tensor": lambda self, x: setattr(self, "latest", x.clone()),
    "a list of lists": lambda self, x: vars(self).setdefault("seen", [[]])[0].append(x.shape[1]),
    "a buffer": lambda self, x: self.count.add_(1),
    "of blocks": lambda self, x: x.shape[1] > 1 and setattr(self, "prompt", x),
    "the same": lambda self, x: (setattr(self, "scale", self.in_features**-0.5), self.count.fill_(7)),
    "of the first": lambda self, x: vars(self).setdefault("first", x),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_foreign_modules_that_keep_something(lade_on, monkeypatch, kind):
    """From one forward to the next, as a counter does: they would see guesses, which no comparison of logits shows."""
    monkeypatch.setattr(Stateful, "keep", KEEPERS[kind], raising=False)
    model = tiny_llama()
    weight = model.lm_head.weight
    model.lm_head = Stateful(*weight.T.shape, bias=False).eval()
    model.lm_head.weight = weight
    model.lm_head.register_buffer("count", torch.zeros(()))
    is_served = kind in ("the same", "of the first")
    assert assert_same_lives(model, [prompt(60), prompt(45)]) == (0 if is_served else 2)
    assert is_served or "Stateful keeps something" in lade.last_stats().fallback_reason


class Gated(nn.Linear):
    """Adds to the last token of each forward as much as its gate says, which no guess would get."""

    def forward(self, x):
        gate = self.gates["strength"] if "gates" in vars(self) else self.gate
        return super().forward(x) * (1 + float(gate) * (torch.arange(x.shape[1], 0, -1) == 1)[:, None])


GATES = {  # how it is made, and how it is set later
    "an attribute": (lambda self: setattr(self, "gate", 0.0), lambda self: setattr(self, "gate", 1.0)),
    "of its class": (
        lambda self: setattr(self, "__class__", type("Own", (Gated,), {"gate": 0.0})),
        lambda self: setattr(type(self), "gate", 1.0),
    ),
    "in a container": (
        lambda self: setattr(self, "gates", {"strength": 0}),
        lambda self: self.gates.update(strength=1),
    ),
    "a weight": (
        lambda self: setattr(self, "gate", nn.Parameter(torch.zeros(()))),
        lambda self: self.gate.data.fill_(1),
    ),
    "a buffer": (lambda self: self.register_buffer("gate", torch.zeros(())), lambda self: self.gate.fill_(1)),
}


@pytest.mark.parametrize("kind", GATES)
def test_foreign_modules_that_are_switched_on_later(lade_on, kind):
    """After a self-check that they have passed: a switch, or the strength of a vector that is added."""
    model, (make, switch_on) = tiny_llama(), GATES[kind]
    layer = model.model.layers[0].mlp.down_proj
    layer.__class__ = Gated
    make(layer)
    assert assert_same_lives(model, [prompt(20)]) == 0
    switch_on(layer)
    assert assert_same_lives(model, [prompt(20), prompt(24)]) == 2
    assert "differed from one-token decoding" in lade.last_stats().fallback_reason


class Growing(LlamaRotaryEmbedding):
    """Has a table as long as the longest text so far, as those of flash-attn."""

    size = 0

    def forward(self, x, position_ids):
        self.size = max(self.size, int(position_ids.max()) + 1)
        return super().forward(x, position_ids)


def test_foreign_tables_that_grow(lade_on):
    model, twin = tiny_llama(), tiny_llama()
    for each in (model, twin):
        each.model.rotary_emb.__class__ = Growing
    for inputs in (prompt(60), prompt(45)):
        expected = generate_plain(twin, inputs, max_new_tokens=20)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20), expected)
        assert lade.last_stats().fallback_reason is None
    assert model.model.rotary_emb.size >= twin.model.rotary_emb.size == 79


def test_a_self_check_moves_no_frequencies(short_calls_fall_back, monkeypatch):
    """Rotary frequencies that a call has grown are those of the next call, as without lade."""
    model = with_rope("dynamic")
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    assert assert_same_lives(model, [prompt(60)], num_new=2) == 1
    assert assert_same_lives(model, [prompt(45), prompt(12)], num_new=8) == 0


def test_a_table_that_grows(lade_on):
    """XGLM makes a table of positions as large as the forward needs: no block may reach over its end."""
    model = named("xglm").build()
    room = model.config.max_position_embeddings
    assert assert_same_lives(model, [prompt(room - 8)], num_new=6) == 1
    assert "has no room" in lade.last_stats().fallback_reason
    assert assert_same_lives(model, [prompt(room - 8), prompt(room - 100)], num_new=36) == 1
