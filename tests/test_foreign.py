"""Code of somebody else's in a model: hooks, attention functions and forwards are tried out, or refused and named."""

import functools
import gc
import types
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from support import compare, generate_plain, prompt, tiny_llama
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import lade
from lade.common.compat import CACHE_NAME
from lade.models import foreign, self_check

SDPA = functional.scaled_dot_product_attention
EAGER = modeling_llama.eager_attention_forward
MASK = modeling_llama.create_causal_mask


@pytest.fixture(autouse=True)
def settings(lade_on):
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=5, GUESS_SET_SIZE=4)


@pytest.fixture
def model():
    return tiny_llama()


def check(model, reason=None, inputs=None, **arguments):
    """`compare`, and lookahead gained where it ran. Returns why it did not."""
    stats = compare(model, inputs, reason, **arguments)
    assert reason or stats.steps < stats.generated_tokens
    return stats.fallback_reason


def tensor_of(output):
    return output[0] if isinstance(output, tuple) else output


def with_tensor(output, tensor):
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


def shifted(output, by):
    """What a hook returns that adds to single tokens."""
    return with_tensor(output, tensor_of(output) + by * (tensor_of(output).shape[1] == 1))


def shifting(where):
    """A hook that adds to the hidden states where(h) says so. h: [B, q, H]."""

    def steer(module, args, output):
        h = tensor_of(output)
        return with_tensor(output, h + 3.0 * where(h) * torch.arange(h.shape[-1]).to(h).sin())

    return steer


HOOKS = {
    "single tokens": (lambda h: h.shape[1] == 1, "trial block"),
    "blocks": (lambda h: h.shape[1] > 1, "trial block"),
    "large blocks": (lambda h: h.shape[1] > 20, "trial block"),
    "by index": (lambda h: torch.arange(h.shape[1])[None, :, None] / 8, "trial block"),
    "by chance": (lambda h: torch.rand(h.shape[:2])[..., None], "trial block"),
    "everything": (lambda h: 1, None),
    "by content": (lambda h: h[..., :1] > 0, None),
    "by row": (lambda h: torch.arange(len(h))[:, None, None], None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_an_allowed_hook_is_tried_out(model, trials, kind):
    where, reason = HOOKS[kind]
    before = generate_plain(model, prompt(batch_size=2), max_new_tokens=24)
    model.model.layers[0].register_forward_hook(lade.allow_hook(shifting(where)))
    said = {check(model, reason, prompt(batch_size=2), do_sample=do_sample) for do_sample in (False, True)}
    assert len(said) == len(trials) == 1
    if reason is not None:
        assert "with shifting.<locals>.steer differed from one-token decoding by more than rounding" in said.pop()
    if kind != "large blocks":  # plain decoding has none, but the prompt
        assert not torch.equal(generate_plain(model, prompt(batch_size=2), max_new_tokens=24), before)


@pytest.mark.parametrize("is_allowed", [False, True])
@pytest.mark.parametrize("kind", ["module", "global", "module, before", "global, before"])
def test_wherever_hooks_are_put_on(model, kind, is_allowed):
    layer = model.model.layers[0].mlp

    def steer(module, args, output=None):
        if module is layer:
            h = args[0] if output is None else output
            return h + 3.0 * (h.shape[1] == 1)
        return None

    register = {
        "module": layer.register_forward_hook,
        "global": register_module_forward_hook,
        "module, before": layer.register_forward_pre_hook,
        "global, before": register_module_forward_pre_hook,
    }[kind]
    with register(lade.allow_hook(steer) if is_allowed else steer):
        assert "steer" in check(model, "trial block" if is_allowed else "allow_hook")
    check(model)


@pytest.mark.parametrize("name", ["position_ids", CACHE_NAME])
def test_a_hook_that_goes_by_position(model, name):
    """Positions of a block are right, what lies in the cache is not all of the text before a token."""

    def steer(module, args, kwargs):
        (h,) = args
        positions = kwargs[name] if name == "position_ids" else torch.tensor([[kwargs[name].get_seq_length()]])
        return (h + 0.5 * positions[..., None],), kwargs

    model.model.layers[0].register_forward_pre_hook(lade.allow_hook(steer), with_kwargs=True)
    check(model, None if name == "position_ids" else "trial block")


def test_a_hook_meets_nothing_that_plain_generate_would_not_show_it(model, trials):
    kept = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: kept.append(tensor_of(output).clone()))
    generate_plain(model, prompt(), max_new_tokens=12)
    expected = kept.copy()
    kept.clear()
    model.generate(**prompt(), max_new_tokens=12)
    assert "allow_hook" in lade.last_stats().fallback_reason
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, expected, strict=True))
    assert not trials


def test_hooks_come_and_go(model, trials):
    """A verdict is for one hook at one place, and is not asked for twice."""
    layers = model.model.layers
    steer, count = lade.allow_hook(shifting(lambda h: h.shape[1] == 1)), lade.allow_hook(lambda *_: None)
    for _ in range(2):
        check(model)
        for hook, layer, reason in ((count, 0, None), (steer, 0, "trial block"), (count, 1, None)):
            with layers[layer].register_forward_hook(hook):
                check(model, reason)
    assert len(trials) == 3


class Shifting:
    """Bound methods are made anew each time that somebody asks for them."""

    strength = 0.0

    def steer(self, module, args, output):
        return shifted(output, self.strength)

    __call__ = steer


def test_bound_methods_and_objects(model, trials):
    for hook in (Shifting(), Shifting().steer, functools.partial(Shifting.steer, Shifting())):
        lade.allow_hook(hook)
        for _ in range(2):
            again = types.MethodType(hook.__func__, hook.__self__) if isinstance(hook, types.MethodType) else hook
            with model.model.layers[0].register_forward_hook(again):
                check(model)
    assert len(trials) == 3


def test_a_hook_that_has_changed_is_allowed_anew(model, trials):
    hook = lade.allow_hook(Shifting())
    model.model.layers[0].register_forward_hook(hook)
    check(model)
    hook.strength = 3.0
    lade.allow_hook(hook)
    check(model, "trial block")
    assert len(trials) == 2


def steer(module, args, output, by, names):
    return shifted(output, by)


@pytest.mark.parametrize("keeps_nothing", [False, True])
def test_partial_functions_with_the_same_plain_arguments_are_one_hook(model, trials, monkeypatch, keeps_nothing):
    """As those that peft puts on for each call, and which need nobody's leave."""
    if keeps_nothing:
        monkeypatch.setattr(foreign, "RETAINS_NOTHING", foreign.AUTHORS | {__name__})
    else:
        lade.allow_hook(functools.partial(steer, by=0.0, names=["a", "b"]))
    for by in (0.0, 0.0, 3.0, 3.0):
        with model.model.layers[0].register_forward_hook(functools.partial(steer, by=by, names=["a", "b"])):
            check(model, None if by == 0.0 else "trial block" if keeps_nothing else "allow_hook")
    assert len(trials) == 1 + keeps_nothing


@pytest.mark.parametrize("bad", [None, "steer", 3])
def test_allow_hook_takes_hooks(bad):
    with pytest.raises(TypeError, match="hook must be callable"):
        lade.allow_hook(bad)


def test_a_hook_is_not_kept_alive(model, monkeypatch):
    hook = lade.allow_hook(shifting(lambda h: 1))
    with model.model.layers[0].register_forward_hook(hook):
        check(model)
    gone = weakref.ref(hook)
    del hook
    gc.collect()
    assert gone() is None
    monkeypatch.setattr(self_check, "MOST_KINDS", 2)
    for _ in range(3):  # verdicts on hooks that are gone are dropped in the end
        with model.model.layers[0].register_forward_hook(lade.allow_hook(shifting(lambda h: 1))):
            check(model)
        assert self_check._trials.of(model).num_kinds <= 2
        gc.collect()


def test_a_model_is_not_kept_alive():
    model = tiny_llama()
    model.forward = types.MethodType(lambda self, **arguments: type(self).forward(self, **arguments), model)
    model.generate(**prompt(), max_new_tokens=5)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def good_attention(self, *args, **kwargs):
    return LlamaAttention.forward(self, *args, **kwargs)


def deaf_attention(self, hidden_states, attention_mask, **arguments):
    return LlamaAttention.forward(self, hidden_states, attention_mask=None, **arguments)


def check_deaf(model, attention):
    """Refused until it is allowed, and then by a trial."""
    check(model, "guesses that are rejected")
    lade.allow_hook(attention.forward)
    check(model, "ignore the mask")


def test_a_verdict_does_not_outlive_the_forward_it_was_about(model, trials):
    """The next bound method comes to lie at the first one's address."""
    attention = model.model.layers[0].self_attn
    attention.forward = lade.allow_hook(types.MethodType(good_attention, attention))
    address = id(attention.forward)
    check(model)
    del attention.forward
    others = []
    for _ in range(1000):
        others.append(types.MethodType(deaf_attention, attention))
        if id(others[-1]) == address:
            break
    attention.forward = others[-1]
    check_deaf(model, attention)
    attention.forward = types.MethodType(good_attention, attention)
    check(model)
    assert len(trials) == 2


def test_code_that_is_reloaded_into_the_same_function(model, trials):
    """As IPython's autoreload does it."""

    def patched(self, hidden_states, attention_mask, **arguments):
        return LlamaAttention.forward(self, hidden_states, attention_mask=attention_mask, **arguments)

    attention = model.model.layers[0].self_attn
    attention.forward = lade.allow_hook(types.MethodType(patched, attention))
    check(model)
    patched.__code__ = deaf_attention.__code__
    check_deaf(model, attention)
    assert len(trials) == 2


NO_ROOM = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(NO_ROOM)])
def test_missing_memory_is_no_verdict(model, error):
    is_full = True

    def forward(self, hidden_states, **kwargs):
        if is_full and hidden_states.shape[1] == 56:  # of the trial alone
            raise error
        return LlamaAttention.forward(self, hidden_states, **kwargs)

    attention = model.model.layers[0].self_attn
    attention.forward = types.MethodType(forward, attention)
    lade.allow_hook(attention.forward)
    check(model, "trial block failed on this")
    is_full = False
    check(model)


def deaf_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    is_causal = query.shape[2] > 1 and query.shape[2] == key.shape[2]
    return SDPA(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def half_sdpa(*args, **kwargs):
    return 0.5 * SDPA(*args, **kwargs)


def put_in_torch(change, monkeypatch):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", change)


def interface(change):
    """The same change as an attention function of transformers."""

    def attention(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            put_in_torch(change, patch)
            return sdpa_attention_forward(*args, **kwargs)

    return attention


def put_in_the_interface(change, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", interface(change))


def put_in_the_instance(change, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", interface(change))


@pytest.mark.parametrize(
    ("put", "change"),
    [
        (put_in_torch, half_sdpa),
        (put_in_torch, deaf_sdpa),
        (put_in_the_interface, deaf_sdpa),
        (put_in_the_instance, half_sdpa),
    ],
)
def test_a_swapped_attention(model, trials, put, change):
    reason = "ignore the mask" if change is deaf_sdpa else None
    check(model)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            put(change, patch)
            for _ in range(2):
                check(model, reason)
        check(model)  # as before, without a trial
    assert len(trials) == (1 if put is put_in_torch else 2)  # the same function again; another one each time


def deaf_eager(module, query, key, value, attention_mask, *args, **kwargs):
    mask = None if query.shape[2] < key.shape[2] else attention_mask
    return EAGER(module, query, key, value, mask, *args, **kwargs)


def deaf_mask(attention_mask, **arguments):
    is_block = attention_mask is not None and attention_mask.dim() == 4
    return MASK(attention_mask=None if is_block else attention_mask, **arguments)


@pytest.mark.parametrize("is_deaf", [False, True])
@pytest.mark.parametrize(("original", "deaf"), [(EAGER, deaf_eager), (MASK, deaf_mask)], ids=["attention", "mask"])
def test_a_swapped_global_of_the_modeling_file(trials, monkeypatch, original, deaf, is_deaf):
    """Which a forward calls; a wrapper that has taken over the name is somebody else's code, too."""
    model = tiny_llama(attention="eager")
    check(model)
    assert not trials
    swapped = deaf if is_deaf else lambda *args, **kwargs: original(*args, **kwargs)
    monkeypatch.setattr(modeling_llama, original.__name__, functools.wraps(original)(swapped))
    check(model, "ignore the mask" if is_deaf else None)
    assert trials


def test_a_function_of_transformers_under_anothers_name(model, monkeypatch):
    """It takes no mask of four dimensions."""
    functions = AttentionInterface._global_mapping
    monkeypatch.setitem(functions, "sdpa", functions["flash_attention_2"])
    for generate in (functools.partial(generate_plain, model, prompt()), functools.partial(model.generate, **prompt())):
        # Flash attention does not run here. How it fails depends on the version, and on whether it has failed before.
        with pytest.raises(Exception):  # noqa: B017, PT011
            generate(max_new_tokens=8)
    assert "trial block failed on this 'llama' model with flash_attention_forward" in lade.last_stats().fallback_reason


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_swapped_mask_function(model, monkeypatch, is_narrow):
    """Plain decoding would see less of the text than the blocks, whose masks lade makes."""

    def mask(*args, **kwargs):
        kwargs["allow_is_causal_skip"] = False
        made = sdpa_mask(*args, **kwargs)
        made[..., 8:20] &= not is_narrow
        return made

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", mask)
    check(model, "trial block" if is_narrow else None)


def test_a_swapped_call(model, trials, monkeypatch):
    call = LlamaAttention.__call__
    monkeypatch.setattr(LlamaAttention, "__call__", lambda self, **arguments: call(self, **arguments))
    check(model)
    assert trials


@pytest.mark.parametrize(("setting", "way"), [("COMPILE", "compile"), ("USE_FLASH", "kernel")])
def test_nothing_goes_past_a_swapped_attention(model, monkeypatch, setting, way):
    """Neither the kernel nor a compiled forward of an earlier call."""
    lade.config_lade(**{setting: 1})
    put_in_torch(half_sdpa, monkeypatch)
    check(model)
    assert "not transformers' own" in lade.last_stats().reasons[way]


class Steered(ModelHook):
    def post_forward(self, module, output):
        return shifted(output, 3.0)


def test_hooks_of_accelerate(model):
    """Its own classes of hooks are served; somebody else's is a hook as any."""
    add_hook_to_module(model.model.layers[0], ModelHook())
    check(model)
    hook = Steered()
    add_hook_to_module(model.model.layers[0], hook, append=True)
    check(model, "Steered")
    lade.allow_hook(hook)
    check(model, "trial block")


def test_what_accelerate_wraps_is_looked_at(model):
    attention = model.model.layers[0].self_attn
    attention.forward = types.MethodType(deaf_attention, attention)
    add_hook_to_module(attention, ModelHook())
    check_deaf(model, attention)


def test_hooks_of_transformers_are_served(model, trials):
    model.enable_input_require_grads()
    check(model)
    assert not trials


def test_a_trial_has_the_calls_rows(model):
    """A hook with an argument for each row, as peft's for mixed batches has it."""

    def by_row(module, args, output, factors):
        h = tensor_of(output)
        if len(factors) != len(h):
            raise ValueError("one factor a row")
        return with_tensor(output, h * torch.tensor(factors).to(h)[:, None, None])

    hook = lade.allow_hook(functools.partial(by_row, factors=[1.0, 2.0, 0.5]))
    model.model.layers[0].register_forward_hook(hook)
    check(model, inputs=prompt(batch_size=3))


def test_modules_of_torch_that_mix_tokens_are_tried_out(model):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 4, 64, dropout=0.0, batch_first=True)
    model.model.norm = nn.Sequential(model.model.norm, layer).double().eval()
    with self_check.checking_at_once(64):
        check(model, "trial block")


def test_logits_of_minus_infinity(model, trials):
    """A forward put on the model that forbids a token: the trial compares the others."""
    inner = model.forward

    @functools.wraps(inner)
    def forbidding(*args, **kwargs):
        output = inner(*args, **kwargs)
        output.logits = output.logits.index_fill(-1, torch.tensor([5]), -torch.inf)
        return output

    model.forward = lade.allow_hook(forbidding)
    check(model)
    assert trials
