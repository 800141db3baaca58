"""The walk over the token tree. Pure functions on Python integers; greedy and sampling differ only in `choose`."""

from __future__ import annotations

from collections.abc import Callable

Children = dict[tuple[int, int], int]


def children_of(tokens: list[int], parents: list[int]) -> Children:
    """Index of a tree: (parent node or -1 for the root, token) -> node."""
    return {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True))}


def walk(children: Children, choose: Callable[[int], int | None], commit: Callable[[int], bool]) -> list[int] | None:
    """Follow the model's own choices through the tree until one was not guessed or the text ends.

    choose: node (-1 = root) -> the token the model puts after it, None where a guess has spoiled its logits. commit: stores a
    chosen token, returns True when the text is finished. Returns the accepted nodes, root excluded; one more token than that has
    been committed. None where the root has no token: then none has.
    Source: arXiv:2402.02057, verification branch.
    """
    accepted: list[int] = []
    node = -1
    while True:
        token = choose(node)
        if token is None:  # the node was right, but its keys and values are spoiled like its logits
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
    """`walk` for all rows of a batch at once: it goes on while every row's token was guessed.

    choose: (each row's node, each row's accepted nodes so far) -> each row's token, None where a guess has spoiled any row's
    logits. commit: stores them, returns True when all texts are finished. Returns the accepted nodes of each row, equally many;
    one more token has been committed. None where the roots have no tokens.
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
