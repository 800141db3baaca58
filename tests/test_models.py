"""Adapters: models of unknown families are tried out first, and what an adapter changes stays off the user's model."""

import copy
import functools
import re

import pytest
import torch
from accelerate import dispatch_model
from support import ROOT, VOCAB, compare, generate_plain, in_threads, note_calls, prompt, run_both, tiny_llama
from support.families import named
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lade
from lade import models
from lade.common.compat import CACHE_NAME
from lade.common.tolerance import MASK_EFFECT_RATIO
from lade.models import ModelAdapter
from lade.models.self_check import checking_at_once, trial_errors

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture(autouse=True)
def registry(monkeypatch, small_block):
    monkeypatch.setattr(models, "_adapters", dict(models._adapters))
    monkeypatch.setattr(models, "_vouched_for", set())


class UnknownConfig(LlamaConfig):
    model_type = "unknown_family"


class Obedient(LlamaForCausalLM):
    config_class = UnknownConfig


class IgnoresMask(Obedient):
    """Sees whatever lies before it in the cache."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, attention_mask=None, **arguments):
        return super().forward(attention_mask=None, **arguments)


class IgnoresPositions(Obedient):
    """Counts slots."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, position_ids=None, **arguments):
        return super().forward(position_ids=None, **arguments)


class ReadsTheLastRow(Obedient):
    """Takes the mask's last row for one of padding, and is causal otherwise."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, attention_mask=None, **arguments):
        if attention_mask is not None and attention_mask.dim() == 4:
            num_rows, num_slots = attention_mask.shape[-2:]
            causal = torch.ones(num_rows, num_slots, dtype=torch.bool).tril(num_slots - num_rows)
            attention_mask = attention_mask[:, :, -1:].expand(-1, -1, num_rows, -1)
            attention_mask = attention_mask.masked_fill(~causal, torch.finfo(attention_mask.dtype).min)
        return super().forward(attention_mask=attention_mask, **arguments)


class IgnoresMaskOfFew(Obedient):
    """As a kernel for a few queries may."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, input_ids=None, attention_mask=None, **arguments):
        attention_mask = None if input_ids.shape[1] <= 8 else attention_mask
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **arguments)


def build(kind, config_class=UnknownConfig, **changes):
    torch.manual_seed(0)
    model = kind(config_class(**SIZES | changes)).double().eval()
    model.generation_config.eos_token_id = None
    return model


PAYS = models.self_check.PAYS  # before the fixtures set it to 0
FAULTS = [IgnoresMask, IgnoresPositions, ReadsTheLastRow, IgnoresMaskOfFew]


@pytest.mark.parametrize("kind", [Obedient, *FAULTS])
@pytest.mark.parametrize("config_class", [UnknownConfig, LlamaConfig])
def test_an_unknown_family_is_tried_out(kind, config_class):
    """As is another class of a known family."""
    model = build(kind, config_class)
    for _ in range(2):  # the second time from memory
        compare(model, reason=None if kind is Obedient else "trial block", max_new_tokens=30)


@pytest.mark.parametrize("kind", [Obedient, *FAULTS])
@pytest.mark.parametrize("largest", [8, 64])
def test_a_trial_in_half_precision(kind, largest):
    """Rounding is far below a fault in one of the two blocks, after a long text."""
    model = build(kind, max_position_embeddings=1024).bfloat16()
    found = trial_errors(models.adapter_for(model), 512, largest)
    is_fine = all(error * MASK_EFFECT_RATIO[torch.bfloat16] < effect for error, effect in found)
    assert is_fine == (kind is Obedient)


def test_the_trial_waits_until_it_is_a_small_part(monkeypatch, caplog):
    """What passed for a long text need not be tried out for a shorter one."""
    monkeypatch.setattr(models.self_check, "PAYS", PAYS)
    model, lengths = build(Obedient), note_calls(monkeypatch, models.self_check, "trial_errors", lambda *args: args[1])
    wait = models.self_check.WAITS
    first = 20 * (10 + 6.4) / (50 + 1)  # calls of 50 tokens, after 10 of the prompt
    for number in range(9):
        reason = wait if number + 1 < first else None
        compare(model, prompt(10), reason, max_new_tokens=50)
        assert lengths == [64] * (reason is None)
    for num_new, reason, tried in ((80, wait, [64]), (20, None, [64]), (30, None, [64])):
        compare(model, prompt(10), reason, max_new_tokens=num_new)
        assert lengths == tried
    lade.warmup(model, 30, 60)
    for num_new in (80, 10):
        compare(model, prompt(10), max_new_tokens=num_new)
        assert lengths == [64, 128]
    lade.config_lade(MODE="tree")  # for which a warm-up's own calls are shorter
    lade.warmup(model, 30, 230)
    compare(model, prompt(30), max_new_tokens=230)
    assert lengths == [64, 128, 512]
    assert not [record for record in caplog.records if "plain generate()" in record.message]


def test_a_wrapped_model_is_warmed_up(monkeypatch):
    """As peft's are, whose generate() ends in that of the model inside."""
    monkeypatch.setattr(models.self_check, "PAYS", PAYS)

    class Wrapper(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.base_model, self.device, self.dtype = model, model.device, model.dtype

        def __getattr__(self, name):
            return super().__getattr__(name) if name in ("base_model", "_modules") else getattr(self.base_model, name)

    model = build(Obedient)
    compare(model, reason=models.self_check.WAITS, max_new_tokens=8)
    lade.warmup(Wrapper(model), 24, 40)
    compare(model, max_new_tokens=8)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_model_that_lacks_what_the_checks_ask_for(is_training, monkeypatch):
    """As in repositories with code of their own: each call goes to plain generate(), with the cause as its reason."""
    model = build(Obedient).train(is_training)
    monkeypatch.setattr(Obedient, "get_input_embeddings", property())
    with checking_at_once(64):
        for batch_size in (1, 2):
            compare(model, prompt(24, batch_size), "AttributeError")


def test_a_longer_text_is_tried_out_anew():
    """A window that the code does not use, whatever the configuration says, shows only beyond it."""
    model = build(Obedient, sliding_window=100)
    compare(model, max_new_tokens=30)
    for cache in (DynamicCache, lambda: DynamicCache(config=model.config)):
        compare(model, prompt(120), "", max_new_tokens=12, cache=cache)


def test_layers_with_another_attention_than_the_model_says():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config._attn_implementation = "eager"
    compare(model, reason="its layers say 'eager'")


def test_a_name_alone_does_not_make_a_family():
    """The class is another, so its code is tried out as any other's."""
    model = build(Obedient)
    model.config.model_type = "mpt"
    compare(model, max_new_tokens=20)


def test_guesses_have_embeddings():
    """A head wider than the embedding: what no embedding exists for is no guess either."""
    model = tiny_llama(tie_word_embeddings=False)
    head = torch.nn.Linear(48, VOCAB + 20, bias=False).double()
    torch.nn.init.normal_(head.weight, std=0.3)
    model.lm_head = head
    compare(model, max_new_tokens=30, suppress_tokens=list(range(VOCAB, VOCAB + 20)))


def test_hooks_on_modules_of_a_shadow_model():
    model, calls, path = named("qwen3_next").build(), [], "model.layers.0.linear_attn"

    def steer(module, args, output):
        calls.append(module)
        tensor, *rest = output if isinstance(output, tuple) else (output,)
        return (tensor * 0.5 + 0.2, *rest) if rest else tensor * 0.5 + 0.2

    before = model.generate(**prompt(), max_new_tokens=20)
    handle = model.get_submodule(path).register_forward_hook(lade.allow_hook(steer))
    compare(model, max_new_tokens=20)
    assert len(calls) > 20
    assert not torch.equal(model.generate(**prompt(), max_new_tokens=20), before)
    handle.remove()


def test_a_changed_view_is_a_view():
    """An adapter that says how its shadow model differs need not say that it needs one."""

    class Changed(ModelAdapter):
        def change_shadow(self, view):
            view.model.norm.variance_epsilon = 1.0

    model = tiny_llama()
    adapter = Changed(model)
    assert adapter.needs_shadow
    assert not ModelAdapter(model).needs_shadow
    assert adapter.block_model.model.norm.variance_epsilon == 1.0 != model.model.norm.variance_epsilon


BOUNDARY = 40  # where the frequencies of Phi-3 switch


@pytest.fixture
def phi3():
    model = named("phi3-longrope-across").build()
    assert model.config.original_max_position_embeddings == BOUNDARY
    return model


@pytest.mark.parametrize("num_slots", [BOUNDARY, BOUNDARY + 1])
def test_phi3_up_to_its_boundary(phi3, num_slots):
    """The last token never goes through the model, so that a text may be one token longer than the boundary."""
    reason = run_both(phi3, max_new_tokens=num_slots + 1 - 24).fallback_reason
    assert reason is None if num_slots == BOUNDARY else "whole cache change" in reason


def test_phi3_goes_over_its_boundary_from_a_cache(phi3):
    cache = DynamicCache(config=phi3.config)
    first = generate_plain(phi3, prompt(BOUNDARY), max_new_tokens=1, past_key_values=cache)
    longer = torch.cat([first, prompt(6)["input_ids"]], dim=1)
    inputs = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    compare(phi3, inputs, "computes it anew", cache=lambda: copy.deepcopy(cache), max_new_tokens=12)


def test_a_callers_empty_cache_stays_empty_behind_phi3s_boundary(phi3):
    """The model makes another one, unless the caller's has no layers yet."""
    caches = [DynamicCache(config=phi3.config) for _ in range(2)]
    compare(phi3, prompt(BOUNDARY + 8), "computes it anew", cache=iter(caches).__next__, max_new_tokens=12)
    assert [cache.get_seq_length() for cache in caches] == [0, 0]
    for cache in (None, DynamicCache):
        assert compare(phi3, prompt(BOUNDARY + 8), cache=cache, max_new_tokens=12).steps < 12


def test_a_soft_cap_is_left_to_eager_attention(flash):
    assert lade.ModelAdapter(flash)._masked_attention == "sdpa"
    flash.config.attn_logit_softcapping = 30.0
    assert lade.ModelAdapter(flash)._masked_attention == "eager"


def test_the_documented_example():
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    code = re.sub(r"\bcache\b", CACHE_NAME, code)
    assert len(code.splitlines()) < 30
    names = {}
    exec(code.partition("lade.register_adapter")[0], names)
    model = build(names["StyledLlama"], names["StyledConfig"])
    arguments = prompt() | {"style": torch.randn(SIZES["hidden_size"]).double()}
    compare(model, arguments, "style", max_new_tokens=40)
    exec(code, names)
    model.__class__ = names["StyledLlama"]
    assert compare(model, arguments, max_new_tokens=40).steps < 40
    styled, unstyled = (model.generate(**inputs, max_new_tokens=40) for inputs in (arguments, prompt()))
    assert not torch.equal(unstyled, styled)


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [("x", bad, r"subclass of lade\.ModelAdapter") for bad in ("LlamaAdapter", object, None)]
    + [(LlamaConfig, lade.ModelAdapter, "model_type must be a string")],
)
def test_register_adapter_refuses(name, adapter, message):
    with pytest.raises(TypeError, match=message):
        lade.register_adapter(name, adapter)


def causal_flash(module, query, key, value, attention_mask, **arguments):
    """Stands for flash attention: causal, and deaf to 4-D masks."""
    assert attention_mask is None or attention_mask.dim() == 2
    return sdpa_attention_forward(module, query, key, value, None, is_causal=query.shape[2] > 1, **arguments)


@pytest.fixture
def flash():
    """A model whose attention takes no mask, under a name as flash attention has it."""
    AttentionInterface.register("stand_in_flash", causal_flash)
    model = tiny_llama()
    model.config._attn_implementation = "stand_in_flash"
    yield model
    AttentionInterface._global_mapping.pop("stand_in_flash")


def test_attention_without_masks_keeps_its_setting(flash):
    assert compare(flash, max_new_tokens=30).steps < 30
    assert flash.config._attn_implementation == "stand_in_flash"


def test_unknown_attention_falls_back(model):
    AttentionInterface.register("my_attention", sdpa_attention_forward)
    own = tiny_llama()
    own.config._attn_implementation = "my_attention"
    compare(own, reason="my_attention", max_new_tokens=9)


def test_flex_attention(monkeypatch):
    """Blocks run with sdpa; the prompt and plain generate() with the model's own."""
    # It is traced but not compiled, which would give the same in more time.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "_instance", None)
    flex = tiny_llama(torch.float32, attention="flex_attention", num_hidden_layers=1)
    try:
        generate_plain(flex, prompt(), max_new_tokens=6)
    except Exception as problem:  # flex attention runs where torch can trace
        pytest.skip(f"flex attention does not run here: {type(problem).__name__}")
    compare(flex, max_new_tokens=6)
    assert flex.config._attn_implementation == "flex_attention"


def test_views_of_one_model_in_threads(flash):
    """Each call has its own view."""
    inputs = [prompt(seed=seed) for seed in range(3)]
    expected = [generate_plain(flash, each, max_new_tokens=24) for each in inputs]
    found = in_threads(lambda each: flash.generate(**each, max_new_tokens=24), *inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_dispatched_by_accelerate(tmp_path, name):
    layer = "model.layers.1" if name == "llama" else "transformer.h.1"
    places = {"": "cpu", layer: "disk"}
    model = dispatch_model(named(name).build(), places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert {part.device.type for part in model.get_submodule(layer).parameters()} == {"meta"}
    compare(model, max_new_tokens=30)


def test_a_dispatched_model_has_no_shadow(flash):
    model = dispatch_model(flash, {"": "cpu"}, force_hooks=True)
    compare(model, reason="dispatched", max_new_tokens=12)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_int8(model):
    """Activations are rounded by one scale for the whole block."""
    quantised = torch.ao.quantization.quantize_dynamic(tiny_llama(torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    compare(quantised, reason="dynamic int8", max_new_tokens=40)


def test_a_trial_leaves_nothing_for_the_call():
    """The adapter that tried a model out holds a view and masks of the trial's block."""

    model = named("lfm2").build()
    model.model.layers[0].feed_forward.w1.__class__ = type("SomebodyElses", (torch.nn.Linear,), {})
    for _ in range(2):  # the first call tries the model
        compare(model, max_new_tokens=20)
