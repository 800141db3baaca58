"""The tree drafter: plain generate()'s tokens whatever it guesses, from honest trees, and better guesses than by
chance."""

import functools

import pytest
import torch
from support import VOCAB, Choose, compare, generate_plain, prompt, seeded, tiny_llama

import lade
from lade.block.token_tree import TokenTree
from lade.drafting import DraftRequest, Outcome
from lade.drafting.memory import Memory
from lade.drafting.top_k_table import BIN_BITS
from lade.drafting.tree import TreeDrafter
from lade.stats import tracing
from lade.switch import current_config
from lade.verification.sequences import TokenSequences

SAMPLED = {"do_sample": True, "temperature": 0.4}


@pytest.fixture(autouse=True)
def tree(lade_on):
    lade.config_lade(MODE="tree", MAX_BLOCK=16, SHARE=0)


@functools.cache
def plain_of(dtype, length, batch_size, is_sampled):
    """A model, a prompt, and what plain generate() says, with the states that it leaves the generators in."""
    model, inputs = tiny_llama(dtype), prompt(length, batch_size)
    arguments = SAMPLED if is_sampled else {}
    return model, inputs, *seeded(generate_plain, model, inputs, max_new_tokens=60, **arguments)


@pytest.mark.parametrize(
    ("max_block", "dtype"), [(2, torch.float32), (3, torch.float64), (16, torch.float64), (64, torch.float32)]
)
@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [(24, 1), (1, 1), (24, 3)], ids=["one row", "one token", "a batch"])
def test_grid(dtype, max_block, arguments, shape):
    lade.config_lade(MAX_BLOCK=max_block)
    model, inputs, expected, states = plain_of(dtype, *shape, bool(arguments))
    found, states_after = seeded(model.generate, **inputs, max_new_tokens=60, **arguments)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, states_after, states))
    stats = lade.last_stats()
    assert stats.fallback_reason is None
    assert len(stats.block_tokens) == stats.steps - 1
    assert max(stats.block_tokens) == max_block
    assert stats.steps < 60 or max_block == 2  # one guess, which all rows of a batch would have to accept


def test_trees_and_figures_agree(model):
    trees, committed = [], []

    def keep(step, outcome):
        trees.append((list(step.tree.tokens[0]), list(step.tree.parents[0])))
        committed.append(len(outcome.accepted[0]))
        assert not step.draft.has_window
        assert outcome.choices is None

    with tracing(keep):
        stats = compare(model, prompt(24), max_new_tokens=60)
    for tokens, parents in trees:
        assert len(tokens) <= 15
        assert all(parent < node for node, parent in enumerate(parents))
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)  # no guess is paid for twice
    assert stats.block_tokens == [1 + len(tokens) for tokens, _ in trees]
    assert sum(proposed for proposed, _ in stats.sources.values()) == sum(len(tokens) for tokens, _ in trees)
    assert sum(accepted for _, accepted in stats.sources.values()) == sum(committed)
    sources = {source.split(" of ")[0] for source in stats.sources}
    assert sources == {"token", "context", "root row", "suffix"}
    assert min(stats.draft_seconds, stats.forward_seconds, stats.verify_seconds) > 0
    assert stats.plain_step_share == 0
    assert stats.as_dict()["sources"] == stats.sources


LOOP = Choose(lambda length: 3 + length % 5)


def test_a_loop_is_found_and_followed_beyond_its_length(model):
    """The text's end repeats what came five tokens before: guesses go round the loop more than once."""
    lade.config_lade(MAX_BLOCK=32)
    stats = compare(model, prompt(12), max_new_tokens=100, logits_processor=[LOOP])
    assert max(stats.accepted_lengths) > 10


def test_a_row_that_ended_without_padding_holds_nobody_up(model):
    """Where nothing pads ended rows, plain generate() goes on with them, and all rows have to accept a guess."""

    def first_ends(input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] > 16] + [False] * (len(input_ids) - 1))

    arguments = {"logits_processor": [LOOP], "stopping_criteria": [first_ends]}
    assert compare(model, prompt(12, 2), max_new_tokens=100, **arguments).steps < 40


def test_ids_without_an_embedding_are_no_guesses(model):
    """Logits may have more columns than there are embeddings."""
    ids, memory = torch.tensor([[7, 9]]), Memory()
    request = DraftRequest(
        config=current_config(), model=model, num_tokens=VOCAB, prompt_ids=ids, key_mask=None, temperature=None
    )
    with memory.active():
        drafter = TreeDrafter(request)
    text = TokenSequences(ids)
    text.append([5], 0)
    logits = torch.zeros(1, 1, VOCAB + 7)
    logits[..., VOCAB:] = 100.0
    drafter.learn(Outcome(TokenTree.empty(1), logits, [[]], None, text))
    assert 0 < (memory.table.as_arrays().rows >> BIN_BITS).max() < VOCAB
