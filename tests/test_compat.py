"""The names that lade uses of transformers and torch: what happens when one is renamed, and that the table has them
all."""

import ast
import functools
import gc
import logging
import re
import runpy
import sys
import types
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from support import ROOT, compare, is_patched, prompt, tiny, tiny_llama
from support.families import LONGROPE, named
from transformers import GenerationMixin, Phi3Config, Phi3ForCausalLM

import lade
from lade.common import compat, notices
from lade.common import version as version_of_lade

PACKAGES = ("transformers", "torch.nn.modules.module")


def is_theirs(name):
    return (name or "").startswith(PACKAGES)


@pytest.fixture(scope="module")
def functions():
    """Of transformers, and of torch where lade uses its private names, wrapped or not: by the names they use."""
    tiny_llama(), longrope_model(), named("mpt").build()  # import what a model needs
    users = defaultdict(list)
    gc.unfreeze()  # or functions are not among the objects: see tests/conftest.py
    for found in gc.get_objects():
        if type(found) is types.FunctionType and is_theirs(found.__module__):
            for name in names_in(found.__code__):
                users[name].append(found)
    gc.collect()
    gc.freeze()
    return users


def names_in(code):
    """Attributes, globals and strings of a function, and of those inside it."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return found.union(*(names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


def renamed(code, old, new):
    names = tuple(new if name == old else name for name in code.co_names)
    constants = [new if constant == old else constant for constant in code.co_consts]
    inner = [renamed(each, old, new) if isinstance(each, types.CodeType) else each for each in constants]
    return code.replace(co_names=names, co_consts=tuple(inner))


@pytest.fixture
def rename(monkeypatch, functions):
    """Gives something another name wherever transformers itself uses it, so that all but lade works as before."""

    def change(old, new):
        for function in functions[old]:
            monkeypatch.setattr(function, "__code__", renamed(function.__code__, old, new))
        modules = [module for name, module in list(sys.modules.items()) if is_theirs(name) and module is not None]
        values = [value for module in modules for value in list(vars(module).values())]
        classes = [value for value in values if isinstance(value, type) and is_theirs(value.__module__)]
        for owner in {id(owner): owner for owner in (*modules, *classes)}.values():
            if old in vars(owner):
                with suppress(AttributeError, TypeError):
                    monkeypatch.setattr(owner, new, vars(owner)[old], raising=False)
                    monkeypatch.delattr(owner, old)
            abstract = vars(owner).get("__abstractmethods__", ())
            if old in abstract:
                monkeypatch.setattr(owner, "__abstractmethods__", abstract - {old} | {new})
        for mapping in [value for value in values if type(value) is dict]:
            for key, value in mapping.items():
                if isinstance(value, str) and value == old:
                    monkeypatch.setitem(mapping, key, new)

    return change


def refuses(*says):
    """augment_all() raises an ImportError that says this and the versions, and patches nothing."""
    before = {name: vars(GenerationMixin).get(name) for name in ("generate", "_sample", "_beam_search")}
    with pytest.raises(ImportError) as error:
        lade.augment_all()
    versions = transformers.__version__, torch.__version__, version_of_lade.TESTED
    for text in (*says, *versions, "nothing has been patched"):
        assert text in str(error.value)
    assert not is_patched()
    return {name: vars(GenerationMixin).get(name) for name in before} == before


RENAMED = """
    _sample _beam_search _assisted_decoding _prefill _has_unfinished_sequences _optimize_model_for_decode
    _update_model_kwargs_for_generation prepare_inputs_for_generation _pad_token_tensor is_assistant prefill_chunk_size
    prompt_ignore_length _is_stateful _supports_sdpa _can_set_attn_implementation tp_size _attn_implementation
    rope_parameters cumulative_length _compiled_call_impl _global_forward_hooks
"""
HAS_MAX_LENGTH = hasattr(transformers.cache_utils.CacheLayerMixin, "get_max_length")
MAX_LENGTH = "get_max_length" if HAS_MAX_LENGTH else "get_max_cache_shape"


@pytest.mark.parametrize("name", [*RENAMED.split(), MAX_LENGTH])
def test_a_renamed_name_is_refused_before_anything_is_patched(name, rename, monkeypatch):
    """And plain generate(), where it works, goes on working."""
    monkeypatch.setenv("USE_LADE", "1")
    expected = tiny_llama().generate(**prompt(), max_new_tokens=8)
    rename(name, f"{name}_of_tomorrow")
    assert refuses(name)
    assert torch.equal(tiny_llama().generate(**prompt(), max_new_tokens=8), expected)


def with_one_more(
    self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, new, **_
):
    """Than `_sample` has."""


CHANGED = {  # with another name, and with one more argument each
    "_prefill": lambda self, prompt_ids, generation_config, model_kwargs, is_first_iteration=True: None,
    "_has_unfinished_sequences": lambda self, this_peer_finished, synced_gpus, device, group: None,
    "_sample": with_one_more,
    "_optimize_model_for_decode": lambda self, batch_size: None,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_signature_is_refused(name, monkeypatch):
    monkeypatch.setattr(GenerationMixin, name, CHANGED[name])
    assert refuses(f"{name} takes (", "instead of (")


@pytest.mark.parametrize("name", ["DynamicSlidingWindowLayer", "sdpa_attention_forward"])
def test_a_renamed_import_is_refused(name, rename, monkeypatch):
    """By the first use of a name that needs it, before there is anything that could be patched."""
    monkeypatch.delitem(sys.modules, compat.__name__)
    monkeypatch.delitem(vars(lade), "augment_all", raising=False)  # as in a new process
    rename(name, f"{name}_of_tomorrow")
    assert refuses(f"cannot import name '{name}'")


def test_a_package_that_does_not_fit_is_named(monkeypatch):
    """Transformers says that a name of its own cannot be imported, whatever the reason is."""

    class Module(types.ModuleType):
        def __getattr__(self, name):
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError(f"Could not import module '{name}'.") from error

    broken = Module("transformers")
    broken.__version__ = transformers.__version__
    monkeypatch.setitem(sys.modules, "transformers", broken)
    with pytest.raises(ImportError, match="RuntimeError: operator torchvision::nms does not exist"):
        runpy.run_path(compat.__file__)


def test_a_new_abstract_method_of_cache_layers_is_refused(monkeypatch):
    mixin = transformers.cache_utils.CacheLayerMixin
    monkeypatch.setattr(mixin, "__abstractmethods__", mixin.__abstractmethods__ | {"rewind"})
    assert refuses("CacheLayerMixin is not what it was", "a layer needs rewind")


def test_an_untested_version_gets_one_warning_and_runs(monkeypatch, caplog, lade_on, model):
    monkeypatch.setattr(notices, "_said", set())
    for version, is_newer in ((f"{version_of_lade.NEWEST}.7", False), ("5.25.0.dev0", True), ("5.99.1", True)):
        caplog.clear()
        monkeypatch.setattr("transformers.__version__", version)
        with caplog.at_level(logging.WARNING, "lade"):
            for _ in range(2):
                lade.restore_all()
                lade.augment_all()
                assert compare(model, max_new_tokens=16).steps < 16
        found = [record.getMessage() for record in caplog.records]
        assert len(found) == is_newer
        assert all(version in text and version_of_lade.TESTED in text for text in found)


def longrope_model():
    rope = LONGROPE | {"original_max_position_embeddings": 48}
    return tiny(Phi3ForCausalLM, Phi3Config, intermediate_size=64, rope_parameters=rope, eos_token_id=2)


def test_rotary_frequencies_that_the_configuration_does_not_tell_are_refused(lade_on, rename):
    """The text grows over the boundary at which they change."""
    model = longrope_model()
    rename("rope_parameters", "rope_settings")
    vars(model.config)["rope_settings"] = vars(model.config).pop("rope_parameters")
    compare(model, prompt(40), reason="its configuration does not say", max_new_tokens=24)


def private_names(tree):
    """Attributes that begin with one underscore, of anything: those that a file reads, and those that it defines."""
    read, defined = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if isinstance(node.ctx, ast.Store) and is_own else read).add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return [{name for name in names if name.startswith("_") and not name.startswith("__")} for names in (read, defined)]


@functools.cache
def trees_but_the_tables():
    """What lade's files say, without the table, whose checks may use what they like."""
    paths = set((ROOT / "lade").rglob("*.py")) - {ROOT / "lade" / "common" / "compat.py"}
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_every_private_name_is_in_the_table():
    """What a file of lade reads with an underscore is lade's own, the interpreter's, or one of the table."""
    known = set(re.findall(r"\w+", Path(compat.__file__).read_text(encoding="utf-8")))
    known |= {"_exit", "_run_module_as_main", "_fields", "_asdict"}
    trees = trees_but_the_tables()
    own = set().union(*(private_names(tree)[1] for tree in trees.values()))
    unknown = {path.name: found for path, tree in trees.items() if (found := private_names(tree)[0] - own - known)}
    assert unknown == {}
    assert {"_prefill", "_tp_sise", "_modules"} - known == {"_tp_sise"}  # the test can fail


def test_nothing_else_is_imported_from_the_depths_of_transformers():
    for path, tree in trees_but_the_tables().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert node.module == "transformers", f"{path.name} imports from {node.module}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                assert "._" not in node.module, f"{path.name} imports from {node.module}"
