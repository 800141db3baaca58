"""Models that the user has compiled: find the functions that torch.compile wraps, so that blocks run them uncompiled.

Dynamo recompiles a function for each new shape and gives up or raises at a limit, and blocks have many shapes. A
shadow model (`lade/models/shadow.py`) runs the original functions and computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn

UNKNOWN_BACKEND = (
    "the model is compiled by a backend that is not torch's own, or together with other code: "
    "lade cannot tell what it computes, and every shape of a block would be compiled anew"
)
# Where dynamo's wrappers of a backend keep what they wrap; the second in older versions of torch.
WRAPPED = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def compiled_reason(parts: Iterable[nn.Module]) -> str | None:
    """Why the compiled code of these modules cannot be bypassed, as a sentence; None if it can."""
    for part in parts:
        own = vars(part)
        compiled = (own.get("forward"), own.get("_compiled_call_impl"))
        if any(is_compiled(function) for function in compiled) and not can_pass_by(part):
            return UNKNOWN_BACKEND
    return None


def is_compiled(function: Any) -> bool:
    """Whether `function` is a result of torch.compile, and not a wrapper that has copied its attributes."""
    return getattr(function, "_torchdynamo_wrapper_id", id(function)) == id(function) and hasattr(
        function, "_torchdynamo_orig_callable"
    )


def can_pass_by(part: nn.Module) -> bool:
    """Whether everything that replaces the module's own code is that same code, compiled by a backend of torch."""
    own = vars(part)
    stands_for = {"forward": type(part).forward, "_compiled_call_impl": nn.Module._call_impl}
    module: Any = part
    if "dynamo_ctx" in own:  # torch.compile(module) wraps the module in another one
        module = own["_modules"]["_orig_mod"]
        stands_for["forward"] = nn.Module._wrapped_call_impl
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return False
    found = {name: function for name in stands_for if (function := own.get(name)) is not None}
    return bool(found) and all(
        is_compiled(function)
        and is_of_torch(function)
        and function._torchdynamo_orig_callable == MethodType(stands_for[name], module)
        for name, function in found.items()
    )


def is_of_torch(function: Any) -> bool:
    """Whether the backend of a compiled function is torch's own; another one may compute something else."""
    for cell in function.__closure__ or ():
        backend: Any = getattr(cell.cell_contents, "callback", None)
        while names := [name for name in WRAPPED if hasattr(backend, name)]:
            backend = getattr(backend, names[0])
        if backend is not None:
            # torch.compile wraps backends, inductor in a class of its own. What dynamo puts around that tells nothing.
            code = getattr(backend, "compiler_fn", None)
            if code is None:
                return type(backend).__module__ == "torch"
            return (getattr(code, "__module__", None) or "").split(".")[0] == "torch"
    return False
