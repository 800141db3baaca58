"""What the tree drafter remembers across calls: likely next tokens, and how often such guesses were right."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lade.block_size.costs import SavedCosts, saved_costs
from lade.drafting.acceptance import FIRST_NUM_KINDS, NUM_KINDS, Acceptance
from lade.drafting.likeliest import most_likely
from lade.drafting.memory_file import MAX_TEXTS, TEXTS, read_arrays, write_arrays
from lade.drafting.suffix_index import END
from lade.drafting.text_store import TextStore
from lade.drafting.top_k_table import BIN_EDGES, BYTES_PER_ROW, ROW_LENGTH, Packed, TopKTable, packed, unpacked
from lade.drafting.vocabulary import MAX_BYTES as VOCABULARY_BYTES
from lade.drafting.vocabulary import Vocabulary, keep_vocabulary, make_vocabulary, num_tokens_of, vocabulary_of
from lade.state import PerModel

MAX_BYTES = 16 * 2**20
MIN_BYTES = 64 * 2**10
MAX_LIKELY = 8  # tokens of a row that may be worth a row of their own
MAX_UNSEEN = 256  # tokens without a row that are remembered
KEY_SHIFT = 32  # a pair of tokens as one integer
FORMAT = 3  # of the file; 2 had rows of 8 and fewer kinds of guesses, 1 chances without the draws of sampling
READABLE_FORMATS = (2, 3)
WARM_TOKENS = 256  # of one forward; their logits are all needed at once
NUM_SIGNS = 256  # of the embedding, by which a model is known again
MAX_FOREIGN_SIGNS = 0.2  # fine-tuning changes few of them, and half of them differ between strangers

IDENTITY = {"model_type": str, "vocab_size": int, "hidden_size": int, "signs": str}


class Memory:
    """Rows of likely next tokens by the last token and by the last two, with the learned chances of such guesses.

    It belongs to one model, the first that uses it. Inside `with memory.active():` the calls of this thread use it
    instead of the one that all calls of the model share:

        memory = lade.Memory(path="alice.npz")    # loaded where the file is there
        with memory.active():
            model.generate(...)
        memory.save()

    What is remembered never changes what a call returns, only how fast it does.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, path: str | Path | None = None, texts: int = 0) -> None:
        """max_bytes: about how much the tables may take. path: where save() writes, and what is loaded if it exists.
        texts: how many tokens of what calls have generated (each with the end of its prompt), and of what `warm` was
        given, to keep as they are, besides; 24 to 32 bytes each. 0: none.

        Of a file with more rows than fit the latest are loaded. Raises ValueError for too few bytes, or a file that is
        not a memory or far too large for max_bytes; the file is left as it is.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes must be an integer of at least {MIN_BYTES}, got {max_bytes!r}")
        if isinstance(texts, bool) or not isinstance(texts, int) or not 0 <= texts <= MAX_TEXTS:
            raise ValueError(f"texts must be an integer from 0 to {MAX_TEXTS}, got {texts!r}")
        capacity = max_bytes // (2 * BYTES_PER_ROW)
        self.path = None if path is None else Path(path)
        self.singles, self.pairs = TopKTable(capacity), TopKTable(capacity)
        self.unseen: dict[int, None] = {}  # likely tokens without a row of their own, the latest last
        self.acceptance = {flag: Acceptance(flag) for flag in (False, True)}  # by whether tokens are sampled
        self.identity: dict[str, Any] | None = None  # of the model
        self.step_costs: SavedCosts = {}  # what steps of it cost, as the file said
        self._model: weakref.ref[Any] | None = None
        self.vocabulary: Vocabulary | None = None  # rows of tokens alone, of a file or made by `warm_vocabulary`
        self.texts = TextStore(texts) if texts else None
        if self.path is not None and self.path.exists():
            self._load(self.path, max_bytes)

    def __len__(self) -> int:
        """Rows."""
        return len(self.singles) + len(self.pairs)

    @contextmanager
    def active(self) -> Iterator[Memory]:
        """Let this thread's calls use this memory. A new thread begins without."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    def clear(self) -> None:
        """Forget everything, the model too."""
        self.singles.clear()
        self.pairs.clear()
        self.unseen.clear()
        if self.texts is not None:
            self.texts.clear()
        self.acceptance = {flag: Acceptance(flag) for flag in (False, True)}
        self.identity, self.step_costs, self._model, self.vocabulary = None, {}, None, None

    def belong_to(self, model: Any) -> None:
        """Raises ValueError when this memory is of another model or vocabulary."""
        identity = identity_of(model)
        self._model = weakref.ref(model)
        if self.identity is None:
            self.identity = identity
        difference = _difference(self.identity, identity)
        if difference:
            raise ValueError(
                f"the memory{f' in {self.path}' if self.path else ''} belongs to another model: {difference}"
            )

    def warm(
        self, model: Any, texts: str | Path | Sequence[str | Sequence[int] | Tensor], tokenizer: Any = None
    ) -> None:
        """Learn from texts as if the model had been asked about them: one forward over each, no generation.

        texts: a text file, or texts as strings or ids. tokenizer: needed for strings and files.
        """
        self.belong_to(model)
        if isinstance(texts, (str, Path)):
            texts = [Path(texts).read_text(encoding="utf-8")]
        if not isinstance(texts, (list, tuple)) or any(isinstance(text, int) for text in texts):
            raise ValueError(f"texts must be a file, or a list of texts as strings or ids, got {texts!r:.80}")
        for text in texts:
            if isinstance(text, str):
                if tokenizer is None:
                    raise ValueError("tokenizer must be given where texts are strings, got None")
                text = tokenizer(text)["input_ids"]
            ids = torch.as_tensor(text).flatten().tolist()
            self._warm_on(model, ids)
            if self.texts is not None:
                self.texts.add(ids)

    def warm_vocabulary(self, model: Any) -> None:
        """Learn what the model puts behind each token alone, so that there are guesses from the first step on.

        Costs about 2 * parameters * vocabulary floating-point operations, once per model: what is found serves all
        memories of the model, holds nothing of anybody's texts, takes at most 8 MiB beside `max_bytes`, and is kept in
        the cache folder and by `save()`.
        """
        self.belong_to(model)
        self.vocabulary = make_vocabulary(model)
        keep_vocabulary(model, self.vocabulary)

    def learn(self, previous: list[int], tokens: list[int], rows: Packed, num_likely: int) -> None:
        """Remember what the model put after some tokens, later ones counting more.

        previous, tokens: [M] the last two ids before each row. rows: [M, ROW_LENGTH], as `packed` makes them.
        num_likely: of how many rows, from the last, the tokens are worth knowing more about.
        """
        pairs = [before << KEY_SHIFT | token for before, token in zip(previous, tokens, strict=True)]
        self.pairs.put(pairs, rows)
        self.singles.put(tokens, rows)
        unseen, seen = self.unseen, self.singles.slots
        for token in tokens:
            unseen.pop(token, None)
        likely, _ = unpacked(rows[len(rows) - num_likely :, :MAX_LIKELY])
        for row in likely.tolist():
            for token in reversed(row):
                if token not in seen:
                    unseen.pop(token, None)
                    unseen[token] = None
        for token in list(unseen)[:-MAX_UNSEEN] if len(unseen) > MAX_UNSEEN else ():
            unseen.pop(token, None)

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
        target = target.resolve()  # a link stays one
        if not target.parent.is_dir():
            raise ValueError(f"path must be in a folder that exists, got {str(target)!r}")
        model = None if self._model is None else self._model()
        step_costs = self.step_costs if model is None else self.step_costs | saved_costs(model)
        header = {"format": FORMAT, "model": self.identity, "prices": step_costs}
        arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
        for name, table in (("singles", self.singles), ("pairs", self.pairs)):
            arrays |= {f"{name}_{key}": array for key, array in table.as_arrays().items()}
        for do_sample, acceptance in self.acceptance.items():
            arrays[f"chances_{int(do_sample)}"] = np.array([acceptance.trials, acceptance.hits])
        if texts and self.texts is not None:
            arrays[TEXTS] = self.texts.as_array()
        vocabulary = self.vocabulary or (None if model is None else vocabulary_of(model, may_make=False))
        write_arrays(target, arrays | ({} if vocabulary is None else vocabulary.as_arrays()))

    def _load(self, path: Path, max_bytes: int) -> None:
        try:
            max_texts = 0 if self.texts is None else self.texts.max_tokens
            arrays = read_arrays(path, max_bytes, self.pairs.capacity, VOCABULARY_BYTES, max_texts)
            header = json.loads(str(arrays["header"]))
            if header["format"] not in READABLE_FORMATS:
                raise ValueError(f"its format is {header['format']}, this version reads {FORMAT}")
            tables = {name: _rows_from(arrays, name) for name in ("singles", "pairs")}
            counts = {flag: _counts_from(arrays, flag) for flag in (False, True)}
            identity = header["model"]
            if identity is not None:
                identity = {name: kind(identity[name]) for name, kind in IDENTITY.items()}
            step_costs = {
                str(name): {str(int(size)): float(cost) for size, cost in seconds.items()}
                for name, seconds in header["prices"].items()
            }
            if not all(0 < cost < float("inf") for seconds in step_costs.values() for cost in seconds.values()):
                raise ValueError("its prices are out of range")
            vocab_size = identity["vocab_size"] if identity else 0
            if any(len(ids) and ids.max() >= vocab_size for _, ids, _ in tables.values()):
                raise ValueError("its tables hold ids beyond the vocabulary")
            texts = arrays.get(TEXTS, np.zeros(0, dtype=np.int32))
            if texts.ndim != 1 or texts.dtype.kind != "i":
                raise ValueError("its texts are not a list of ids")
            if len(texts) and not END <= texts.min() <= texts.max() < vocab_size:
                raise ValueError("its texts hold ids beyond the vocabulary")
            vocabulary = None
            if "vocabulary_ids" in arrays:
                vocabulary = Vocabulary(arrays["vocabulary_ids"], arrays["vocabulary_logs"])
                if vocabulary.largest_id >= vocab_size:
                    raise ValueError("its rows of tokens alone hold ids beyond the vocabulary")
        except Exception as error:  # whatever a damaged file may lead to
            raise ValueError(f"path must be a memory saved by lade, {path} is not: {error}") from error
        self.identity, self.step_costs, self.vocabulary = identity, step_costs, vocabulary
        if self.texts is not None:
            self.texts.restore(texts)
        for name, (keys, ids, bins) in tables.items():
            getattr(self, name).put(keys.tolist(), packed(ids, bins))
        for flag, (trials, hits) in counts.items():
            self.acceptance[flag].restore(trials.tolist(), hits.tolist())

    def _warm_on(self, model: Any, ids: list[int]) -> None:
        num_tokens = num_tokens_of(model)
        for start in range(0, len(ids), WARM_TOKENS):
            chunk = ids[start : start + WARM_TOKENS]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([chunk], device=model.device), use_cache=False).logits[
                    0, :, :num_tokens
                ]
            before = [ids[start - 1] if start else -1, *chunk[:-1]]
            self.learn(before, chunk, packed(*most_likely(logits)), len(chunk))


def identity_of(model: Any) -> dict[str, Any]:
    """By what a model is known again in any dtype: kind, size, and signs of its embedding where they can be read."""
    config = model.config.get_text_config()
    weight = model.get_input_embeddings().weight
    signs = ""
    if weight.is_floating_point() and weight.device.type != "meta" and weight.ndim == 2:
        rows = torch.linspace(0, len(weight) - 1, NUM_SIGNS, device=weight.device).long()
        columns = torch.arange(NUM_SIGNS, device=weight.device) % weight.shape[1]
        signs = "".join("01"[sign] for sign in (weight[rows, columns] < 0).tolist())
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "signs": signs,
    }


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """What tells two models apart, as a sentence; None when they are the same one, or fine-tuned from each other."""
    for name in ("model_type", "vocab_size", "hidden_size"):
        if mine[name] != other[name]:
            return f"{name} is {other[name]!r}, not {mine[name]!r}"
    pairs = list(zip(mine["signs"], other["signs"], strict=False))
    if sum(a != b for a, b in pairs) > MAX_FOREIGN_SIGNS * len(pairs):
        return "the token embeddings differ"
    return None


def _rows_from(arrays: dict[str, npt.NDArray[Any]], name: str) -> tuple[npt.NDArray[Any], ...]:
    """Keys, ids and bins of a table. Raises ValueError where they cannot be one."""
    keys, ids, bins = (arrays[f"{name}_{part}"] for part in ("keys", "ids", "bins"))
    is_table = keys.ndim == 1 and ids.ndim == 2 and len(ids) == len(keys) and bins.shape == ids.shape
    if not is_table or not 0 < ids.shape[1] <= ROW_LENGTH:
        raise ValueError(f"its table of {name} has a wrong shape")
    if any(array.dtype.kind != "i" for array in (keys, ids, bins)):
        raise ValueError(f"its table of {name} holds other things than integers")
    if len(keys) and (ids.min() < 0 or bins.min() < 0 or bins.max() > len(BIN_EDGES)):
        raise ValueError(f"its table of {name} holds values out of range")
    missing = ROW_LENGTH - ids.shape[1]  # rows of an earlier version are shorter
    if missing:
        ids = np.concatenate([ids, np.repeat(ids[:, :1], missing, axis=1)], axis=1)
        bins = np.concatenate([bins, np.zeros((len(keys), missing), dtype=bins.dtype)], axis=1)
    return keys, ids, bins


def _counts_from(arrays: dict[str, npt.NDArray[Any]], do_sample: bool) -> npt.NDArray[Any]:
    """Trials and hits [2, kinds], with the prior for kinds that came later. Raises ValueError for anything else."""
    counts, prior = arrays[f"chances_{int(do_sample)}"], Acceptance(do_sample)
    is_known = counts.ndim == 2 and len(counts) == 2 and FIRST_NUM_KINDS <= counts.shape[1] <= NUM_KINDS
    if not is_known or not np.isfinite(counts).all():
        raise ValueError("its learned chances are not of this version")
    trials, hits = counts
    if (trials <= 0).any() or (hits < 0).any() or (hits > trials + 1).any():
        raise ValueError("its learned chances are out of range")
    return np.concatenate([counts, np.array([prior.trials, prior.hits])[:, counts.shape[1] :]], axis=1)


_shared: PerModel[dict[tuple[int, str], Memory]] = PerModel(dict)  # by size of the vocabulary and source of step costs
_active: ContextVar[Memory | None] = ContextVar("memory", default=None)


def memory_for(model: Any, share: bool, cost_source: str) -> Memory:
    """The active memory if there is one; else the one that calls of the model share, or an empty one.

    cost_source: as in `DraftRequest`. What was learned in blocks whose sizes followed a clock depends on it, so that it
    must not reach calls whose text could follow. Raises ValueError when the active one belongs to another model.
    """
    active = _active.get()
    if active is not None:
        active.belong_to(model)
        return active
    if not share:
        return Memory()
    vocab_size = model.config.get_text_config().vocab_size
    shared = _shared.of(model)
    for key in [key for key in shared if key[0] != vocab_size]:  # embeddings may be resized
        del shared[key]
    return shared.setdefault((vocab_size, cost_source), Memory())
