"""Slots, compaction and growth of the cache, against lists of what must be kept."""

import weakref

import pytest
import torch

from lade.block.kv_cache import LookaheadCache


def states(values: list[list[int]]) -> torch.Tensor:
    """[B, H=2, q, D=3] filled with one number per token."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None].expand(-1, 2, -1, 3).clone()


def contents(cache: LookaheadCache, layer: int = 0) -> list[list[int]]:
    keys = cache.layers[layer].keys
    assert torch.equal(keys * 10, cache.layers[layer].values)
    return [keys[row, 1, :length, 2].int().tolist() for row, length in enumerate(cache.lengths)]


def write(cache: LookaheadCache, values: list[list[int]], layers: int = 2) -> None:
    for layer in range(layers):
        cache.update(states(values), states(values) * 10, layer)


@pytest.mark.parametrize("uniform", [True, False])
def test_blocks_and_compaction(uniform):
    cache = LookaheadCache(num_layers=2, capacity=256, uniform=uniform)
    write(cache, [[1, 2, 3], [4, 5, 6]])
    assert cache.get_seq_length() == 3
    assert not cache.layers[0].values[:, :, 3:].any()
    cache.end_prefill(batch_size=2)

    cache.begin_block(4, torch.device("cpu"))
    write(cache, [[10, 11, 12, 13], [20, 21, 22, 23]])
    cache.commit([[2, 3], []])
    expected = [[1, 2, 3, 10, 12, 13], [4, 5, 6, 20]]
    assert contents(cache, 0) == contents(cache, 1) == expected

    cache.begin_block(3, torch.device("cpu"))  # now the rows have different lengths
    keys, _ = cache.update(states([[30, 31, 32], [40, 41, 42]]), states([[300, 310, 320], [400, 410, 420]]), 0)
    assert keys.shape[2] == 6 + 3
    assert keys[1, 0, 4:7, 0].tolist() == [40, 41, 42]
    write(cache, [[30, 31, 32], [40, 41, 42]])
    cache.commit([None, [1]])  # the first row has ended
    assert contents(cache, 1) == [expected[0], [*expected[1], 40, 41]]


@pytest.mark.parametrize("length", [250, 256])
def test_growth_keeps_what_is_committed(length):
    """Also of a cache that is full to its last slot."""
    cache = LookaheadCache(num_layers=1, capacity=256)
    write(cache, [list(range(length))], layers=1)
    cache.end_prefill(1)
    cache.begin_block(10, torch.device("cpu"))
    write(cache, [list(range(1000, 1010))], layers=1)
    assert cache.capacity == 512
    cache.commit([[4]])
    assert contents(cache) == [[*range(length), 1000, 1004]]


def test_a_layer_that_the_prompt_did_not_come_by():
    cache = LookaheadCache(2, 64)
    cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
    cache.end_prefill(1)
    cache.begin_block(3, torch.device("cpu"))
    block = torch.arange(24.0).view(1, 2, 3, 4)
    for layer in range(2):
        keys, values = cache.update(block, -block, layer)
        assert keys.shape == values.shape == (1, 2, 8, 4)
        assert torch.equal(keys[:, :, 5:], block)
        assert torch.equal(values[:, :, 5:], -block)
        assert bool((keys[:, :, :5] == 1 - layer).all())


def test_growing_keeps_no_old_storage():
    cache = LookaheadCache(1, 64)
    cache.update(torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4), 0)
    cache.end_prefill(2)
    cache.begin_block(3, torch.device("cpu"))
    cache.update(torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), 0)  # this one does
    old = weakref.ref(cache.storages[0].data)
    cache.lengths = [300, 301]  # a block of rows that differ cuts no views
    cache.begin_block(3, torch.device("cpu"))
    assert cache.capacity > 300
    assert old() is None
