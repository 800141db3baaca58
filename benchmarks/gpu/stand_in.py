"""CUDA graphs stood in for on a CPU. For tests, of this folder's commands too.

A CUDA graph remembers operations and addresses, and no Python. So does a `Tape`: a replay that should read a tensor
made after the capture, or that depends on what Python does in a step, gives a wrong result here as it would there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import set_stance
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_recording = threading.Lock()  # `set_stance` holds for the process


class Tape(TorchDispatchMode):
    """Records the operations of a forward, with the tensors that they read and write; a call runs them again."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        with _recording, set_stance("force_eager"), self:  # what is compiled would hide its operations
            self.output = forward()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        new = [tensor for tensor in tensors_in(result) if tensor.untyped_storage().data_ptr() not in known]
        if new or operation._schema.is_mutable:  # a view stays one of the same memory
            # What it reads later lies where it lay, also where a weight's `.data` is another one by then.
            read = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self.operations.append((operation, *read, tensors_in(result) if new else []))
        return result

    def __call__(self) -> Any:
        """Every result is written where it was at the capture. Returns the output."""
        for operation, args, kwargs, results in self.operations:
            found = operation(*args, **kwargs)
            for old, new in zip(results, tensors_in(found), strict=False):
                old.copy_(new)
        return self.output


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def install() -> None:
    """For the rest of the process. Compiled forwards are traced and not compiled, which would take minutes."""
    from lade.forward import base as forward_base
    from lade.forward.cuda import static_shapes

    forward_base.GRAPH_DEVICES = ("cpu",)
    static_shapes.BACKEND = "eager"
    static_shapes.capture = Tape
