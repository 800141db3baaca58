"""The tree drafter: plain generate()'s tokens whatever it guesses, from honest trees, and better guesses than by
chance."""

import random

import numpy as np
import pytest
import torch
from support import ROOT, VOCAB, generate_plain, prompt, tiny_llama

import lade
from lade.block.layout import BlockLayout
from lade.block.token_tree import TokenTree
from lade.block_size.costs import LiveCosts
from lade.block_size.policy import MAX_REST, MIN_REST, PATIENCE, TRIAL, SpeculationBackoff
from lade.config import LookaheadConfig
from lade.drafting.acceptance import (
    FORGET_EVERY,
    NUM_KINDS,
    PAIR,
    SECOND_SUFFIX,
    SINGLE,
    SUFFIX,
    VOCABULARY,
    Acceptance,
)
from lade.drafting.base import DraftRequest, Outcome
from lade.drafting.growth import BOTH_ROWS, Grower
from lade.drafting.top_k_table import NUM_BINS, ROW_LENGTH, packed
from lade.drafting.tree import LONG_MATCH, TreeDrafter
from lade.drafting.vocabulary import Vocabulary
from lade.stats import tracing
from lade.verification.sequences import TokenSequences

SAMPLED = {"do_sample": True, "temperature": 0.4}


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(autouse=True)
def tree(lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)


def plain_of(model, inputs, max_new_tokens=60, **arguments):
    """What plain generate() says, and how it leaves the generator."""
    torch.manual_seed(5)
    return generate_plain(model, inputs, max_new_tokens=max_new_tokens, **arguments), torch.get_rng_state()


def assert_exact(model, inputs, max_new_tokens=60, plain=None, **arguments):
    """plain: plain_of() the same, where it is known."""
    expected, state = plain or plain_of(model, inputs, max_new_tokens, **arguments)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**inputs, max_new_tokens=max_new_tokens, **arguments), expected)
    assert torch.equal(torch.get_rng_state(), state)
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert len(stats.block_tokens) == stats.steps - 1
    return stats


@pytest.fixture(scope="module")
def plain():
    """(Number type, prompt length, batch size, sampled) -> the model, the prompt, and what plain generate() says."""
    known = {}

    def of(*key):
        if key not in known:
            dtype, length, batch_size, is_sampled = key
            model, inputs = tiny_llama(dtype), prompt(length, batch_size)
            known[key] = model, inputs, plain_of(model, inputs, **SAMPLED if is_sampled else {})
        return known[key]

    return of


@pytest.mark.parametrize(
    ("max_block", "dtype"), [(2, torch.float32), (3, torch.float64), (16, torch.float64), (64, torch.float32)]
)
@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [(24, 1), (1, 1), (24, 3)], ids=["one row", "one token", "a batch"])
def test_grid(plain, dtype, max_block, arguments, shape):
    lade.config_lade(MAX_BLOCK=max_block)
    model, inputs, known = plain(dtype, *shape, bool(arguments))
    stats = assert_exact(model, inputs, plain=known, **arguments)
    assert max(stats.block_tokens) == max_block
    assert stats.steps < 60 or max_block == 2  # one guess, which all rows of a batch would have to accept


@pytest.mark.parametrize("max_new_tokens", range(1, 14))
def test_length_cuts_inside_accepted_guesses(model, max_new_tokens):
    assert_exact(model, prompt(30, seed=5), max_new_tokens)


@pytest.mark.parametrize("cut", range(2, 12))
def test_end_of_sequence_inside_accepted_guesses(model, cut):
    inputs = prompt(30, seed=5)
    full = generate_plain(model, inputs, max_new_tokens=60)[0, 30:].tolist()
    assert_exact(model, inputs, eos_token_id=[full[cut], full[cut + 3], VOCAB - 1])


def test_embeddings_without_ids(model):
    embeds = model.get_input_embeddings()(prompt(12)["input_ids"]).detach()
    assert assert_exact(model, {"inputs_embeds": embeds}).steps < 60


def test_placeholders_are_never_guessed(model):
    """Beside embeddings, ids may be ones that the model knows nothing of."""
    inputs = prompt(20)
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    foreign = inputs["input_ids"].clone()
    foreign[:, ::2] = -100
    foreign[:, 1::2] = VOCAB + 7
    assert assert_exact(model, {**inputs, "input_ids": foreign, "inputs_embeds": embeds}).steps < 60


def test_negative_control(monkeypatch):
    """With a plain causal mask over the same blocks the output changes: the mask is what makes the tree exact."""
    model = tiny_llama(num_hidden_layers=1)

    def causal(self, tree, original=BlockLayout.offsets_and_visibility):
        offsets, visible = original(self, tree)
        return offsets, torch.ones_like(visible).tril()

    monkeypatch.setattr(BlockLayout, "offsets_and_visibility", causal)
    different = 0
    for seed in range(4):
        inputs = prompt(20, seed=seed)
        expected = generate_plain(model, inputs, max_new_tokens=60)
        different += not torch.equal(model.generate(**inputs, max_new_tokens=60), expected)
    assert different > 0


def test_bfloat16_follows_the_models_own_argmax():
    model, inputs = tiny_llama(torch.bfloat16), prompt(20)
    result = model.generate(**inputs, max_new_tokens=60)
    assert lade.last_stats().steps < 60
    logits = model(input_ids=result).logits[0, 19:-1].float()
    chosen = logits.gather(1, result[0, 20:, None])[:, 0]
    # Two roundings of a bfloat16 value of this size.
    assert (logits.max(1).values - chosen <= 2 * 2**-7 * logits.abs().max()).all()


def test_trees_and_figures_agree(model):
    trees, committed = [], []

    def keep(step, outcome):
        trees.append((list(step.tree.tokens[0]), list(step.tree.parents[0])))
        committed.append(len(outcome.accepted[0]))
        assert not step.draft.has_window
        assert outcome.choices is None

    with tracing(keep):
        stats = assert_exact(model, prompt(24))
    for tokens, parents in trees:
        assert len(tokens) <= 15
        assert all(parent < node for node, parent in enumerate(parents))
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)  # no guess is paid for twice
    assert stats.block_tokens == [1 + len(tokens) for tokens, _ in trees]
    assert sum(proposed for proposed, _ in stats.sources.values()) == sum(len(tokens) for tokens, _ in trees)
    assert sum(accepted for _, accepted in stats.sources.values()) == sum(committed)
    assert {source.split(" of ")[0] for source in stats.sources} == {
        "single",
        "suffix",
        "resumed copy",
        "vocabulary",
        "sibling",
        "nearest",
    }
    assert min(stats.draft_seconds, stats.forward_seconds, stats.verify_seconds) > 0
    assert stats.plain_step_share == 0
    assert stats.as_dict()["sources"] == stats.sources


def test_a_loop_is_found_and_followed_beyond_its_length(model):
    """The text's end repeats what came five tokens before: guesses go round the loop more than once."""
    lade.config_lade(MAX_BLOCK=32)

    class Loop:
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -50.0)
            forced[:, 3 + input_ids.shape[1] % 5] = 0.0
            return forced

    stats = assert_exact(model, prompt(12), 100, logits_processor=[Loop()])
    assert max(stats.accepted_lengths) > 10


def test_learning_takes_nothing_from_the_sampler(model):
    """Guessing draws no random numbers: whatever the mode, torch's generator ends in one state."""
    states = []
    for mode in ("tree", "lookahead"):
        lade.config_lade(MODE=mode)
        assert_exact(model, prompt(24), **SAMPLED)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_row_that_ended_without_padding_holds_nobody_up(model):
    """Where nothing pads ended rows, plain generate() goes on with them, and all rows have to accept a guess."""

    class Loop:
        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -50.0)
            forced[:, 3 + input_ids.shape[1] % 5] = 0.0
            return forced

    class FirstEnds:
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] > 16] + [False] * (len(input_ids) - 1))

    arguments = {"logits_processor": [Loop()], "stopping_criteria": [FirstEnds()]}
    assert assert_exact(model, prompt(12, 2), 100, **arguments).steps < 40


def test_chances_are_those_of_the_row(model):
    """In a batch where another row always misses, what was right is counted as right although it was not accepted."""

    class OneEasyRow:
        def __init__(self):
            self.order = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(1)).tolist()

        def __call__(self, input_ids, scores):
            forced = torch.full_like(scores, -50.0)
            forced[0, 3 + input_ids.shape[1] % 5] = 0.0
            forced[1, self.order[input_ids.shape[1]]] = 0.0
            return forced

    memory = lade.Memory()
    with memory.active():
        assert_exact(model, prompt(12, 2), 100, logits_processor=[OneEasyRow()], num_return_sequences=1)
    longest = memory.acceptance[False].chances[SECOND_SUFFIX - 1]
    assert longest > 0.9


def test_chances_return_when_nothing_is_guessed():
    acceptance = Acceptance(do_sample=False)
    for _ in range(300):
        acceptance.learn([SUFFIX], [-1], [0.5], [], [])
    assert acceptance.chances[SUFFIX] < 0.05
    for _ in range(40 * FORGET_EVERY):
        acceptance.rest()
    assert acceptance.chances[SUFFIX] > 0.3
    assert acceptance.trust > 0.9


def test_a_text_looks_predictable_where_the_likeliest_tokens_are_likely():
    acceptance = Acceptance(do_sample=True)
    assert acceptance.promise == 1
    for top_bin, low, high in [(0, 0.0, 0.1), (NUM_BINS - 1, 1.0, 1.0)]:
        acceptance.learn_sureness([top_bin] * 100)
        assert low <= acceptance.promise <= high


def test_guessing_in_vain_ends_and_is_tried_again_ever_more_rarely():
    def steps_until_rest(backoff, gain, promise):
        return next(count for count in range(1, 1000) if backoff.learn(gain, promise) or backoff.begin_step())

    def length_of_rest(backoff):
        return 1 + sum(iter(backoff.begin_step, False))

    backoff = SpeculationBackoff()
    assert steps_until_rest(backoff, -0.05, 1.0) == pytest.approx(PATIENCE / 0.05, abs=1.5)
    rests = [length_of_rest(backoff)]
    for _ in range(5):
        assert steps_until_rest(backoff, -0.05, 1.0) == pytest.approx(TRIAL / 0.05, abs=1.5)
        rests.append(length_of_rest(backoff))
    assert rests == [MIN_REST, 2 * MIN_REST, 4 * MIN_REST, MAX_REST, MAX_REST, MAX_REST]
    backoff.learn(1.0, 1.0)  # it paid
    steps_until_rest(backoff, -0.05, 1.0)
    assert length_of_rest(backoff) == MIN_REST
    assert steps_until_rest(SpeculationBackoff(), -0.05, 0.2) == pytest.approx(PATIENCE * 0.2 / 0.05, abs=1.5)


def test_the_document_says_when_guessing_rests():
    text = " ".join((ROOT / "docs" / "drafting.md").read_text(encoding="utf-8").split())
    assert f"falls below -{PATIENCE}, " in text
    assert f"for {MIN_REST} steps, then after a short trial for {2 * MIN_REST}, and up to {MAX_REST} " in text


def test_a_text_that_repeats_itself_ends_a_rest(model, monkeypatch):
    """While guessing rests, a tree is grown only behind what has been said before; the text stays the same."""
    monkeypatch.setattr(SpeculationBackoff, "begin_step", lambda self: True)
    observe = LiveCosts.observe  # steps have set costs, whatever this machine is doing
    monkeypatch.setattr(LiveCosts, "observe", lambda self, q, *times: observe(self, q, 1 + 0.01 * q))
    grown, inner = [], TreeDrafter._grow_all

    def grow(self, rows, *others):
        grown.append(max((pointer.length for pointer in self._texts[0].pointers(None, 1)), default=0))
        inner(self, rows, *others)

    monkeypatch.setattr(TreeDrafter, "_grow_all", grow)
    lade.config_lade(ADAPTIVE=1)
    stats = assert_exact(model, prompt(24), max_new_tokens=60)
    assert len(grown) < stats.steps - 1
    assert all(length >= LONG_MATCH for length in grown)
    assert grown  # the control: such a text does repeat itself
    lade.config_lade(ADAPTIVE=0)  # nothing is measured, so nothing rests
    assert max(assert_exact(model, prompt(24), max_new_tokens=6).block_tokens) > 1


def test_a_single_tokens_row_is_asked_where_it_may_count():
    """And that of the token alone where neither is there."""
    memory = lade.Memory()
    rows = (np.full((1, ROW_LENGTH), 5), np.full((1, ROW_LENGTH), 3))
    memory.learn([9], [10], packed(*rows), 1)
    memory.singles.put([11], packed(*rows))
    vocabulary = Vocabulary(np.full((13, 8), 5, dtype=np.int32), np.full((13, 8), -3, dtype=np.float16))

    def kinds(before, token, chance):
        grower = Grower(memory, Acceptance(False), vocabulary.at(1.0), [7], None, lambda depth: None, (), ())
        return [first for _, first in grower._rows(0, -1, before, token, chance)]

    assert kinds(9, 10, BOTH_ROWS) == [PAIR, SINGLE]
    assert kinds(9, 10, 0.9 * BOTH_ROWS) == [PAIR]
    assert kinds(8, 10, 0.9 * BOTH_ROWS) == kinds(10, 11, 1.0) == [SINGLE]
    assert kinds(10, 12, 1.0) == kinds(9, 12, 0.1) == [VOCABULARY]
    assert kinds(10, 13, 1.0) == []


def test_no_chance_is_above_one():
    """Long runs of right guesses and then a wrong one, while trials and hits are halved: a child likelier than its
    parent is no tree."""
    numbers = random.Random(0)
    acceptance = Acceptance(do_sample=False)
    for _ in range(20):
        for _ in range(numbers.randint(100, 200)):
            acceptance.learn([PAIR] * 9, list(range(-1, 8)), [1.0] * 9, list(range(9)), list(range(9)))
        acceptance.learn([PAIR], [-1], [1.0], [], [])
        assert max(acceptance.chances) <= 1.0
        acceptance.forget()
        assert max(acceptance.chances) <= 1.0
    acceptance.restore([1.0] * NUM_KINDS, [1.5] * NUM_KINDS)
    assert max(acceptance.chances) == 1.0


def test_a_copy_is_gone_on_with_behind_a_difference():
    """Without a match of three tokens: at once as if one token was replaced, then also where a token is equal again."""
    passage = list(range(20, 50))
    prompt_ids = torch.tensor([[*passage, 1, 2, *passage[:12]]])
    config = LookaheadConfig(mode="tree", max_block=16, adaptive=False, share=False)
    request = DraftRequest(
        config=config, model=tiny_llama(), num_tokens=64, prompt_ids=prompt_ids, key_mask=None, temperature=None,
        may_measure=False,
    )  # fmt: skip
    drafter = TreeDrafter(request)
    texts = TokenSequences(prompt_ids, 100)

    def guesses_behind(*tokens):
        """Guesses behind the text and these tokens, with their sources, from the root along the first children."""
        tree = drafter.propose(texts, [False], None).tree if texts.generated[0] else TokenTree.empty(1)
        for token in tokens:
            texts.append([token], 0)
        logits = torch.zeros(1, 1 + tree.num_nodes, 64)
        drafter.learn(Outcome(tree, logits, [list(range(len(tokens) - 1))], None, texts))
        draft = drafter.propose(texts, [False], None)
        sources = draft.explain(0).sources
        return [
            (token, source) for token, source in zip(draft.tree.tokens[0], sources, strict=True) if "copy" in source
        ]

    assert guesses_behind(32) == []
    found = guesses_behind(33, 7)
    assert found[:2] == [(35, "resumed copy of 0"), (36, "resumed copy of 1")]
    found = guesses_behind(8)  # the next token is replaced as well
    assert found[0] == (36, "resumed copy of 0")
    found = guesses_behind(35)  # one token was replaced by two: what is equal again comes first
    assert found[0] == (36, "resumed copy of 1")
    assert (37, "resumed copy of 0") in found
