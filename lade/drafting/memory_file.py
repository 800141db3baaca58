"""The file of a memory: safetensors with metadata, written atomically and validated when it is read."""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save

from lade.drafting.contexts import CONTEXT_SIZE, LARGEST_LOGIT, NUM_COLUMNS, ContextArrays
from lade.drafting.suffix_index import END
from lade.drafting.top_k_table import BIN_BITS, ROW_LENGTH, TableArrays

FORMAT = "lade memory 5"  # version 5; 1 to 4 were .npz files
MAX_TEXTS = 10_000_000  # tokens
MAX_UNLOADED = 8  # times max_bytes that a file may have beside its texts; more of it is never loaded
LARGEST_CONTEXT = 1.01  # of a number of a context, which has length 1, rounded
LARGEST_CENTRE = 1.01 * NUM_COLUMNS * LARGEST_LOGIT
IDENTITY = {"model_type": str, "vocab_size": int, "hidden_size": int, "signs": str}
# Of each array: the kind of its numbers, and its shape after the first dimension.
ARRAYS: dict[str, tuple[str, tuple[int, ...]]] = {
    "keys": ("i", ()),
    "rows": ("i", (ROW_LENGTH,)),
    "context_tokens": ("i", ()),
    "context_rows": ("i", (ROW_LENGTH,)),
    "context_before": ("f", (CONTEXT_SIZE,)),
    "context_after": ("f", (CONTEXT_SIZE,)),
    "context_centre": ("f", (CONTEXT_SIZE,)),
    "texts": ("i", ()),
}
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Contents:
    """The saved contents of a memory.

    identity: of its model, None if none has used it. contexts: None without rows. texts: ids, END after each text; None
    if they are left out.
    """

    identity: dict[str, Any] | None
    table: TableArrays
    contexts: ContextArrays | None
    texts: npt.NDArray[Any] | None


def write_memory(path: Path, contents: Contents) -> None:
    """Write a file atomically. An existing file keeps its mode, a new one gets the umask's."""
    arrays: Arrays = contents.table._asdict()
    if contents.contexts is not None:
        arrays |= {f"context_{name}": array for name, array in contents.contexts._asdict().items()}
    if contents.texts is not None:
        arrays["texts"] = contents.texts
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    encoded = save(arrays, {"format": FORMAT, "model": json.dumps(contents.identity)})
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))  # before there is anything to read in it
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what was written does
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_memory(path: Path, max_bytes: int) -> Contents:
    """max_bytes: of the memory. Raises ValueError for a file that is not a memory, or far too large for it."""
    try:
        size = path.stat().st_size
        if size > MAX_UNLOADED * max_bytes + 4 * MAX_TEXTS:
            raise ValueError(f"it has {size} bytes, which is too much for max_bytes={max_bytes}")
        with safe_open(path, "numpy") as file:
            names = file.keys()
            return _contents(file.metadata() or {}, {name: file.get_tensor(name) for name in names})
    except Exception as error:  # whatever a damaged file may lead to
        raise ValueError(f"path must be a memory saved by lade, {path} is not: {error}") from error


def _contents(metadata: dict[str, str], arrays: Arrays) -> Contents:
    """Raises an exception for anything but a memory's arrays."""
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, this version reads {FORMAT!r}")
    identity = json.loads(metadata["model"])
    if identity is not None:
        identity = {name: kind(identity[name]) for name, kind in IDENTITY.items()}
    vocab_size = identity["vocab_size"] if identity else 0
    for name, array in arrays.items():
        kind, shape = ARRAYS[name]
        if array.dtype.kind != kind or array.shape[1:] != shape or not array.ndim:
            raise ValueError(f"its {name} have a wrong shape or type")
    for name, shift in (("rows", BIN_BITS), ("context_rows", BIN_BITS), ("texts", 0)):
        ids = arrays.get(name, np.zeros(0, np.int32)) >> shift
        if ids.size and not (END if name == "texts" else 0) <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"its {name} hold ids beyond the vocabulary")
    if len(arrays["keys"]) != len(arrays["rows"]):
        raise ValueError("its keys and rows differ in number")
    return Contents(identity, TableArrays(arrays["keys"], arrays["rows"]), _contexts(arrays), arrays.get("texts"))


def _contexts(arrays: Arrays) -> ContextArrays | None:
    if "context_tokens" not in arrays:
        return None
    tokens, rows, before, after, centre = (arrays[f"context_{name}"] for name in ContextArrays._fields)
    if not len(tokens) == len(rows) == len(before) == len(after) or len(centre) != 1:
        raise ValueError("its rows by context differ in number")
    limits = (before, LARGEST_CONTEXT), (after, LARGEST_CONTEXT), (centre, LARGEST_CENTRE)
    if not all(np.abs(array).max(initial=0) < limit for array, limit in limits):  # NaN is not, either
        raise ValueError("its contexts are out of range")
    return ContextArrays(tokens, rows, *(array.astype(np.float32) for array, _ in limits))
