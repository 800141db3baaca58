"""Adapters: models of unknown families are tried out first, and what an adapter changes stays off the user's model."""

import re
import threading
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from conftest import VOCAB, generate_plain, prompt, tiny_llama
from families import FAMILIES
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lade
from lade import models
from lade.models import base
from lade.models.view import private_view

ROOT = Path(__file__).parent.parent
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.3}  # fmt: skip


@pytest.fixture(autouse=True)
def registry(monkeypatch, lade_on):
    monkeypatch.setattr(models, "_adapters", dict(models._adapters))
    monkeypatch.setattr(models, "_vouched_for", set())
    lade.config_lade(LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)


class UnknownConfig(LlamaConfig):
    model_type = "unknown_family"


class Obedient(LlamaForCausalLM):
    config_class = UnknownConfig


class IgnoresMask(Obedient):
    """Sees whatever lies before it in the cache."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **arguments):
        return super().forward(input_ids, None, position_ids, past_key_values, **arguments)


class IgnoresPositions(Obedient):
    """Counts slots."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **arguments):
        return super().forward(input_ids, attention_mask, None, past_key_values, **arguments)


def build(kind):
    torch.manual_seed(0)
    model = kind(UnknownConfig(**SIZES)).double().eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Obedient, None), (IgnoresMask, "an ignored mask"), (IgnoresPositions, "trial block")],
)
def test_an_unknown_family_is_tried_out(kind, reason):
    model = build(kind)
    for _ in range(2):  # the second time from memory
        expected = generate_plain(model, prompt(), max_new_tokens=30)
        assert torch.equal(model.generate(**prompt(), max_new_tokens=30), expected)
        found = lade.last_stats().fallback_reason
        assert found is None if reason is None else reason in found


def test_a_subclass_of_a_known_family_is_tried_out_too():
    torch.manual_seed(0)
    model = IgnoresMask(LlamaConfig(**SIZES)).double().eval()
    assert model.config.model_type == "llama"
    expected = generate_plain(model, prompt(), max_new_tokens=30, eos_token_id=None)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=30, eos_token_id=None), expected)
    assert "an ignored mask" in lade.last_stats().fallback_reason


def test_the_trial_happens_once_and_leaves_no_trace(monkeypatch):
    model, calls = build(Obedient), []
    before = set(vars(model))
    original = models.probe.probe
    monkeypatch.setattr(models.probe, "probe", lambda adapter: calls.append(adapter) or original(adapter))
    state = torch.get_rng_state()
    for _ in range(3):
        model.generate(**prompt(), max_new_tokens=5)
    assert len(calls) == 1
    assert set(vars(model)) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_that_raises_is_a_reason(monkeypatch):
    model = build(Obedient)

    def broken(adapter):
        raise ValueError("a mask of two dimensions, please")

    monkeypatch.setattr(models.probe, "probe", broken)
    expected = generate_plain(model, prompt(), max_new_tokens=8)
    assert torch.equal(model.generate(**prompt(), max_new_tokens=8), expected)
    assert "two dimensions" in lade.last_stats().fallback_reason


def test_the_documented_example():
    text = (ROOT / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len(code.splitlines()) < 30
    names = {}
    exec(code.partition("lade.register_adapter")[0], names)
    torch.manual_seed(0)
    model = names["StyledLlama"](names["StyledConfig"](**SIZES)).double().eval()
    arguments = prompt() | {"style": torch.randn(SIZES["hidden_size"]).double()}
    plain = generate_plain(model, arguments, max_new_tokens=40, eos_token_id=None)

    assert torch.equal(model.generate(**arguments, max_new_tokens=40, eos_token_id=None), plain)
    assert "style" in lade.last_stats().fallback_reason
    exec(code, names)
    model.__class__ = names["StyledLlama"]
    assert torch.equal(model.generate(**arguments, max_new_tokens=40, eos_token_id=None), plain)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps < 40
    unstyled = model.generate(**prompt(), max_new_tokens=40, eos_token_id=None)
    assert not torch.equal(unstyled, plain)


@pytest.mark.parametrize("bad", ["LlamaAdapter", object, None])
def test_register_adapter_refuses(bad):
    with pytest.raises(TypeError, match=r"subclass of lade\.ModelAdapter"):
        lade.register_adapter("x", bad)


def test_register_adapter_refuses_a_type_as_name():
    with pytest.raises(TypeError, match="model_type must be a string"):
        lade.register_adapter(LlamaConfig, lade.ModelAdapter)


def causal_flash(module, query, key, value, attention_mask, **arguments):
    """Stands for flash attention: causal, and deaf to 4-D masks."""
    assert attention_mask is None or attention_mask.dim() == 2
    return sdpa_attention_forward(module, query, key, value, None, is_causal=query.shape[2] > 1, **arguments)


@pytest.fixture
def flash():
    """A model whose attention takes no mask, under a name as flash attention has it."""
    AttentionInterface.register("stand_in_flash", causal_flash)
    torch.manual_seed(0)
    model = tiny_llama()
    model.config._attn_implementation = "stand_in_flash"
    yield model
    AttentionInterface._global_mapping.pop("stand_in_flash")


def test_attention_without_masks_keeps_its_setting(flash):
    expected = generate_plain(flash, prompt(), max_new_tokens=30)
    assert torch.equal(flash.generate(**prompt(), max_new_tokens=30), expected)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps < 30
    assert flash.config._attn_implementation == "stand_in_flash"


def test_attention_keeps_its_setting_after_an_exception(flash):
    def failing(ids, scores):
        if ids.shape[1] > 27:
            raise RuntimeError("enough")
        return scores

    with pytest.raises(RuntimeError, match="enough"):
        flash.generate(**prompt(), max_new_tokens=30, logits_processor=[failing])
    assert flash.config._attn_implementation == "stand_in_flash"
    expected = generate_plain(flash, prompt(), max_new_tokens=9)
    assert torch.equal(flash.generate(**prompt(), max_new_tokens=9), expected)


def test_unknown_attention_falls_back(model):
    assert base.MASKED_ATTENTION == ("eager", "sdpa")
    AttentionInterface.register("my_attention", sdpa_attention_forward)
    own = tiny_llama()
    own.config._attn_implementation = "my_attention"
    expected = generate_plain(own, prompt(), max_new_tokens=9)
    assert torch.equal(own.generate(**prompt(), max_new_tokens=9), expected)
    assert "my_attention" in lade.last_stats().fallback_reason


def test_flex_attention():
    """Blocks run with sdpa; the prompt and plain generate() with the model's own."""
    flex = tiny_llama(torch.float32, attention="flex_attention")
    try:
        expected = generate_plain(flex, prompt(), max_new_tokens=12)
    except Exception as problem:  # flex attention runs where its compiler does
        pytest.skip(f"flex attention does not run here: {type(problem).__name__}")
    assert torch.equal(flex.generate(**prompt(), max_new_tokens=12), expected)
    assert lade.last_stats().fallback_reason is None
    assert flex.config._attn_implementation == "flex_attention"


def test_a_view_shares_weights_and_hooks_but_not_changes(model):
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    view = private_view(model, attention="eager")
    handle.remove()
    assert view.config._attn_implementation == "eager"
    assert view.model.layers[0].self_attn.config is view.model.config
    assert model.config._attn_implementation == "sdpa"
    assert all(ours is theirs for ours, theirs in zip(view.parameters(), model.parameters(), strict=True))
    view.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(2))
    del view.model.layers[1]
    model(**prompt())
    assert calls == []
    assert len(model.model.layers) == 2
    view(**prompt())
    assert calls == [2, 1]


def test_views_of_one_model_in_threads(flash):
    """Each call has its own view."""
    inputs = [prompt(seed=seed) for seed in range(3)]
    expected = [generate_plain(flash, each, max_new_tokens=24) for each in inputs]
    found = [None] * 3

    def run(index):
        found[index] = flash.generate(**inputs[index], max_new_tokens=24)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def named(name):
    return next(family for family in FAMILIES if family.name == name).build()


def parts_on_disk(model, tmp_path):
    """Dispatched by accelerate, all blocks but the first one on disk."""
    blocks = [
        name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList) and name.count(".") == 1
    ]
    (blocks,) = blocks
    others = {name: "cpu" for name, part in model.named_modules() if name and list(part.parameters(recurse=False))}
    layers = {f"{blocks}.{index}": "disk" if index else "cpu" for index in range(len(model.get_submodule(blocks)))}
    rest = {name: place for name, place in others.items() if not name.startswith(blocks)}
    return dispatch_model(model, rest | layers, main_device="cpu", offload_dir=tmp_path, force_hooks=True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_models_dispatched_by_accelerate(tmp_path, name):
    model = named(name)
    expected = generate_plain(model, prompt(), max_new_tokens=30)
    dispatched = parts_on_disk(model, tmp_path)
    assert "disk" in set(dispatched.hf_device_map.values())
    assert torch.equal(dispatched.generate(**prompt(), max_new_tokens=30), expected)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps <= 30


def test_a_dispatched_model_that_needs_a_view_falls_back(tmp_path):
    model = named("gpt_neo")
    expected = generate_plain(model, prompt(), max_new_tokens=12)
    dispatched = parts_on_disk(model, tmp_path)
    assert torch.equal(dispatched.generate(**prompt(), max_new_tokens=12), expected)
    assert "dispatched" in lade.last_stats().fallback_reason


@pytest.mark.filterwarnings("ignore")
def test_dynamic_int8(model):
    """Activations are rounded over the whole block, so tokens may differ from plain; it has to run, and to accept guesses."""
    quantised = torch.ao.quantization.quantize_dynamic(tiny_llama(torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    found = quantised.generate(**prompt(), max_new_tokens=40)
    assert found.shape == (1, 64)
    assert lade.last_stats().fallback_reason is None
    assert lade.last_stats().steps < 40


def test_int8_weights():
    """Weight-only quantisation rounds nothing that depends on the block."""
    torchao = pytest.importorskip("torchao.quantization")
    quantised = tiny_llama(torch.float32)
    torchao.quantize_(quantised, torchao.Int8WeightOnlyConfig())
    expected = generate_plain(quantised, prompt(), max_new_tokens=40)
    assert torch.equal(quantised.generate(**prompt(), max_new_tokens=40), expected)
    assert lade.last_stats().steps < 40
