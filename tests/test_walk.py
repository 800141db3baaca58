"""The walk, and the loop behind drafters that guess right always, never, and sometimes."""

import dataclasses
import random

import pytest
import torch
from support import compare, generate_plain, prompt, seeded, tiny_llama

import lade
from lade.block.token_tree import merge_candidates
from lade.drafting.lookahead import LookaheadDrafter
from lade.verification.walk import children_of, walk


class Model:
    """Chooses tokens by node (-1 = root) and row, until as many as `room` are committed to each."""

    def __init__(self, *choices, room=100):
        self.choices, self.room, self.committed, self.guessed = choices, room, [], []

    def choose(self, nodes):
        return [after[node] for after, node in zip(self.choices, nodes, strict=True)]

    def commit(self, tokens, were_guessed):
        self.committed.append(tokens)
        self.guessed.append(were_guessed)
        return len(self.committed) == self.room


def test_walk_follows_the_models_choices():
    #      root -> 5 -> 6 ; root -> 5 -> 7 ; root -> 8
    children = children_of(tokens=[5, 6, 7, 8], parents=[-1, 0, 0, -1])
    model = Model({-1: 5, 0: 7, 2: 9, 1: 0, 3: 0})
    assert walk([children], model.choose, model.commit) == [[0, 2]]
    assert model.committed == [[5], [7], [9]]
    assert model.guessed == [True, True, False]


def test_walk_ends_with_the_text():
    model = Model({-1: 5, 0: 6}, room=2)
    # The second token was guessed, but nothing follows it: its keys are not to be kept.
    assert walk([children_of([5, 6], [-1, 0])], model.choose, model.commit) == [[0]]
    assert model.committed == [[5], [6]]


def test_rows_walk_together():
    trees = [children_of([5, 6], [-1, 0]), children_of([7, 8], [-1, 0])]
    model = Model({-1: 5, 0: 6, 1: 2}, {-1: 7, 0: 9})
    assert walk(trees, model.choose, model.commit) == [[0], [0]]
    assert model.committed == [[5, 7], [6, 9]]
    assert model.guessed == [True, False]


@pytest.mark.parametrize(("num_right", "kept"), [(0, None), (1, [[], []]), (2, [[0], [0]])])
def test_spoiled_logits_end_the_walk(num_right, kept):
    """Behind the last node before them: its own keys are spoiled, too."""
    model, edges = Model({-1: 5, 0: 6, 1: 7}, {-1: 5, 0: 6, 1: 7}), children_of([5, 6, 7], [-1, 0, 1])
    left = iter(range(num_right))
    assert (
        walk([edges, edges], lambda nodes: None if next(left, None) is None else model.choose(nodes), model.commit)
        == kept
    )
    assert len(model.committed) == num_right


class OracleDrafter(LookaheadDrafter):
    """Knows the answer and proposes it with a given probability of being right, beside wrong candidates."""

    answer: list[int]
    hit_rate: float

    def __init__(self, *args):
        super().__init__(*args)
        self.done, self.rng = 0, random.Random(0)

    def propose(self, sequences, is_finished, max_offset):
        draft = super().propose(sequences, is_finished, max_offset)
        depth = self.config.ngram_size - 1
        right = [*self.answer[self.done : self.done + depth], *[0] * depth][:depth]
        wrong = [(token + 1) % 61 for token in right]
        half_right = [*right[: depth // 2], *wrong[depth // 2 :]]
        hit = self.rng.random() < self.hit_rate
        candidates = [wrong, half_right, right] if hit else [wrong]
        return dataclasses.replace(draft, tree=merge_candidates([candidates]))

    def learn(self, outcome):
        self.done += outcome.num_committed[0]


@pytest.fixture(scope="module")
def single():
    return tiny_llama(num_hidden_layers=1)


@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("level", [2, 5])
@pytest.mark.parametrize("sampling", [False, True])
def test_oracle_drafters(monkeypatch, lade_on, single, hit_rate, level, sampling):
    inputs = prompt(9)
    expected, _ = seeded(generate_plain, single, inputs, max_new_tokens=41, do_sample=sampling)
    monkeypatch.setattr(OracleDrafter, "answer", expected[0, 9:].tolist(), raising=False)
    monkeypatch.setattr(OracleDrafter, "hit_rate", hit_rate, raising=False)
    monkeypatch.setattr("lade.drafting.lookahead.LookaheadDrafter", OracleDrafter)
    lade.config_lade(MODE="lookahead", LEVEL=level, WINDOW_SIZE=2, GUESS_SET_SIZE=3)
    stats = compare(single, inputs, max_new_tokens=41, do_sample=sampling)
    assert stats.generated_tokens == 41
    if hit_rate == 1.0:  # the prefill yields one token, every later step N
        assert stats.steps == 1 + -(-40 // level)
        assert set(stats.accepted_lengths) == {level - 1}
    elif hit_rate == 0.0:
        assert stats.steps == 41
        assert set(stats.accepted_lengths) == {0}
    else:
        assert 1 + -(-40 // level) < stats.steps < 41


@pytest.fixture
def watched(monkeypatch):
    """Every step's window as it was when the block was laid out, the model's choices behind it, and the text so far."""
    steps = []
    learn = LookaheadDrafter.learn

    def watch(self, outcome):
        if outcome.choices is not None:
            text = outcome.sequences.row(0)[0]
            before = text[: len(text) - outcome.num_committed[0]]  # the block's root was the last token of this
            steps.append((before.clone(), self.window.levels.clone(), outcome.choices.clone()))
        learn(self, outcome)

    monkeypatch.setattr(LookaheadDrafter, "learn", watch)
    return steps


def test_window_choices_are_the_models_own(lade_on, single, watched):
    """Column j of the last level holds what a plain forward says behind the text, (0, 1..j) and (1..N-2, j)."""
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=3, GUESS_SET_SIZE=3)
    single.generate(**prompt(12), max_new_tokens=25)
    assert len(watched) > 5
    for text, levels, chosen in watched:
        assert levels[0, 0, 0] == text[-1]
        for column in range(3):
            behind = torch.cat([text, levels[0, 0, 1 : column + 1], levels[0, 1:, column]])
            assert single(input_ids=behind[None]).logits[0, -1].float().argmax() == chosen[0, column]


def test_window_feeds_the_pool(lade_on, single, watched, monkeypatch):
    """With no n-grams of the text in the pool, the window's own are what is accepted."""
    monkeypatch.setattr("lade.drafting.lookahead._ngrams_of", lambda tokens, size: tokens.new_empty(0, size))
    lade.config_lade(MODE="lookahead", LEVEL=4, WINDOW_SIZE=8, GUESS_SET_SIZE=6)
    inputs = prompt(12)
    stats = compare(single, inputs, max_new_tokens=80)
    assert stats.steps < 80
    assert set(stats.block_tokens[:2]) == {3 * 8}  # nothing before the columns have been through N-1 updates
