"""The block policy: the size of a tree, by the tokens that it is expected to commit per unit of cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def compared_sizes(
    offers: Sequence[tuple[int, float]], expected: Sequence[float], num_rows: int
) -> list[tuple[int, float, float]]:
    """The sizes that so many guesses fill: q, the tokens expected of a step per row, its cost over the first size's.

    offers: sizes, rising, with their costs. expected: at index k, accepted guesses expected from k guesses per row,
    summed over rows. num_rows: unfinished rows.
    """
    (first, plain), num_filled = offers[0], sum(size <= len(expected) for size, _ in offers)
    if first > 1 and (not num_filled or offers[num_filled - 1][0] < len(expected)):
        num_filled += 1  # where blocks are padded, guesses that fill no size go into the next
    return [
        (size, 1 + expected[min(size, len(expected)) - 1] / num_rows, cost / plain)
        for size, cost in offers[:num_filled]
    ]


def choose_size(compared: Iterable[tuple[int, float, float]]) -> int:
    """The block size that commits most tokens per unit of cost. compared: as from `compared_sizes`. Returns q."""
    size, *_ = max(compared, key=lambda offer: offer[1] / offer[2])
    return size
