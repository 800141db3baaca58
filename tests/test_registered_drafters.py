"""Drafters of users: any guesses leave the text as it is, and drafts that would fail inside the model are errors that
say why."""

import re

import pytest
from support import compare, generate_plain, prompt, seeded

import lade
from lade.block.token_tree import TokenTree
from lade.config import MODES
from lade.drafting import register_drafter
from lade.drafting.base import ROOT_ALONE, Draft, Drafter

BUILT_IN = list(MODES)


@pytest.fixture
def registered(lade_on):
    """Registers a drafter under the mode "mine" and chooses it."""

    def register(make):
        register_drafter("mine", make)
        lade.config_lade(MODE="mine", MAX_BLOCK=8)

    return register


def proposing(make_draft):
    class Proposing(Drafter):
        def __init__(self, request):
            self.request = request

        def propose(self, sequences, is_finished, max_offset):
            return make_draft(self.request, sequences, max_offset)

    return Proposing


def no_window(request):
    return request.prompt_ids.new_empty((len(request.prompt_ids), 0))


def oracle(texts):
    """The next three tokens of texts that are known."""

    def draft(request, sequences, max_offset):
        most = 3 if max_offset is None else min(3, max_offset)
        rows = [text[length : length + most] for text, length in zip(texts, sequences.lengths, strict=True)]
        tree = TokenTree(rows, [list(range(-1, len(row) - 1)) for row in rows])
        return Draft(tree, tree.num_nodes, ROOT_ALONE, no_window(request))

    return proposing(draft)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sampling", [False, True])
def test_a_drafter_that_knows_the_text(model, registered, batch_size, sampling):
    inputs, arguments = prompt(9, batch_size), {"max_new_tokens": 25, "do_sample": sampling}
    expected, _ = seeded(generate_plain, model, inputs, **arguments)
    registered(oracle(expected.tolist()))
    assert compare(model, inputs, **arguments).steps == 7  # the prompt's, and 24 tokens by four


TOKENS = [1, 2, 3]
CHAIN = [-1, 0, 1]


def tree(tokens, parents, depth=3):
    return lambda request, *_: Draft(TokenTree(tokens, parents), depth, ROOT_ALONE, no_window(request))


def window(shape, *cells):
    return lambda request, *_: Draft(TokenTree.empty(1), 0, shape, request.prompt_ids.new_tensor([cells]))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (tree([[1, 2, 10**6]], [CHAIN]), "must hold ids from 0 to 60, got 1000000"),
        (tree([[1, -2, 3]], [CHAIN]), "must hold ids from 0 to 60, got -2"),
        (tree([TOKENS], [[-1, 2, 1]]), "an earlier one or -1 as its parent, got [-1, 2, 1]"),
        (tree([TOKENS], [[-1, 0]]), "an earlier one or -1 as its parent, got [-1, 0]"),
        (tree([TOKENS], [CHAIN], depth=2), "must give its tree's depth, 3, as max_depth, got 2"),
        (tree([TOKENS] * 2, [CHAIN] * 2), "must have one tree for each of the 1 rows, got 2"),
        (tree([TOKENS] * 2, [CHAIN]), "must have one tree for each of the 1 rows, got 2"),
        (tree([[1] * 8], [list(range(-1, 7))], depth=8), "may have 7 guesses in a row, MAX_BLOCK less the root, got 8"),
        (window((5, 7)), "must have window_cells of shape (1, 27) for a window_shape of (5, 7), got (1, 0)"),
        (window((1, 7)), "must have a window_shape (N, W) of at least (2, 1), got (1, 7)"),
        (window((2, 3), 99, 99), "must hold ids from 0 to 60 as window_cells, got [[99, 99]]"),
    ],
)
def test_drafts_that_would_fail_inside_the_model(model, registered, draft, message):
    registered(proposing(draft))
    with pytest.raises(ValueError, match=rf"Proposing \(MODE='mine'\) .*{re.escape(message)}"):
        model.generate(**prompt(9), max_new_tokens=8)
    lade.config_lade(MODE="auto")  # everything is usable afterwards
    compare(model, prompt(9), max_new_tokens=8)


def test_a_window_of_ones_own(model, registered):
    """Cells may hold any ids: they are computed, and change nothing."""
    registered(proposing(window((3, 2), 7, 7, 7)))
    compare(model, prompt(9), max_new_tokens=8)


INCOMPLETE = type("Incomplete", (), {"__init__": lambda self, request: None, "propose": print})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (INCOMPLETE, "Incomplete (MODE='mine') has no learn(): a drafter must inherit from"),
        (proposing(lambda *_: None), "Proposing (MODE='mine').propose() must return a Draft, got None"),
    ],
)
def test_no_drafter_and_no_draft(model, registered, make, message):
    registered(make)
    with pytest.raises(TypeError, match=re.escape(message)):
        model.generate(**prompt(9), max_new_tokens=8)


def test_built_in_modes_stay():
    for mode in BUILT_IN:
        with pytest.raises(ValueError, match=f"mode must not be one of .*, got '{mode}'"):
            register_drafter(mode, lambda request: None)


@pytest.mark.parametrize(
    ("arguments", "message"), [((1, print), "mode must be a string"), (("x", 1), "make must be callable")]
)
def test_bad_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        register_drafter(*arguments)
    assert "x" not in MODES
