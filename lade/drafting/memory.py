"""What the tree drafter remembers across calls: likely next tokens, and how often such guesses were right."""

from __future__ import annotations

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
from lade.compat import num_tokens_of
from lade.config import current_config
from lade.drafting.acceptance import Acceptance
from lade.drafting.array_file import MAX_TEXTS
from lade.drafting.likeliest import most_likely
from lade.drafting.memory_file import Contents, read_memory, write_memory
from lade.drafting.nearest import BYTES_PER_RECORD, UNKNOWN, Context, NearestRows, projected, projection, uses_contexts
from lade.drafting.text_store import TextStore
from lade.drafting.top_k_table import BYTES_PER_ROW, KEY_SHIFT, Packed, TopKTable, packed, unpacked
from lade.drafting.vocabulary import Vocabulary, keep_vocabulary, make_vocabulary, vocabulary_of
from lade.state import PerModel, keeping_state
from lade.verification.draws import keeping_generators

MAX_BYTES = 64 * 2**20
MIN_BYTES = 64 * 2**10
MAX_LIKELY = 8  # tokens of a row that may be worth a row of their own
MAX_UNSEEN = 256  # tokens without a row that are remembered
WARM_TOKENS = 256  # of one forward; their logits are all needed at once
NUM_SIGNS = 256  # of the embedding, which identify a model
MAX_FOREIGN_SIGNS = 0.2  # fine-tuning changes few of them; between unrelated models half of them differ


class Memory:
    """Rows of likely next tokens by the last token, the last two and context; the learned chances of such guesses.

    It belongs to one model, the first that uses it. Inside `with memory.active():` the calls of this thread use it
    instead of the one that all calls of the model share:

        memory = lade.Memory(path="alice.npz")    # loaded where the file is there
        with memory.active():
            model.generate(...)
        memory.save()

    In float32 and float64 a memory changes only the speed of a call, not its result. In half precision it can change
    the text where two tokens nearly tie (docs/compatibility.md, "What differs").
    """

    def __init__(self, max_bytes: int = MAX_BYTES, path: str | Path | None = None, texts: int = 0) -> None:
        """max_bytes: about how much the tables may take. path: the file that save() writes, loaded if it exists.
        texts: how many tokens of generated texts (each with the end of its prompt), and of texts given to `warm`, are
        also kept verbatim; 24 to 32 bytes each. 0: none.

        Of a file with more rows than fit the latest are loaded. Raises ValueError for too few bytes, or a file that is
        not a memory or far too large for max_bytes; the file is left unchanged.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes must be an integer of at least {MIN_BYTES}, got {max_bytes!r}")
        if isinstance(texts, bool) or not isinstance(texts, int) or not 0 <= texts <= MAX_TEXTS:
            raise ValueError(f"texts must be an integer from 0 to {MAX_TEXTS}, got {texts!r}")
        capacity = max_bytes // (4 * BYTES_PER_ROW)
        self.path = None if path is None else Path(path)
        self.singles, self.pairs = TopKTable(capacity), TopKTable(capacity)
        self.nearest = NearestRows(max_bytes // (2 * BYTES_PER_RECORD))
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
        return len(self.singles) + len(self.pairs) + len(self.nearest)

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
        self.nearest.clear()
        self.unseen.clear()
        if self.texts is not None:
            self.texts.clear()
        self.acceptance = {flag: Acceptance(flag) for flag in (False, True)}
        self.identity, self.step_costs, self._model, self.vocabulary = None, {}, None, None

    def belong_to(self, model: Any) -> None:
        """Raises ValueError when this memory is of another model or vocabulary."""
        identity = identity_of(model)
        difference = None if self.identity is None else _difference(self.identity, identity)
        if difference:
            raise ValueError(
                f"the memory{f' in {self.path}' if self.path else ''} belongs to another model: {difference}"
            )
        self.identity, self._model = self.identity or identity, weakref.ref(model)

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
            with keeping_generators(model), keeping_state(model):
                self._warm_on(model, ids)
            if self.texts is not None:
                self.texts.add(ids)

    def warm_vocabulary(self, model: Any, pairs: bool = False) -> None:
        """Learn what the model predicts after each token alone, so that there are guesses from the first step on.

        pairs: also after the 32,768 pairs of tokens that it is likeliest to say, which costs as much as a vocabulary of
        65,536 tokens. Costs about 2 * parameters * vocabulary floating-point operations, once per model. The rows serve
        all memories of the model, contain nothing of any text, take at most 8 MiB, with pairs 16 MiB, in addition to
        `max_bytes`, and are kept in the cache folder and by `save()`.
        """
        self.belong_to(model)
        self.vocabulary = make_vocabulary(model, pairs)
        keep_vocabulary(model, self.vocabulary)

    def learn(self, previous: list[int], tokens: list[int], rows: Packed, num_likely: int) -> None:
        """Remember what the model predicted after some tokens; later rows replace earlier ones.

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

    def learn_text(
        self, before: int, ids: list[int], rows: Packed, projections: npt.NDArray[np.float32] | None
    ) -> Context | None:
        """Remember what the model predicted behind each token of a text. Returns the context behind the last one.

        before: the id before them, -1 for none. rows: [M, ROW_LENGTH], as `packed` makes them. projections: of the same
        logits, [M, CONTEXT_SIZE]; None where there are no rows by context. Then, and as long as no context is known,
        None is returned.
        """
        previous = [before, *ids[:-1]]
        self.learn(previous, ids, rows, len(ids))
        after = None if projections is None else self.nearest.contexts(projections)
        if after is None:
            return None
        self.nearest.put(previous, ids, rows, np.concatenate([UNKNOWN[None], after[:-1]]), after)
        return after[-1]

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
        contents = Contents(
            identity=self.identity,
            step_costs=self.step_costs if model is None else self.step_costs | saved_costs(model),
            singles=self.singles.as_arrays(),
            pairs=self.pairs.as_arrays(),
            nearest=self.nearest.as_arrays(),
            counts={flag: acceptance.as_array() for flag, acceptance in self.acceptance.items()},
            texts=self.texts.as_array() if texts and self.texts is not None else None,
            vocabulary=self.vocabulary or (None if model is None else vocabulary_of(model, may_make=False)),
        )
        write_memory(target, contents)

    def _load(self, path: Path, max_bytes: int) -> None:
        max_texts = 0 if self.texts is None else self.texts.max_tokens
        found = read_memory(path, max_bytes, self.pairs.capacity, max_texts)
        self.identity, self.step_costs, self.vocabulary = found.identity, found.step_costs, found.vocabulary
        if self.texts is not None and found.texts is not None:
            self.texts.restore(found.texts)
        for table, (keys, ids, grades) in ((self.singles, found.singles), (self.pairs, found.pairs)):
            table.put(keys.tolist(), packed(ids, grades))
        if found.nearest is not None:
            self.nearest.restore(found.nearest)
        for flag, (trials, hits) in found.counts.items():
            self.acceptance[flag].restore(trials.tolist(), hits.tolist())

    def _warm_on(self, model: Any, ids: list[int]) -> None:
        num_tokens = num_tokens_of(model)
        for start in range(0, len(ids), WARM_TOKENS):
            chunk = ids[start : start + WARM_TOKENS]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([chunk], device=model.device), use_cache=False).logits[
                    0, :, :num_tokens
                ]
            projections = None
            if uses_contexts(model, current_config()):
                projections = projected(logits, projection(logits.device)).cpu().numpy()
            self.learn_text(ids[start - 1] if start else -1, chunk, packed(*most_likely(logits)), projections)


def identity_of(model: Any) -> dict[str, Any]:
    """What identifies a model in any dtype: type, sizes, and signs of its embedding if they can be read."""
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
    """What tells two models apart, as a sentence; None when they are the same one, or fine-tuned from each other."""
    for name in ("model_type", "vocab_size", "hidden_size"):
        if mine[name] != other[name]:
            return f"{name} is {other[name]!r}, not {mine[name]!r}"
    pairs = list(zip(mine["signs"], other["signs"], strict=False))
    if sum(a != b for a, b in pairs) > MAX_FOREIGN_SIGNS * len(pairs):
        return "the token embeddings differ"
    return None


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
    num_tokens = num_tokens_of(model)
    shared = _shared.of(model)
    for key in [key for key in shared if key[0] != num_tokens]:  # embeddings may be resized
        del shared[key]
    if (num_tokens, cost_source) not in shared:
        shared[num_tokens, cost_source] = Memory()
    return shared[num_tokens, cost_source]
