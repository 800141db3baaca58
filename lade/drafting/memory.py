"""The tree drafter's memory across calls: rows of likely next tokens, and texts if asked for."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from lade.common.state import PerModel
from lade.drafting.contexts import BYTES_PER_RECORD, ContextTable
from lade.drafting.memory_file import MAX_TEXTS, Contents, read_memory, write_memory
from lade.drafting.text_store import TextStore
from lade.drafting.top_k_table import BYTES_PER_ROW, Packed, TopKTable
from lade.models.base import num_tokens_of

MAX_BYTES = 64 * 2**20
MIN_BYTES = 64 * 2**10
NUM_SIGNS = 256  # of the embedding, which identify a model
MAX_FOREIGN_SIGNS = 0.2  # fine-tuning changes few of them; between unrelated models half of them differ


class Memory:
    """Rows of likely next tokens by the last token and its context.

    It belongs to one model, the first that uses it. Inside `with memory.active():` the calls of this thread use it
    instead of the one that all calls of the model share:

        memory = lade.Memory(path="alice.safetensors")    # loaded where the file is there
        with memory.active():
            model.generate(...)
        memory.save()

    In float32 and float64 a memory changes only the speed of a call, not its result. In half precision it can change
    the text where two tokens nearly tie (docs/compatibility.md, "What differs").
    """

    def __init__(self, max_bytes: int = MAX_BYTES, path: str | Path | None = None, texts: int = 0) -> None:
        """max_bytes: about how much the tables may take. path: the file that save() writes, loaded if it exists.
        texts: how many tokens of generated texts, each with the end of its prompt, are also kept verbatim; 24 to 32
        bytes each. 0: none.

        Of a file with more rows than fit the latest are loaded. Raises ValueError for too few bytes, or a file that is
        not a memory or far too large for max_bytes; the file is left unchanged.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes must be an integer of at least {MIN_BYTES}, got {max_bytes!r}")
        if isinstance(texts, bool) or not isinstance(texts, int) or not 0 <= texts <= MAX_TEXTS:
            raise ValueError(f"texts must be an integer from 0 to {MAX_TEXTS}, got {texts!r}")
        self.path = None if path is None else _writable(Path(path))
        self.table = TopKTable(max_bytes // (4 * BYTES_PER_ROW))  # by token
        self.contexts = ContextTable(3 * max_bytes // (4 * BYTES_PER_RECORD))
        self.identity: dict[str, Any] | None = None  # of the model
        self.texts = TextStore(texts) if texts else None
        if self.path is not None and self.path.exists():
            self._load(self.path, max_bytes)

    def __len__(self) -> int:
        """Rows."""
        return len(self.table) + len(self.contexts)

    @contextmanager
    def active(self) -> Iterator[Memory]:
        """Let this thread's calls use this memory. A new thread begins without."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    def clear(self) -> None:
        """Forget everything, the model too. Calls under way go on with what they had, and leave nothing here."""
        self.table, self.contexts = TopKTable(self.table.capacity), ContextTable(self.contexts.capacity)
        self.texts = None if self.texts is None else TextStore(self.texts.max_tokens)
        self.identity = None

    def belong_to(self, model: Any) -> None:
        """Raises ValueError when this memory is of another model or vocabulary."""
        identity = identity_of(model)
        difference = None if self.identity is None else _difference(self.identity, identity)
        if difference:
            raise ValueError(
                f"the memory{f' in {self.path}' if self.path else ''} belongs to another model: {difference}"
            )
        self.identity = self.identity or identity

    def learn(self, tokens: list[int], rows: Packed, accepted: Sequence[int]) -> None:
        """Remember the rows after some tokens, [M, ROW_LENGTH]; of one token the last row counts.

        accepted: the indices of committed tokens. Their rows count before those of rejected guesses.
        """
        is_accepted = set(accepted)
        order = [*(i for i in range(len(tokens)) if i not in is_accepted), *accepted]
        self.table.put([tokens[i] for i in order], rows[order])

    def save(self, path: str | Path | None = None, texts: bool = False) -> None:
        """Write everything to a file, all or nothing. path: None for the one given at first.

        texts: write what Memory(texts=...) keeps too. A file that is there keeps its mode. Raises ValueError without a
        path, or where no texts are kept that could be written.
        """
        target = self.path if path is None else Path(path)
        if target is None:
            raise ValueError("path must be given here or to Memory(), got None")
        if texts and self.texts is None:
            raise ValueError(f"texts must be False for a memory that keeps none, got {texts!r}")
        target = _writable(target.resolve())  # a link stays one
        contents = Contents(
            identity=self.identity,
            table=self.table.as_arrays(),
            contexts=self.contexts.as_arrays(),
            texts=self.texts.as_array() if texts and self.texts is not None else None,
        )
        write_memory(target, contents)

    def _load(self, path: Path, max_bytes: int) -> None:
        found = read_memory(path, max_bytes)
        self.identity = found.identity
        if self.texts is not None and found.texts is not None:
            self.texts.restore(found.texts)
        self.table.put(found.table.keys.tolist(), found.table.rows)
        if found.contexts is not None:
            self.contexts.restore(found.contexts)


def _writable(path: Path) -> Path:
    """Raises ValueError where no file of this name can be."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"path must be a file in a folder that exists, got {str(path)!r}")
    return path


def identity_of(model: Any) -> dict[str, Any]:
    """Identifies a model in any dtype: type, sizes, and signs of its embedding if they can be read."""
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    signs = ""
    if weight.is_floating_point() and weight.device.type != "meta" and weight.ndim == 2:
        rows = torch.linspace(0, len(weight) - 1, NUM_SIGNS, device=weight.device).long()
        columns = torch.arange(NUM_SIGNS, device=weight.device) % weight.shape[1]
        signs = "".join("01"[sign] for sign in (weight[rows, columns] < 0).tolist())
    return {
        "model_type": config.model_type,
        "vocab_size": num_tokens_of(model),
        "hidden_size": config.hidden_size,
        "signs": signs,
    }


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """How two models differ, as a sentence; None if they are the same, or fine-tuned from each other."""
    for name in ("model_type", "vocab_size", "hidden_size"):
        if mine[name] != other[name]:
            return f"{name} is {other[name]!r}, not {mine[name]!r}"
    pairs = list(zip(mine["signs"], other["signs"], strict=False))
    if sum(a != b for a, b in pairs) > MAX_FOREIGN_SIGNS * len(pairs):
        return "the token embeddings differ"
    return None


_shared: PerModel[dict[tuple[int, bool], Memory]] = PerModel(dict)  # by size of the vocabulary and `is_exact`
_active: ContextVar[Memory | None] = ContextVar("memory", default=None)


def memory_for(model: Any, share: bool, is_exact: bool) -> Memory:
    """The active memory if there is one; else the one that calls of the model share, or an empty one.

    is_exact: as in `DraftRequest`. What exact calls learn depends on the free memory, with which the sizes of their
    blocks change, so that it must not reach calls whose text could follow. Raises ValueError when the active one
    belongs to another model.
    """
    active = _active.get()
    if active is not None:
        found = copy.copy(active)  # with the same tables, which `clear` replaces
        found.belong_to(model)
        active.identity = found.identity
        return found
    if not share:
        return Memory()
    num_tokens = num_tokens_of(model)
    shared = _shared.of(model)
    for key in [key for key in list(shared) if key[0] != num_tokens]:  # embeddings may be resized
        shared.pop(key, None)  # another thread may be here as well
    return shared.setdefault((num_tokens, is_exact), Memory())
