"""The committed texts against lists."""

import random

import pytest
import torch

from lade.verification.sequences import TokenSequences

PROMPTS = [[3, 4, 5], [6, 7, 8]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_grow_on_their_own(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    texts, choice = [list(prompt) for prompt in PROMPTS], random.Random(0)
    sequences = TokenSequences(torch.tensor(PROMPTS, device=device))
    for _ in range(40):
        row, tokens = choice.randrange(2), [choice.randrange(61) for _ in range(choice.randint(1, 5))]
        texts[row] += tokens
        sequences.append(tokens, row)
        assert [sequences.row(index)[0].tolist() for index in range(2)] == texts
        assert sequences.lengths == [len(text) for text in texts]
    assert sequences.generated == [text[3:] for text in texts]
    assert sequences.roots() == [text[-1] for text in texts]
    longest = max(sequences.lengths)
    assert sequences.padded(0).tolist() == [text + [0] * (longest - len(text)) for text in texts]


def test_columns():
    """The prompts are left alone."""
    prompts = torch.tensor(PROMPTS, dtype=torch.int32)
    sequences = TokenSequences(prompts)
    for token in range(10, 20):
        sequences.append([token], 0)
        sequences.append([token + 20], 1)
    assert sequences.texts(slice(0, 2)).tolist() == [[*PROMPTS[0], *range(10, 20)], [*PROMPTS[1], *range(30, 40)]]
    assert sequences.texts(slice(0, 2)).is_contiguous()
    assert sequences.roots() == [19, 39]
    assert prompts.tolist() == PROMPTS
    assert sequences.padded(0).dtype == torch.long
