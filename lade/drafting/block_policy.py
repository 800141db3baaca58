"""The block policy: the size of a tree, by the tokens that it is expected to commit per unit of cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lade.drafting.step_costs import Offers


def compared_sizes(offers: Offers, expected: Sequence[float], num_rows: int) -> list[tuple[int, float, float]]:
    """The sizes that so many guesses fill: q, the tokens expected of a step per row, its cost over the first size's.

    expected: at index k, accepted guesses expected from k guesses per row, summed over rows. num_rows: unfinished rows.
    """
    num_filled = sum(size <= len(expected) for size in offers.sizes)
    is_padded = offers.sizes[0] > 1
    if is_padded and (not num_filled or offers.sizes[num_filled - 1] < len(expected)):
        num_filled += 1  # guesses that fill no size go into the next
    found = zip(offers.sizes[:num_filled], offers.costs, strict=False)
    plain = offers.costs[0]
    return [(size, 1 + expected[min(size, len(expected)) - 1] / num_rows, cost / plain) for size, cost in found]


def choose_size(compared: Iterable[tuple[int, float, float]]) -> int:
    """The block size that commits most tokens per unit of cost. compared: as from `compared_sizes`. Returns q."""
    size, *_ = max(compared, key=lambda offer: offer[1] / offer[2])
    return size
