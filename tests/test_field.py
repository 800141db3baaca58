"""The field's drafters guess what their papers say: on texts made by hand, where the right guesses are known."""

import pytest
import torch

import lade
from lade.block.token_tree import TokenTree
from lade.drafting import DraftRequest, Outcome, make_drafter
from lade.drafting.memory import Memory
from lade.switch import current_config
from lade.verification.sequences import TokenSequences

NUM_TOKENS = 64


@pytest.fixture
def field(module):
    found = module("field")
    found.register()
    return found


class Text:
    """A drafter of MODE behind a text, with rows made by hand."""

    def __init__(self, model, mode, prompt_ids, size=7, memory=None):
        lade.config_lade(MODE=mode, MAX_BLOCK=size + 1, ADAPTIVE=0)
        ids = torch.tensor([prompt_ids])
        rest = {"num_tokens": NUM_TOKENS, "key_mask": None, "temperature": None}
        request = DraftRequest(config=current_config(), model=model, prompt_ids=ids, **rest)
        with (Memory() if memory is None else memory).active():
            self.drafter = make_drafter(request)
        self.sequences = TokenSequences(ids)
        self.tree = TokenTree.empty(1)

    def commit(self, *tokens, rows=()):
        """One token a step, no guess accepted. rows: the likeliest tokens of the first step, behind its root and
        guesses, best first."""
        for token in tokens:
            logits = torch.zeros(1, 1 + self.tree.num_nodes, NUM_TOKENS)
            for row, likeliest in zip(logits[0], rows, strict=False):
                for rank, likely in enumerate(likeliest):
                    row[likely] = 10 - rank
            self.sequences.append([token], 0)
            self.drafter.learn(Outcome(self.tree, logits, [[]], None, self.sequences))
            self.tree, rows = TokenTree.empty(1), ()
        return self

    def guesses(self, max_offset=None):
        """Paths from the root to each guess, in the tree's order."""
        self.tree = self.drafter.propose(self.sequences, [False], max_offset).tree
        paths = []
        for token, parent in zip(self.tree.tokens[0], self.tree.parents[0], strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths


def chain(*tokens):
    return [tokens[: k + 1] for k in range(len(tokens))]


def test_prompt_lookup_is_transformers(lade_on, field, model):
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = torch.Generator().manual_seed(0)
    theirs = PromptLookupCandidateGenerator(num_output_tokens=5, max_length=1000)
    for length in (2, 3, 5, 10, 20, 30, 60):
        ids = torch.randint(8, (length,), generator=generator).tolist()
        found = Text(model, "prompt-lookup", ids[:-1], size=5).commit(ids[-1]).guesses()
        expected = theirs.get_candidates(torch.tensor([ids]))[0][0, length:].tolist()
        assert found == chain(*expected)


def test_suffix_decoding_guesses_by_how_often_it_has_occurred(lade_on, field, model):
    text = Text(model, "suffix-decoding", [1, 2, 3, 9, 5, 1, 2, 4, 8, 6, 1, 2, 3, 9, 7, 1], size=5)
    found = text.commit(2).guesses()  # behind "1 2" came twice 3, each time with 9 behind it, and once 4
    assert found[:2] == chain(3, 9)
    assert set(found[2:]) < {(4,), (4, 8), (3, 9, 5), (3, 9, 7), (4, 8, 6), (3, 9, 5, 1), (3, 9, 7, 1)}
    again = Text(model, "suffix-decoding", [7, 1, 2, 3, 4, 5, 6, 9, 2, 30, 9, 2, 31, 7, 1], size=4)
    assert again.commit(2).guesses() == chain(3, 4, 5, 6)  # the one match of three tokens is surer than those of one


def test_suffix_decoding_searches_the_texts_kept(lade_on, field, model):
    memory = Memory()
    first = Text(model, "suffix-decoding", [1, 2], size=4, memory=memory).commit(11, 12, 13)
    first.drafter.finish()
    assert Text(model, "suffix-decoding", [5, 6], size=4, memory=memory).commit(11).guesses() == chain(12, 13)
    assert Text(model, "suffix-decoding", [5, 6], size=4).commit(11).guesses() == []
    assert Text(model, "suffix-decoding", [5, 6], size=4, memory=memory).commit(13).guesses() == []  # not into the next


def test_recycling_grows_its_tree_of_ranks_from_the_rows_of_tokens(lade_on, field, model):
    text = Text(model, "token-recycling", [1, 2], size=4)
    text.commit(5, rows=[[5, 6]])
    assert text.guesses() == []  # nothing is known behind 5
    text.commit(2, rows=[[2, 7]])  # behind 5 come 2 and 7; behind 2 came 5 and 6
    found = text.guesses()
    assert found[0] == (5,)
    assert {(5, 2), (6,)} < set(found)
    assert [rank for parent, rank in field.static_tree(4) if parent == -1] == [0, 1]
    assert len(found) == 4


def test_recycling_learns_from_wrong_guesses(lade_on, field, model):
    text = Text(model, "token-recycling", [1, 2], size=1)
    text.commit(5, rows=[[5]]).commit(2, rows=[[2]])
    assert text.guesses() == [(5,)]
    text.commit(9, rows=[[9], [30]])  # 5 was wrong; behind it would have come 30
    text.commit(5)
    assert text.guesses() == [(30,)]


def test_automaton_knows_the_longest_earlier_occurrence(field):
    generator = torch.Generator().manual_seed(0)
    for num_tokens in (2, 3, 5):
        tokens = torch.randint(num_tokens, (80,), generator=generator).tolist()
        automaton, match = field.SuffixAutomaton(), (0, 0)
        for place, token in enumerate(tokens):
            match = automaton.step(*match, token)
            automaton.append(token)
            text = tokens[: place + 1]
            ends = {n: [e for e in range(n, place + 1) if text[e - n : e] == text[-n:]] for n in range(1, place + 1)}
            longest = max((n for n in ends if ends[n]), default=0)
            assert match[1] == longest
            if longest:
                assert automaton.following(match[0], 6) == text[ends[longest][0] :][:6]


def test_sam_copies_behind_long_matches_and_recycles_behind_short_ones(lade_on, field, model):
    text = Text(model, "sam-decoding", [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], size=3)
    text.commit(5)
    assert text.guesses() == chain(6, 7, 8)
    text.commit(20, rows=[[20, 21]])
    text.commit(5, rows=[[5]])  # behind 5 came 20 and 21; the match has one token
    assert text.guesses()[0] == (20,)


def test_sam_copies_from_texts_kept_where_the_match_is_longer_by_its_bias(lade_on, field, model):
    memory = Memory()
    Text(model, "sam-decoding", [1], memory=memory).commit(*range(30, 50)).drafter.finish()
    text = Text(model, "sam-decoding", [2, 3], size=3, memory=memory).commit(*range(30, 39))
    assert text.guesses()[:1] != [(39,)]  # a match of nine tokens is too short
    assert text.commit(39).guesses() == chain(40, 41, 42)


def test_logitspec_extends_the_runners_up_of_the_last_row(lade_on, field, model):
    text = Text(model, "logitspec", [1, 2, 3, 11, 12, 13, 4, 5, 6, 7, 8, 9, 10, 20], size=15)
    text.commit(5, rows=[[5, 3, 40]])
    found = text.guesses()
    assert found[:6] == chain(6, 7, 8, 9, 10, 20)  # behind 5, the token as it is
    assert found[6:9] == chain(3, 11, 12)  # the runner-up as the next token, with what followed it
    assert found[9] == (40,)
    assert len(found) == 15
    assert text.guesses(max_offset=1) == [(6,), (3,), *found[9:]]
