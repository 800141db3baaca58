"""The block's mask and positions against the definition, written down cell by cell."""

import pytest
import torch

from lade.block.layout import block_layout
from lade.block.mask import AttentionSpan, Block, block_mask
from lade.block.token_tree import merge_candidates

CPU = torch.device("cpu")


def describe(ngram_size, window_size, tree, row=0):
    """What each block token is, in block order: ("window", level, column) or ("node", its path of nodes)."""
    parents = tree.parents[row]
    block = [("window", 0, 0)]
    for node in range(tree.num_nodes):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        block.append(("node", tuple(path)))
    block += [("window", r, j) for r in range(ngram_size - 1) for j in range(window_size) if (r, j) != (0, 0)]
    return block


def sees(query, key):
    if query[0] == "window":
        if key[0] != "window":
            return False
        (_, r, j), (_, level, column) = query, key
        return (level == 0 and column <= j) or (column == j and 1 <= level <= r)
    if key[0] == "window":
        return key == ("window", 0, 0)
    return key[1][-1] in query[1]


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
@pytest.mark.parametrize("window_size", [1, 2, 6])
@pytest.mark.parametrize("num_tails", [0, 1, 4])
def test_layout_is_the_definition(ngram_size, window_size, num_tails):
    generator = torch.Generator().manual_seed(ngram_size * 10 + num_tails)
    tree = merge_candidates(torch.randint(0, 2, (1, num_tails, ngram_size - 1), generator=generator).tolist())
    layout = block_layout(ngram_size, window_size, tree.num_nodes, CPU)
    block = describe(ngram_size, window_size, tree)
    assert layout.num_tokens == len(block) == tree.num_nodes + (ngram_size - 1) * window_size

    offsets, visible = (found[0].tolist() for found in layout.offsets_and_visibility(tree))
    assert visible == [[sees(query, key) for key in block] for query in block]
    assert offsets == [what[1] + what[2] if what[0] == "window" else len(what[1]) for what in block]

    last_level = [i for i, what in enumerate(block) if what[0] == "window" and what[1] == ngram_size - 2]
    assert layout.logit_rows.tolist() == [*range(1 + tree.num_nodes), *last_level]

    cells = torch.arange(100, 100 + (ngram_size - 1) * window_size - 1)[None]
    tokens = layout.tokens([7], tree, cells)[0].tolist()
    assert tokens == [7, *tree.tokens[0], *cells[0].tolist()]


@pytest.mark.parametrize("span", [AttentionSpan(), AttentionSpan(window=3), AttentionSpan(window=50)], ids=str)
@pytest.mark.parametrize("lengths", [[3], [9], [5, 2], [4, 4], [11, 9]])
@pytest.mark.parametrize("padded", [False, True])
def test_mask_over_slots(lengths, padded, span):
    num_queries, batch_size = 3, len(lengths)
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(batch_size, num_queries, num_queries, generator=generator) > 0.5
    offsets = torch.tensor([0, 1, 1]).expand(batch_size, -1)
    visible &= offsets[:, :, None] >= offsets[:, None]
    key_mask = torch.ones(batch_size, 2, dtype=torch.bool) if padded else None
    if key_mask is not None:
        key_mask[0, 0] = False
    block = Block(torch.zeros(batch_size, num_queries), offsets, offsets, visible, torch.tensor([0]), lengths, key_mask)
    mask = block_mask(block, torch.float32, span)
    assert mask.shape == (batch_size, 1, num_queries, max(lengths) + num_queries)
    for row, length in enumerate(lengths):
        for query in range(num_queries):
            place = length + offsets[row, query].item()
            for slot in range(mask.shape[3]):
                key_place = slot
                if slot < length:
                    expected = key_mask is None or slot >= 2 or bool(key_mask[row, slot])
                elif slot < length + num_queries:
                    expected = bool(visible[row, query, slot - length])
                    key_place = length + offsets[row, slot - length].item()
                else:
                    expected = False
                if span.window:
                    expected = expected and place - key_place < span.window
                value = mask[row, 0, query, slot].item()
                assert value == (0 if expected else torch.finfo(torch.float32).min)
