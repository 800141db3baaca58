"""The walk, and the loop behind drafters that guess right always, never, and sometimes."""

import dataclasses
import random

import pytest
import torch
from conftest import generate_plain, prompt, tiny_llama

import lade
from lade.drafters import LookaheadDrafter
from lade.token_tree import merge_candidates
from lade.verify import children_of, walk


def test_walk_follows_the_models_choices():
    #      root -> 5 -> 6 ; root -> 5 -> 7 ; root -> 8
    children = children_of(tokens=[5, 6, 7, 8], parents=[-1, 0, 0, -1])
    after = {-1: 5, 0: 7, 2: 9, 1: 0, 3: 0}
    committed = []
    assert walk(children, after.__getitem__, lambda token: committed.append(token)) == [0, 2]
    assert committed == [5, 7, 9]


def test_walk_ends_with_the_text():
    children = children_of([5, 6], [-1, 0])
    committed = []

    def commit(token):
        committed.append(token)
        return len(committed) == 2

    # The second token was guessed, but nothing follows it: its keys are not to be kept.
    assert walk(children, {-1: 5, 0: 6}.__getitem__, commit) == [0]
    assert committed == [5, 6]


def test_walk_of_an_empty_tree():
    assert walk({}, lambda node: 3, lambda token: False) == []


class OracleDrafter(LookaheadDrafter):
    """Knows the answer and proposes it with a given probability of being right, beside wrong candidates."""

    answer: list[int]
    hit_rate: float

    def __init__(self, *args):
        super().__init__(*args)
        self.done, self.rng = 0, random.Random(0)

    def propose(self, roots, max_offset):
        draft = super().propose(roots, max_offset)
        depth = self.config.ngram_size - 1
        right = [*self.answer[self.done : self.done + depth], *[0] * depth][:depth]
        wrong = [(token + 1) % 61 for token in right]
        half_right = [*right[: depth // 2], *wrong[depth // 2 :]]
        hit = self.rng.random() < self.hit_rate
        candidates = [wrong, half_right, right] if hit else [wrong]
        return dataclasses.replace(draft, tree=merge_candidates([candidates]))

    def learn(self, chosen, texts, num_committed):
        self.done += num_committed[0]


@pytest.fixture(scope="module")
def single():
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("level", [2, 5])
@pytest.mark.parametrize("sampling", [False, True])
def test_oracle_drafters(monkeypatch, lade_on, single, hit_rate, level, sampling):
    inputs = prompt(9)
    torch.manual_seed(3)
    expected = generate_plain(single, inputs, max_new_tokens=41, do_sample=sampling)
    monkeypatch.setattr(OracleDrafter, "answer", expected[0, 9:].tolist(), raising=False)
    monkeypatch.setattr(OracleDrafter, "hit_rate", hit_rate, raising=False)
    monkeypatch.setattr("lade.decoding.LookaheadDrafter", OracleDrafter)
    lade.config_lade(LEVEL=level, WINDOW_SIZE=2, GUESS_SET_SIZE=3)
    torch.manual_seed(3)
    assert torch.equal(single.generate(**inputs, max_new_tokens=41, do_sample=sampling), expected)

    stats = lade.last_stats()
    assert stats.generated_tokens == 41
    if hit_rate == 1.0:  # the prefill yields one token, every later step N
        assert stats.steps == 1 + -(-40 // level)
        assert set(stats.accepted_lengths) == {level - 1}
    elif hit_rate == 0.0:
        assert stats.steps == 41
        assert set(stats.accepted_lengths) == {0}
    else:
        assert 1 + -(-40 // level) < stats.steps < 41
