"""The walk along the token tree, on Python integers. Greedy decoding and sampling differ only in `choose`."""

from __future__ import annotations

from collections.abc import Callable

Children = dict[tuple[int, int], int]


def children_of(tokens: list[int], parents: list[int]) -> Children:
    """Index of a tree: (parent node, -1 for the root; token) -> node."""
    return {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}


def walk(children: Children, choose: Callable[[int], int | None], commit: Callable[[int], bool]) -> list[int] | None:
    """Follow the model's choices through the tree until one was not guessed or the row ends.

    choose: node (-1 = root) -> the token chosen after it, None if a guess has spoiled its logits. commit: stores a
    token, returns True when the row is finished. Returns the accepted nodes without the root; one more token than that
    has been committed. None if the root's logits are spoiled; then nothing has been committed.

    Source: arXiv:2402.02057, verification branch.
    """
    accepted: list[int] = []
    node = -1
    while True:
        token = choose(node)
        if token is None:  # the last node was right, but its keys/values are spoiled, too
            return accepted[:-1] if accepted else None
        if commit(token) or (node, token) not in children:
            return accepted
        node = children[node, token]
        accepted.append(node)


def walk_together(
    children: list[Children],
    choose: Callable[[list[int], list[list[int]]], list[int] | None],
    commit: Callable[[list[int]], bool],
) -> list[list[int]] | None:
    """`walk` for all rows of a batch in lockstep, until any row's token was not guessed.

    choose: (each row's node, each row's accepted nodes so far) -> each row's token, None if any row's logits are
    spoiled. commit: stores them, returns True when all rows are finished. Returns the accepted nodes of each row, the
    same number for all; one more token has been committed. None if a root's logits are spoiled.
    """
    accepted: list[list[int]] = [[] for _ in children]
    nodes = [-1] * len(children)
    while True:
        tokens = choose(nodes, accepted)
        if tokens is None:
            return [path[:-1] for path in accepted] if accepted[0] else None
        if commit(tokens):
            return accepted
        found = [row.get((node, token)) for row, node, token in zip(children, nodes, tokens, strict=True)]
        if None in found:
            return accepted
        nodes = [node for node in found if node is not None]
        for path, node in zip(accepted, nodes, strict=True):
            path.append(node)
