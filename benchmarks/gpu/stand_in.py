"""CUDA graphs stood in for on a CPU: a trace that, like a graph, remembers tensors and no Python. For tests of commands and calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

_tracing = threading.Lock()  # is not for two threads at once


def trace(forward: Callable[[], Any]) -> Callable[[], Any]:
    """In place of `lade.forward.graphs.capture`. Returns what computes it again, always into the same tensors."""
    with _tracing:
        try:
            graph: Any = make_fx(forward)()
        except RuntimeError as problem:
            if "dynamo-optimized" not in str(problem):
                raise
            graph = forward  # what is compiled cannot be traced
        output = graph()

    def replay() -> Any:
        return tree_map(Tensor.copy_, output, graph())

    return replay


def install() -> None:
    """For the rest of the process. Compiled forwards are traced and not compiled, which would take minutes."""
    from lade.forward import static_shapes
    from lade.forward.on_device import loop

    static_shapes.GRAPH_DEVICES = ("cpu",)
    static_shapes.BACKEND = "eager"
    static_shapes.capture = loop.capture = trace
