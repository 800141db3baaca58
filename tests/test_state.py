"""What is kept of models: made once, apart for each slot and model, gone with the model or with `restore_all()`."""

import gc
import weakref

import pytest
from support import prompt, tiny_llama

import lade
from lade.common.state import PerModel, forget_all


class Model:
    """Anything that can be referred to weakly."""


@pytest.fixture
def slot():
    return PerModel(list)


def test_made_once_for_each_model_and_slot(slot):
    first, second, other = Model(), Model(), PerModel(list)
    slot.of(first).append(1)
    assert (slot.of(first), slot.of(second), other.of(first)) == ([1], [], [])
    slot.set(second, [2])
    assert (slot.of(first), slot.of(second)) == ([1], [2])


def test_gone_with_the_model(slot):
    model = Model()
    value = weakref.WeakSet([Model()])
    slot.set(model, value)
    gone = weakref.ref(model), weakref.ref(value)
    del model, value
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("forget", [forget_all, lade.restore_all])
def test_forgotten(slot, forget):
    """A call under way keeps what it has asked for."""
    model = Model()
    held = slot.of(model)
    held.append(1)
    forget()
    assert slot.of(model) == []
    assert held == [1]


@pytest.mark.parametrize("mode", ["tree", "lookahead"])
def test_a_model_goes_without_the_garbage_collector(lade_on, mode):
    """Its memory is wanted at once; drafters lie in circles, which must not hold it."""
    lade.config_lade(MODE=mode, ADAPTIVE=1)
    model = tiny_llama()
    gone = weakref.ref(model)
    gc.disable()
    try:
        model.generate(**prompt(), max_new_tokens=20)
        assert max(lade.last_stats().block_tokens) > 1  # whatever the machine is busy with
        del model
        assert gone() is None
    finally:
        gc.enable()
