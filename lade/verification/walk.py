"""The walk along the token tree, on Python integers. Selections differ in `choose` and `commit`."""

from __future__ import annotations

from collections.abc import Callable

Children = dict[tuple[int, int], int]


def children_of(tokens: list[int], parents: list[int]) -> Children:
    """Index of a tree: (parent node, -1 for the root; token) -> node."""
    return {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}


def walk(
    children: list[Children],
    choose: Callable[[list[int]], list[int] | None],
    commit: Callable[[list[int], bool], bool],
) -> list[list[int]] | None:
    """Follow the model's choices through the trees of some rows, until any row's token was not guessed or all end.

    choose: each row's node, -1 = root -> the token chosen after it, None if a guess has made any of their logits NaN.
    commit: (a token of each row; whether all were guessed) stores the tokens, returns True when all rows are finished
    or the tokens have been replaced by others. Returns the accepted nodes of each row without the root, the same number
    for all; one more token than that has been committed. None if a root's logits are NaN; then nothing has been
    committed.

    Source: arXiv:2402.02057, verification branch.
    """
    accepted: list[list[int]] = [[] for _ in children]
    nodes = [-1] * len(children)
    while True:
        tokens = choose(nodes)
        if tokens is None:  # the last nodes were right, but their keys/values are NaN, too
            return [path[:-1] for path in accepted] if accepted[0] else None
        edges = zip(children, nodes, tokens, strict=True)
        nodes = [row[node, token] for row, node, token in edges if (node, token) in row]
        were_guessed = len(nodes) == len(children)
        if commit(tokens, were_guessed) or not were_guessed:
            return accepted
        for path, node in zip(accepted, nodes, strict=True):
            path.append(node)
