"""The pool against a dictionary of lists that does the same one n-gram at a time."""

import random

import pytest
import torch

from lade import ngram_pool
from lade.ngram_pool import NGramPool


class DictPool:
    """The definition: per row of keys, n-grams with the most recent first, at most G of them."""

    def __init__(self, num_guesses: int, num_rows: int) -> None:
        self.rows: dict[int, list[tuple[int, ...]]] = {}
        self.num_guesses, self.num_rows = num_guesses, num_rows

    def insert(self, ngram: tuple[int, ...]) -> None:
        row = self.rows.setdefault(ngram[0] % self.num_rows, [])
        if ngram in row:
            row.remove(ngram)
        row.insert(0, ngram)
        del row[self.num_guesses :]

    def lookup(self, key: int) -> list[list[int]]:
        return [list(ngram[1:]) for ngram in self.rows.get(key % self.num_rows, []) if ngram[0] == key]


def tails_of(pool: NGramPool, key: int) -> list[list[int]]:
    return pool.lookup(torch.tensor([key]))[0]


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
@pytest.mark.parametrize("num_guesses", [1, 2, 7])
@pytest.mark.parametrize("chunk", [4, 256])
@pytest.mark.parametrize("use_numpy", [True, False])
def test_random_operations(monkeypatch, ngram_size, num_guesses, chunk, use_numpy):
    monkeypatch.setattr(ngram_pool, "INSERT_CHUNK", chunk)
    rng = random.Random(ngram_size * 100 + num_guesses)
    vocab = 5  # few tokens: keys, whole n-grams and chunks collide all the time
    pool, oracle = NGramPool(ngram_size, num_guesses, vocab), DictPool(num_guesses, vocab)
    pool.use_numpy(use_numpy)
    for _ in range(60):
        ngrams = [[rng.randrange(vocab) for _ in range(ngram_size)] for _ in range(rng.randrange(1, 30))]
        pool.insert(torch.tensor(ngrams))
        for ngram in ngrams:
            oracle.insert(tuple(ngram))
        for key in range(vocab):
            assert tails_of(pool, key) == oracle.lookup(key)


def test_keys_that_share_a_row(monkeypatch):
    bytes_per_row = 2 * (3 + 1) * 8
    monkeypatch.setattr(ngram_pool, "MAX_BYTES", 4 * bytes_per_row)
    pool, oracle = NGramPool(3, 2, vocab_size=100), DictPool(2, 4)
    rng = random.Random(0)
    for _ in range(200):
        ngram = [rng.randrange(12), rng.randrange(3), rng.randrange(3)]
        pool.insert(torch.tensor([ngram]))
        oracle.insert(tuple(ngram))
        for key in range(12):
            assert tails_of(pool, key) == oracle.lookup(key)


def test_memory_is_bounded():
    pool = NGramPool(ngram_size=8, num_guesses=32, vocab_size=10**6)
    row_bytes = 32 * 9 * 8
    assert pool.ngrams.nbytes + pool.seen.nbytes <= ngram_pool.MAX_BYTES + row_bytes


def test_lookup_of_several_keys():
    pool = NGramPool(4, 3, 10)
    pool.insert(torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]]))
    assert pool.lookup(torch.tensor([1, 2])) == [[[2, 3, 5], [2, 3, 4]], []]


def test_nothing_to_insert():
    pool = NGramPool(4, 3, 10)
    pool.insert(torch.empty(0, 4, dtype=torch.long))
    assert pool.lookup(torch.arange(10)) == [[]] * 10
