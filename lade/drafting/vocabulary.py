"""A row for every token from the start: what the model predicts after it with no text before it.

Such a row is a weak guess, used where a token has no better row. It contains nothing of any text, so all memories of a
model share it: it is computed once per model, and kept in the user's cache folder. On request there are rows of likely
pairs of tokens as well.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lade.block_size.tables import can_store
from lade.block_size.tables import folder as cache_folder
from lade.compat import num_tokens_of
from lade.drafting.array_file import read_arrays, write_arrays
from lade.drafting.coming_draws import TINY
from lade.drafting.likeliest import likeliest
from lade.drafting.top_k_table import KEY_SHIFT, ROW_LENGTH, Packed, PackedRow, grades_of, packed
from lade.state import PerModel, keeping_state

logger = logging.getLogger("lade")

MAX_BYTES = 8 * 2**20  # of the rows of a model's tokens
NUM_PAIRS = 2**15
MAX_BYTES_WITH_PAIRS = 2 * MAX_BYTES  # in a file; a pair takes 200 bytes at most
NUM_FOLLOWED = 3  # times that the rows are followed to find out which tokens are frequent
LEAST_LENGTH = 8  # ids of a row; if that is too much for all tokens, those with the largest ids have no row
BYTES_PER_ID = 4 + 2
# Floating-point operations up to which rows are computed without request, by kind of device: some tenths of a second.
CHEAP = {"cpu": 1e11, "cuda": 2e13}
MAX_TEMPERATURES = 2  # for which prepared rows are kept
AFFORDABLE = 100.0  # times as many on request
AFFORDABLE_PAIRS = 10.0  # with pairs, whose forwards take longer by two tokens than by their operations
MAX_LOGITS = 2**24  # of one forward
MAX_BATCH = 256  # tokens of one forward
NUM_SAMPLED = 64  # numbers of each parameter that identify a model


class RowsAlone(NamedTuple):
    """What a model says without any text before, at one temperature."""

    tokens: Packed  # [N, K], of the tokens 0, 1, ..
    pairs: Packed  # [P, K]
    places: dict[int, int]  # of the rows of pairs, by the pair as one integer

    def after_pair(self, key: int) -> PackedRow | None:
        place = self.places.get(key)
        return None if place is None else self.pairs[place]


NO_ROWS = RowsAlone(np.zeros((0, 1), dtype=np.int32), np.zeros((0, 1), dtype=np.int32), {})


class Vocabulary:
    """Rows of the tokens 0, 1, .. and of pairs: ids, likeliest first, and log probabilities at temperature 1."""

    def __init__(
        self, ids: npt.NDArray[np.int32], logs: npt.NDArray[np.float16], pairs: npt.NDArray[np.int32] | None = None
    ) -> None:
        """ids, logs: [N + P, K], the rows of pairs last. pairs: [P, 2] ids.

        Raises ValueError if these cannot be such rows.
        """
        pairs = np.zeros((0, 2), dtype=np.int32) if pairs is None else pairs
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind != "i" or len(pairs) > len(ids):
            raise ValueError("its pairs of tokens have a wrong shape or type")
        is_shaped = ids.ndim == 2 and ids.shape == logs.shape and 0 < ids.shape[1] <= ROW_LENGTH
        if not is_shaped or ids.dtype.kind != "i" or logs.dtype.kind != "f":
            raise ValueError("its rows of tokens alone have a wrong shape or type")
        if ids.size and (min(ids.min(), pairs.min(initial=0)) < 0 or not np.isfinite(logs).all() or logs.max() > 0):
            raise ValueError("its rows of tokens alone hold values out of range")
        self.ids, self.logs, self.pairs = ids, logs, pairs
        self._places = {first << KEY_SHIFT | second: place for place, (first, second) in enumerate(pairs.tolist())}
        self._rows: dict[float, RowsAlone] = {}  # by temperature
        self.largest_id = int(max(ids.max(initial=-1), pairs.max(initial=-1)))

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> Vocabulary:
        """What `as_arrays` gave. Raises an exception for anything else."""
        return cls(arrays["vocabulary_ids"], arrays["vocabulary_logs"], arrays.get("vocabulary_pairs"))

    def at(self, temperature: float) -> RowsAlone:
        """All rows at a temperature."""
        rows = self._rows.get(temperature)
        if rows is None:
            with np.errstate(under="ignore"):  # even if numpy is set to raise
                weights = np.exp(self.logs.astype(np.float32))
                rest = np.maximum(0.0, 1.0 - weights.sum(1))
                if temperature != 1.0:  # no other token is likelier than the row's last one
                    rest = rest * weights[:, -1] ** (1 / temperature - 1)
                    weights = weights ** (1 / temperature)
                chances = weights / np.maximum(weights.sum(1) + rest, TINY)[:, None]
            if len(self._rows) >= MAX_TEMPERATURES:
                self._rows = {}
            every = packed(self.ids, grades_of(chances))
            num_tokens = len(every) - len(self.pairs)
            rows = self._rows[temperature] = RowsAlone(every[:num_tokens], every[num_tokens:], self._places)
        return rows

    def as_arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {"vocabulary_ids": self.ids, "vocabulary_logs": self.logs, "vocabulary_pairs": self.pairs}


def size_of_rows(num_tokens: int) -> tuple[int, int]:
    """How many rows there are for so many tokens, and how many ids each has, within MAX_BYTES."""
    length = min(ROW_LENGTH, num_tokens, max(LEAST_LENGTH, MAX_BYTES // (BYTES_PER_ID * num_tokens)))
    return min(num_tokens, MAX_BYTES // (BYTES_PER_ID * length)), length


def make_vocabulary(model: Any, pairs: bool = False) -> Vocabulary:
    """Run the model on each token alone: one text of one token, without BOS. pairs: on likely pairs of them as well."""
    num_rows, length = size_of_rows(num_tokens_of(model))
    ids, logs = _rows_after(model, np.arange(num_rows, dtype=np.int32)[:, None], length)
    if not pairs:
        return Vocabulary(ids, logs)
    likely = likely_pairs(ids, logs, NUM_PAIRS)
    more_ids, more_logs = _rows_after(model, likely, length)
    return Vocabulary(np.concatenate([ids, more_ids]), np.concatenate([logs, more_logs]), likely)


def _rows_after(model: Any, texts: npt.NDArray[np.int32], length: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """What the model predicts after some texts. texts: [N, n] ids. Returns ids and log probabilities, [N, length]."""
    num_tokens = num_tokens_of(model)
    batch = max(1, min(MAX_BATCH, MAX_LOGITS // num_tokens) // texts.shape[1])
    ids: list[npt.NDArray[Any]] = []
    logs: list[npt.NDArray[Any]] = []
    for start in range(0, len(texts), batch):
        tokens = torch.from_numpy(texts[start : start + batch]).to(model.device, torch.long)
        with torch.no_grad(), keeping_state(model):
            logits = model(input_ids=tokens, use_cache=False).logits[:, -1, :num_tokens]
        chances, found = likeliest(logits)
        ids.append(found[:, :length].cpu().numpy().astype(np.int32))
        logs.append(chances[:, :length].clamp(min=1e-7).log().clamp(max=0).cpu().numpy().astype(np.float16))
    return np.concatenate(ids), np.concatenate(logs)


def likely_pairs(ids: npt.NDArray[np.int32], logs: npt.NDArray[np.float16], count: int) -> npt.NDArray[np.int32]:
    """The pairs of tokens that texts are likeliest to have, by the rows of tokens alone. Returns at most [count, 2].

    How frequent a token is: where one comes from any token when the rows are followed NUM_FOLLOWED times.
    """
    chances = np.exp(logs.astype(np.float64))
    shares = np.ones(len(ids))
    for _ in range(NUM_FOLLOWED):
        following = np.bincount(ids.ravel(), (chances * shares[:, None]).ravel(), minlength=len(ids))[: len(ids)]
        shares = following / max(following.sum(), TINY)
    places = np.argsort(-chances * shares[:, None], axis=None, kind="stable")[:count]
    return np.stack([places // ids.shape[1], ids.ravel()[places]], axis=1).astype(np.int32)


def vocabulary_of(model: Any, may_make: bool, may_load: bool = True) -> Vocabulary | None:
    """The rows of a model: known to this process, stored by an earlier one, or computed now if that is cheap.

    may_make: whether the model may be run for them. may_load: whether what earlier processes have stored may decide.
    None if there are none.
    """
    slot = _slot_of(model)
    with slot.lock:
        if slot.vocabulary is None and may_make and not slot.is_settled:
            slot.is_settled = True
            slot.vocabulary = _load(model) if may_load else None
            if slot.vocabulary is None and _is_unseen(model) and _is_within(model, 1):
                slot.vocabulary = _make_quietly(model)
                if slot.vocabulary is not None:
                    _store(model, slot.vocabulary)
        return slot.vocabulary


def prepare_vocabulary(model: Any) -> bool:
    """Make and store a model's rows on request, if that takes at most tens of seconds. Returns whether it did."""
    pairs = _is_within(model, AFFORDABLE_PAIRS, 2 * NUM_PAIRS)
    vocabulary = _make_quietly(model, pairs) if pairs or _is_within(model, AFFORDABLE) else None
    if vocabulary is not None:
        keep_vocabulary(model, vocabulary)
    return vocabulary is not None


def keep_vocabulary(model: Any, vocabulary: Vocabulary) -> None:
    """Let all calls of a model use these rows, and later processes too."""
    slot = _slot_of(model)
    with slot.lock:
        slot.vocabulary, slot.is_settled = vocabulary, True
    _store(model, vocabulary)


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.vocabulary: Vocabulary | None = None
        self.is_settled = False  # whether it has been looked for


_known: PerModel[dict[int, _Slot]] = PerModel(dict)  # by tokens: embeddings may be resized


def _slot_of(model: Any) -> _Slot:
    return _known.of(model).setdefault(num_tokens_of(model), _Slot())


def _is_unseen(model: Any) -> bool:
    """Whether running the model calls no code of the user's."""
    for module in model.modules():
        if module.training or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
    return True


def _is_within(model: Any, factor: float, num_more: int = 0) -> bool:
    """Whether making the rows takes at most so many times what is cheap on the model's device.

    num_more: tokens that the model is run on besides those of the vocabulary.
    """
    num_rows, _ = size_of_rows(num_tokens_of(model))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 2 * num_parameters * (num_rows + num_more) <= factor * CHEAP.get(model.device.type, 0.0)


def _make_quietly(model: Any, pairs: bool = False) -> Vocabulary | None:
    with _quietly("no rows of tokens alone"):  # a model that needs more than ids may raise anything
        return make_vocabulary(model, pairs)
    return None


@contextmanager
def _quietly(failure: str) -> Iterator[None]:
    """Log errors instead of raising them: guessing works without these rows."""
    try:
        yield
    except Exception as error:
        logger.debug("%s: %s", failure, error)


def _file_of(model: Any) -> Path | None:
    """Where a model's rows are stored: named by some numbers of each parameter, and by what changes their rounding."""
    if not can_store():
        return None
    known = hashlib.sha256(f"{model.config.model_type} {model.dtype} {model.device.type}".encode())
    for name, parameter in model.named_parameters():
        numbers = parameter.detach().flatten()[:: max(1, parameter.numel() // NUM_SAMPLED)][:NUM_SAMPLED]
        known.update(f"{name} {tuple(parameter.shape)}".encode() + numbers.float().cpu().numpy().tobytes())
    path = cache_folder()
    return None if path is None else path / f"vocabulary-{known.hexdigest()[:32]}.npz"


def _load(model: Any) -> Vocabulary | None:
    with _quietly("the stored rows of tokens alone cannot be read"):  # whatever a damaged file may lead to
        path = _file_of(model)
        if path is not None and path.exists():
            vocabulary = Vocabulary.from_arrays(read_arrays(path, 0, 0, MAX_BYTES_WITH_PAIRS))
            return vocabulary if vocabulary.largest_id < num_tokens_of(model) else None
    return None


def _store(model: Any, vocabulary: Vocabulary) -> None:
    # A full disk, a folder that has gone, parameters without data.
    with _quietly("the rows of tokens alone cannot be stored"):
        path = _file_of(model)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(path, vocabulary.as_arrays())
