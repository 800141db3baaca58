"""Inlined blocks (`lade/models/llama.py`, `lade/forward/inlined.py`): the bits of the model's own forward, compared
before use, and nothing else than what they are made for."""

import pytest
import torch
import transformers
from support import generate_plain, inference_tensors, prompt, tiny_llama
from support.families import FAMILIES
from torch import nn
from transformers.models.ernie4_5.modeling_ernie4_5 import Ernie4_5Attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import lade
from lade import models
from lade.block_size import tables
from lade.commands.forward_costs import causal_block, filled_cache
from lade.config import current_config
from lade.forward import runner
from lade.forward.choice import choose_inlining
from lade.forward.inlined import _verdicts
from lade.forward.packed import packing_error
from lade.forward.runner import BlockRunner
from lade.models.llama import InlinedLlama, LlamaAdapter
from lade.stats import GenerationStats

NEW = 24
TYPES = models.ADAPTERS[LlamaAdapter].split()
LLAMAS = [family for family in FAMILIES if family.name.partition("-")[0] in TYPES]


def built(family, dtype=torch.float32):
    if not family.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_class}")
    return family.build().to(dtype)


def generate(model, inputs, **arguments):
    result = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **arguments})
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    return result, stats


# What is computed.


def test_every_listed_family_is_tried():
    assert {family.name.partition("-")[0] for family in LLAMAS} == set(TYPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", LLAMAS, ids=lambda family: family.name)
@torch.no_grad()
def test_the_same_bits(family, dtype):
    adapter = LlamaAdapter(built(family, dtype))
    cache = filled_cache(adapter, 40, 8)
    inlined = adapter.inlined(adapter.block_model)
    for size in (1, 2, 7):
        block = causal_block(adapter, cache, size)
        expected = adapter.forward_block(block, cache).logits
        slots = [(layer.prefix_views["keys"].clone(), layer.prefix_views["values"].clone()) for layer in cache.layers]
        adapter.begin_block(block, cache)
        found = inlined(block, cache, adapter.masks(block))
        assert torch.equal(found, expected)
        for layer, (keys, values) in zip(cache.layers, slots, strict=True):
            assert torch.equal(layer.prefix_views["keys"], keys)
            assert torch.equal(layer.prefix_views["values"], values)


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["tree", "lookahead"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_are_plain_ones(lade_on, mode, batch_size, arguments):
    """Rows of other lengths, with padding, and blocks whose slots differ by row."""
    model = tiny_llama(torch.float32)
    lade.config_lade(MODE=mode)
    inputs = prompt(batch_size=batch_size)
    if batch_size > 1:
        inputs["attention_mask"][0, :3] = 0
    torch.manual_seed(1)
    expected = generate_plain(model, inputs, max_new_tokens=NEW, **{"do_sample": False, **arguments})
    torch.manual_seed(1)
    found, stats = generate(model, inputs, **arguments)
    assert torch.equal(found, expected)
    assert stats.inlining_reason is None
    assert stats.inlined_steps >= stats.steps - 4  # without the prompt's and those that are compared
    assert not inference_tensors(model)


@pytest.mark.parametrize("family", LLAMAS, ids=lambda family: family.name)
def test_families(lade_on, family):
    model = built(family)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW, do_sample=False)
    found, stats = generate(model, prompt())
    assert torch.equal(found, expected)
    assert stats.inlined_steps
    assert stats.inlining_reason is None


@pytest.mark.parametrize("pack", [0, 1])
def test_half_precision_texts_do_not_change_by_it(lade_on, pack, monkeypatch):
    model = tiny_llama(torch.bfloat16, vocab_size=256, hidden_size=64, intermediate_size=160)
    monkeypatch.setattr(tables, "folder", lambda: None)  # no table of costs that the first call stores for the second
    found = []
    for inline in (0, 1):
        lade.config_lade(INLINE=inline, PACK=pack, SHARE=0)
        text, stats = generate(model, prompt(), max_new_tokens=40)
        assert bool(stats.inlined_steps) == bool(inline)
        assert bool(stats.packed_weights) == (bool(pack) and packing_error(torch.bfloat16) is None)
        found.append((text.tolist(), stats.block_tokens))
    assert found[0] == found[1]


# Compared before use.


def test_what_it_says_decides(lade_on, monkeypatch):
    """The negative control, behind a comparison that found nothing."""
    model = tiny_llama(torch.float32)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW, do_sample=False)
    generate(model, prompt())
    run = InlinedLlama.__call__
    monkeypatch.setattr(InlinedLlama, "__call__", lambda *arguments: -run(*arguments))
    assert not torch.equal(generate(model, prompt())[0], expected)


def another_mask(run, self, block, cache, masks):
    return run(self, block, cache, masks * 0)


def of_another_version(run, self, block, cache, masks):
    run(self, block, cache, masks)
    raise AttributeError("no such attribute")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_mask, "differs from the model's own by more than rounding"),
        (of_another_version, "cannot run inlined (AttributeError: no such attribute)"),
    ],
)
def test_a_difference_is_found(lade_on, monkeypatch, change, reason):
    model = tiny_llama(torch.float32)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW, do_sample=False)
    run = InlinedLlama.__call__
    monkeypatch.setattr(InlinedLlama, "__call__", lambda *arguments: change(run, *arguments))
    for _ in range(2):
        found, stats = generate(model, prompt())
        assert torch.equal(found, expected)
        assert stats.inlined_steps == 0
        assert reason in stats.inlining_reason
    (verdicts,) = _verdicts.of(model).values()
    assert len(verdicts) == 1


def test_one_bit_counts_in_half_precision(lade_on, monkeypatch):
    run = InlinedLlama.__call__

    def nearly(*arguments):
        logits = run(*arguments)
        return logits * (1 + torch.finfo(logits.dtype).eps)

    monkeypatch.setattr(InlinedLlama, "__call__", nearly)
    for dtype, is_fine in ((torch.float32, True), (torch.bfloat16, False)):
        stats = generate(tiny_llama(dtype), prompt())[1]
        assert (stats.inlining_reason is None) == is_fine


def of_other_types(model, monkeypatch):
    model.model.layers[0].mlp.act_fn = nn.ReLU().eval()
    model.model.layers[1].input_layernorm = nn.LayerNorm(48).eval()


def in_other_places(model, monkeypatch):
    """Of types that the model had already."""
    for layer in model.model.layers:
        layer.mlp.act_fn, layer.input_layernorm = layer.input_layernorm, layer.mlp.act_fn


def of_another_class(model, monkeypatch):
    """Its forward rotates pairs of neighbours."""
    monkeypatch.setattr(LlamaAttention, "forward", Ernie4_5Attention.forward)


@pytest.mark.parametrize("change", [of_other_types, in_other_places, of_another_class])
def test_what_has_changed_is_compared_anew(lade_on, monkeypatch, change):
    model = tiny_llama(torch.float32, intermediate_size=48)
    generate(model, prompt())
    change(model, monkeypatch)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW, do_sample=False)
    found, stats = generate(model, prompt())
    assert torch.equal(found, expected)
    assert bool(stats.inlined_steps) == (change is not of_another_class)
    assert len(_verdicts.of(model)) == 2


def test_the_reason_stays_where_later_blocks_run(lade_on, monkeypatch):
    """The first block's rows have equal lengths."""
    run = InlinedLlama.__call__
    wrong = lambda self, block, cache, masks: run(self, block, cache, masks) * (-1 if cache.slots is None else 1)  # noqa: E731
    monkeypatch.setattr(InlinedLlama, "__call__", wrong)
    stats = generate(tiny_llama(torch.float32), prompt(batch_size=3))[1]
    assert stats.inlined_steps
    assert "differs" in stats.inlining_reason


def test_one_token_is_compared_by_itself(lade_on, monkeypatch):
    """Blocks of several tokens come first."""
    run, model = InlinedLlama.__call__, tiny_llama(torch.float32)
    wrong = lambda self, block, *others: run(self, block, *others) * (1 - 2 * (block.tokens.shape[1] == 1))  # noqa: E731
    monkeypatch.setattr(InlinedLlama, "__call__", wrong)
    adapter = LlamaAdapter(model)
    blocks = runner.BlockRunner(adapter)
    assert blocks.use_inlined() is None
    cache = filled_cache(adapter, 20, 8)
    for size, num_inlined in ((4, 0), (4, 1), (1, 1), (1, 1)):
        block = causal_block(adapter, cache, size)
        assert torch.equal(blocks.forward(block, cache).logits, adapter.forward_block(block, cache).logits)
        assert blocks._inlined.num_steps == num_inlined
    assert "differs" in blocks._inlined.refusal


# Where it does not run.


def hooked(model, monkeypatch):
    model.model.layers[0].register_forward_hook(lade.allow_hook(lambda *_: None))


def extended(model, monkeypatch):
    model.model.layers[0].self_attn.extra = nn.Identity()


def wrapped(model, monkeypatch):
    """By a type that the model has elsewhere."""
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp).eval()
    assert generate(model, prompt())[1].inlined_steps
    layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj).eval()


def headless(model, monkeypatch):
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)


def patched(model, monkeypatch):
    forward = model.model.layers[0].forward
    model.model.layers[0].forward = lambda *arguments, **named: forward(*arguments, **named)


def called_otherwise(model, monkeypatch):
    call = LlamaMLP.__call__
    monkeypatch.setattr(LlamaMLP, "__call__", lambda self, hidden: 2 * call(self, hidden))


def rotated_otherwise(model, monkeypatch):
    rotate = modeling_llama.apply_rotary_pos_emb
    rotated = lambda *arguments, **named: [-each for each in rotate(*arguments, **named)]  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)


def split_over_processes(model, monkeypatch):
    model._tp_size = 2


def in_training(model, monkeypatch):
    model.train()


def with_eager_attention(model, monkeypatch):
    model.set_attn_implementation("eager")


CHANGES = [
    hooked,
    extended,
    wrapped,
    headless,
    patched,
    called_otherwise,
    rotated_otherwise,
    split_over_processes,
    in_training,
    with_eager_attention,
]


@pytest.mark.parametrize("change", CHANGES)
def test_not_where_modules_matter(lade_on, monkeypatch, change):
    """Not even after a comparison that found nothing."""
    model = tiny_llama(torch.float32)
    assert generate(model, prompt())[1].inlined_steps
    change(model, monkeypatch)
    expected = generate_plain(model, prompt(), max_new_tokens=NEW, do_sample=False)
    found, stats = generate(model, prompt())
    assert torch.equal(found, expected)
    assert stats.inlined_steps == 0
    assert stats.inlining_reason


def test_not_where_the_user_wants_what_lies_between(lade_on):
    model = tiny_llama(torch.float32)
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "do_sample": False}
    expected = generate_plain(model, prompt(), max_new_tokens=8, **wanted)
    found, stats = generate(model, prompt(), max_new_tokens=8, **wanted)
    assert torch.equal(found.sequences, expected.sequences)
    assert stats.inlined_steps == 0
    assert stats.inlining_reason == "output_hidden_states asks for more than the inlined forward returns"
    for mine, theirs in zip(found.hidden_states[1], expected.hidden_states[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_not_where_it_is_switched_off_or_others_run(lade_on):
    model = tiny_llama(torch.float32)
    for settings in ({"INLINE": 0}, {"INLINE": 1, "USE_FLASH": 1}):
        lade.config_lade(**settings)
        assert generate(model, prompt())[1].inlined_steps == 0
    with pytest.raises(ValueError, match="INLINE must be 0 or 1, got 2"):
        lade.config_lade(INLINE=2)


def test_not_on_a_gpu_nor_in_a_graph(static_blocks, graphs):
    """Nor is that a reason to be told of a model that is elsewhere."""
    runner, stats = BlockRunner(LlamaAdapter(tiny_llama(torch.float32).to("meta"))), GenerationStats()
    choose_inlining(runner, current_config(), stats)
    assert (runner.kind, stats.inlining_reason) == ((), None)
    stats = generate(tiny_llama(torch.float32), prompt())[1]
    assert (stats.captured_steps, stats.inlined_steps) == (stats.steps - 1, 0)
    assert graphs


def test_costs_have_a_kind_of_their_own(lade_on):
    runner = BlockRunner(LlamaAdapter(tiny_llama(torch.float32)))
    assert runner.kind == ()
    assert runner.use_inlined() is None
    assert runner.kind == ("inlined",)


def test_the_model_is_as_it_was(lade_on):
    model = tiny_llama(torch.float32)
    before = {name: (part, type(part), list(vars(part))) for name, part in model.named_modules()}
    assert generate(model, prompt())[1].inlined_steps
    assert {name: (part, type(part), list(vars(part))) for name, part in model.named_modules()} == before
