"""What plain generate() calls and lade does not: where others have replaced it, lookahead does not run."""

import collections
import functools
import gc
import inspect
import os
import pkgutil
import sys
import types
import weakref

import pytest
import torch
import transformers
from support import TOKENIZER, compare, generate_plain, note_calls, prompt, tiny_llama
from transformers import DynamicCache, GenerationMixin, LogitsProcessorList, TemperatureLogitsWarper, cache_utils

import lade
from lade.common.bypassed import CALLED, is_as_written, replaced_function
from lade.decoding import lookahead_decode
from lade.verification.selection import ROW_WISE_PROCESSORS

pytestmark = pytest.mark.usefixtures("small_block")
SITE = os.path.dirname(os.path.dirname(transformers.__file__)) + os.sep
LOOP = ("transformers/generation/", "transformers/cache_utils", "transformers/masking_utils")
PATHS = [f"{path}.{name}" for path, names in CALLED.items() for name in names.split()]
# They make tensors or belong to processors and criteria that lade calls, too. Some libraries replace them for a device.
TENSORS = {"amax", "arange", "clamp", "embedding", "empty", "flip", "full", "ones", "topk", "zeros"}
SETTINGS = [
    {},
    {"do_sample": True, "top_k": 5, "eos_token_id": [2, 5]},
    {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": 3},
    {"stop_strings": ["ab"], "tokenizer": TOKENIZER},
]


def called_in(loop, run):
    """How often, inside of `loop`, its functions are called, by code, and those of torch that they call."""
    found, own, depth = collections.Counter(), inspect.unwrap(loop).__code__, 0

    def is_in(code, *parts):
        return code.co_filename.removeprefix(SITE).replace(os.sep, "/").startswith(parts)

    def profile(frame, event, function):
        nonlocal depth
        code = frame.f_code
        if code is own:
            depth += (event == "call") - (event == "return")
        if event == "call" and depth and code is not own and not code.co_flags & inspect.CO_NESTED:
            of_torch = is_in(code, "torch/nn/functional") and is_in(frame.f_back.f_code, LOOP[0])
            if "<" not in code.co_name and (of_torch or is_in(code, *LOOP)):
                found[code] += 1
        if event == "c_call" and depth and is_in(code, LOOP[0]) and vars(torch).get(function.__name__) is function:
            found[function] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def code_of(path):
    """The code of a function of Python; the function if it is one of C."""
    function = pkgutil.resolve_name(path)
    return getattr(inspect.unwrap(getattr(function, "fget", function)), "__code__", function)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings), "greedy"))
def test_the_list_is_what_a_trace_finds(settings):
    """What plain generate() calls more often than lade, whose steps are fewer and whose code is another."""
    listed = {code_of(path) for path in PATHS} | {kind.__call__.__code__ for kind in ROW_WISE_PROCESSORS}
    call = {"max_new_tokens": 12, "do_sample": False} | settings
    model = tiny_llama()
    plain = called_in(GenerationMixin._sample, lambda: generate_plain(model, prompt(12), **call))
    own = called_in(lookahead_decode, lambda: model.generate(**prompt(12), **call))
    assert lade.last_stats().fallback_reason is None
    missing = [getattr(code, "co_name", None) or code.__name__ for code in plain - own if code not in listed]
    # Called by lade, too, before the loop and once per step.
    assert set(missing) <= TENSORS | {"_has_unfinished_sequences", "_valid_auto_compile_criteria"}
    assert len(plain - own) > 20


def forwarding(function):
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


@pytest.mark.parametrize("path", PATHS)
def test_each_function_on_the_list(monkeypatch, path):
    """Even by a wrapper that has taken over its name, and put there before lade was."""
    owner, name = pkgutil.resolve_name(path.rpartition(".")[0]), path.rpartition(".")[2]
    function = getattr(owner, name)
    changed = property(forwarding(function.fget)) if isinstance(function, property) else forwarding(function)
    lade.restore_all()
    monkeypatch.setattr(owner, name, changed)
    lade.augment_all()
    found = replaced_function()
    assert found is not None
    assert found.rpartition(".")[2] == name
    monkeypatch.undo()
    assert replaced_function() is None


def test_another_function_of_the_package(monkeypatch):
    monkeypatch.setattr(cache_utils.DynamicLayer, "update", cache_utils.StaticLayer.update)
    assert not is_as_written(cache_utils.DynamicLayer, "update")
    monkeypatch.setattr(torch, "argmax", torch.argmin)
    assert replaced_function() == "torch.argmax"


def test_code_that_is_exchanged(monkeypatch):
    def update(self, key_states, value_states, *args, **kwargs):
        return key_states, value_states

    monkeypatch.setattr(cache_utils.DynamicLayer.update, "__code__", update.__code__)
    assert replaced_function() == "transformers.cache_utils.DynamicLayer.update"
    monkeypatch.undo()
    assert replaced_function() is None


def rounded(update):
    """A quantized cache, as people make it."""

    def method(self, keys, values, *args, **kwargs):
        return update(self, (keys * 4).round() / 4, (values * 4).round() / 4, *args, **kwargs)

    return method


@pytest.mark.parametrize("kind", [cache_utils.Cache, cache_utils.DynamicCache, cache_utils.DynamicLayer])
def test_a_cache_that_is_quantized(monkeypatch, kind):
    model = tiny_llama()
    ordinary = generate_plain(model, prompt(), max_new_tokens=20)
    monkeypatch.setattr(kind, "update", rounded(kind.update), raising=False)
    compare(model, reason="update has been replaced", max_new_tokens=20)
    assert not torch.equal(generate_plain(model, prompt(), max_new_tokens=20), ordinary)


@pytest.mark.parametrize("is_layer", [False, True])
def test_one_cache_that_is_quantized(is_layer):
    def cache():
        made = DynamicCache(config=model.config)
        for part in made.layers if is_layer else [made]:
            part.update = types.MethodType(rounded(type(part).update), part)
        return made

    model = tiny_llama()
    compare(model, reason="update of its own", cache=cache)
    compare(model, cache=lambda: DynamicCache(config=model.config))


def test_a_users_processors_are_not_kept_alive():
    """Their classes may be made anew for each request."""
    kind = type("Mine", (TemperatureLogitsWarper,), {})
    compare(tiny_llama(), max_new_tokens=8, do_sample=True, logits_processor=LogitsProcessorList([kind(0.5)]))
    known = weakref.ref(kind)
    del kind
    gc.collect()
    assert known() is None


def test_a_processor_that_is_patched(monkeypatch):
    """Then it is a processor like any other of the user's, which sees the whole batch."""
    kind = transformers.TopKLogitsWarper
    seen = note_calls(monkeypatch, kind, "__call__", lambda self, ids, scores: ids.shape)
    compare(tiny_llama(), prompt(12, batch_size=3), max_new_tokens=20, do_sample=True, top_k=5)
    assert seen[:20] == seen[20:]
