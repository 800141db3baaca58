"""The pool against a dictionary of lists that does the same one n-gram at a time."""

import random

import pytest
import torch

from lade.drafting import ngram_pool
from lade.drafting.ngram_pool import HostPool, NGramPool, pool_for


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


@pytest.mark.parametrize("ngram_size", [2, 3, 5])
@pytest.mark.parametrize("num_guesses", [1, 2, 7])
@pytest.mark.parametrize(("kind", "chunk"), [(HostPool, 0), (NGramPool, 4), (NGramPool, 256)])
def test_random_operations(monkeypatch, ngram_size, num_guesses, chunk, kind):
    monkeypatch.setattr(ngram_pool, "INSERT_CHUNK", chunk)
    rng = random.Random(ngram_size * 100 + num_guesses)
    vocab = 5  # few tokens: keys, whole n-grams and chunks collide all the time
    pool, oracle = kind(ngram_size, num_guesses, vocab), DictPool(num_guesses, vocab)
    for _ in range(60):
        ngrams = [[rng.randrange(vocab) for _ in range(ngram_size)] for _ in range(rng.randrange(30))]
        pool.insert(torch.tensor(ngrams, dtype=torch.long).view(-1, ngram_size))
        for ngram in ngrams:
            oracle.insert(tuple(ngram))
        assert pool.lookup(torch.arange(vocab)) == [oracle.lookup(key) for key in range(vocab)]


def test_keys_that_share_a_row(monkeypatch):
    bytes_per_row = 2 * (3 + 1) * 8
    monkeypatch.setattr(ngram_pool, "MAX_BYTES", 4 * bytes_per_row)
    pool, oracle = NGramPool(3, 2, vocab_size=100), DictPool(2, 4)
    rng = random.Random(0)
    for _ in range(200):
        ngram = [rng.randrange(12), rng.randrange(3), rng.randrange(3)]
        pool.insert(torch.tensor([ngram]))
        oracle.insert(tuple(ngram))
        assert pool.lookup(torch.arange(12)) == [oracle.lookup(key) for key in range(12)]


def test_memory_is_bounded():
    pool = NGramPool(ngram_size=8, num_guesses=32, vocab_size=10**6)
    row_bytes = 32 * 9 * 8
    assert pool.ngrams.nbytes + pool.seen.nbytes <= ngram_pool.MAX_BYTES + row_bytes


def test_keys_of_a_host_pool_are_bounded(monkeypatch):
    """The one that was least recently seen goes."""
    monkeypatch.setattr(ngram_pool, "MAX_BYTES", 2 * 2 * 3 * ngram_pool.BYTES_PER_TOKEN)
    pool = HostPool(3, 2, vocab_size=100)
    pool.insert(torch.tensor([[1, 2, 3], [2, 2, 3], [1, 4, 5], [3, 6, 7]]))
    assert pool.lookup(torch.tensor([1, 2, 3])) == [[[4, 5], [2, 3]], [], [[6, 7]]]


def test_who_gets_which():
    assert type(pool_for(torch.device("cpu"), 3, 2, 10)) is HostPool
    assert type(pool_for(torch.device("meta"), 3, 2, 10)) is NGramPool
