"""The file of a memory: its contents, and their validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.block_size.costs import SavedCosts
from lade.drafting.acceptance import FIRST_NUM_KINDS, NUM_KINDS, Acceptance
from lade.drafting.array_file import TEXTS, Arrays, read_arrays, write_arrays
from lade.drafting.nearest import CONTEXT_SIZE, LARGEST_LOGIT, NUM_COLUMNS, NearestArrays
from lade.drafting.suffix_index import END
from lade.drafting.top_k_table import BIN_MIDDLES, GRADE_EDGES, NUM_BINS, ROW_LENGTH, TableArrays, grades_of
from lade.drafting.vocabulary import MAX_BYTES_WITH_PAIRS, Vocabulary

# Format 3 had bins in place of grades, 2 rows of 8 and fewer kinds of guesses, 1 chances without the draws of sampling.
FORMAT = 4
READABLE_FORMATS = (2, 3, 4)
FIRST_WITH_GRADES = 4
LARGEST_CONTEXT = 1.01  # of a number of a context, which has length 1, rounded
LARGEST_CENTRE = 1.01 * NUM_COLUMNS * LARGEST_LOGIT
IDENTITY = {"model_type": str, "vocab_size": int, "hidden_size": int, "signs": str}


@dataclass(frozen=True, slots=True)
class Contents:
    """What is saved of a memory.

    identity: of its model, None if none has used it. step_costs: of that model. singles, pairs: the tables' rows.
    nearest: rows by context, None without. counts: by whether tokens are sampled, trials and hits of each kind of
    guess, [2, kinds]. texts: ids, END after each text; None if they are left out. vocabulary: the rows of tokens alone,
    None without.
    """

    identity: dict[str, Any] | None
    step_costs: SavedCosts
    singles: TableArrays
    pairs: TableArrays
    nearest: NearestArrays | None
    counts: dict[bool, npt.NDArray[Any]]
    texts: npt.NDArray[Any] | None
    vocabulary: Vocabulary | None


def write_memory(path: Path, contents: Contents) -> None:
    """Write a file atomically. An existing file keeps its mode."""
    header = {"format": FORMAT, "model": contents.identity, "prices": contents.step_costs}
    arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
    tables = {"singles": contents.singles, "pairs": contents.pairs}
    if contents.nearest is not None:
        parts = contents.nearest._asdict()
        tables["nearest"] = parts.pop("table")
        arrays |= {f"nearest_{part}": array for part, array in parts.items()}
    for name, table in tables.items():
        arrays |= {f"{name}_{part}": array for part, array in zip(TableArrays._fields, table, strict=True)}
    arrays |= {f"chances_{int(do_sample)}": counts for do_sample, counts in contents.counts.items()}
    if contents.texts is not None:
        arrays[TEXTS] = contents.texts
    if contents.vocabulary is not None:
        arrays |= contents.vocabulary.as_arrays()
    write_arrays(path, arrays)


def read_memory(path: Path, max_bytes: int, max_rows: int, max_texts: int) -> Contents:
    """Of a file with more rows or tokens of texts the last `max_rows` and `max_texts`.

    max_bytes: of the memory. Raises ValueError for a file that is not a memory, or far too large.
    """
    try:
        return _contents(read_arrays(path, max_bytes, max_rows, MAX_BYTES_WITH_PAIRS, max_texts))
    except Exception as error:  # whatever a damaged file may lead to
        raise ValueError(f"path must be a memory saved by lade, {path} is not: {error}") from error


def _contents(arrays: Arrays) -> Contents:
    """Raises an exception for anything but a memory's arrays."""
    header = json.loads(str(arrays["header"]))
    if header["format"] not in READABLE_FORMATS:
        raise ValueError(f"its format is {header['format']}, this version reads {READABLE_FORMATS}")
    identity = header["model"]
    if identity is not None:
        identity = {name: kind(identity[name]) for name, kind in IDENTITY.items()}
    vocab_size = identity["vocab_size"] if identity else 0
    if header["format"] < FIRST_WITH_GRADES:
        bins = {name.removesuffix("bins"): array for name, array in arrays.items() if name.endswith("_bins")}
        arrays = arrays | {f"{table}grades": _grades_in(array) for table, array in bins.items()}
    vocabulary = None
    if "vocabulary_ids" in arrays:
        vocabulary = Vocabulary.from_arrays(arrays)
        if vocabulary.largest_id >= vocab_size:
            raise ValueError("its rows of tokens alone hold ids beyond the vocabulary")
    return Contents(
        identity,
        _step_costs(header["prices"]),
        _table(arrays, "singles", vocab_size),
        _table(arrays, "pairs", vocab_size),
        _nearest(arrays, vocab_size),
        {do_sample: _counts(arrays, do_sample) for do_sample in (False, True)},
        _texts(arrays, vocab_size),
        vocabulary,
    )


def _step_costs(found: dict[Any, Any]) -> SavedCosts:
    step_costs = {
        str(name): {str(int(size)): float(cost) for size, cost in seconds.items()} for name, seconds in found.items()
    }
    if not all(0 < cost < float("inf") for seconds in step_costs.values() for cost in seconds.values()):
        raise ValueError("its prices are out of range")
    return step_costs


def _grades_in(bins: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """The grades in the middles of bins."""
    if bins.dtype.kind != "i" or ((bins < 0) | (bins >= NUM_BINS)).any():
        raise ValueError("its bins of probabilities are out of range")
    return grades_of(np.array(BIN_MIDDLES)).astype(np.int8)[bins]


def _table(arrays: Arrays, name: str, vocab_size: int) -> TableArrays:
    keys, ids, grades = (arrays[f"{name}_{part}"] for part in TableArrays._fields)
    is_table = keys.ndim == 1 and ids.ndim == 2 and len(ids) == len(keys) and grades.shape == ids.shape
    if not is_table or not 0 < ids.shape[1] <= ROW_LENGTH:
        raise ValueError(f"its table of {name} has a wrong shape")
    if any(array.dtype.kind != "i" for array in (keys, ids, grades)):
        raise ValueError(f"its table of {name} holds other things than integers")
    if len(keys) and (ids.min() < 0 or grades.min() < 0 or grades.max() > len(GRADE_EDGES)):
        raise ValueError(f"its table of {name} holds values out of range")
    if len(keys) and ids.max() >= vocab_size:
        raise ValueError(f"its table of {name} holds ids beyond the vocabulary")
    missing = ROW_LENGTH - ids.shape[1]  # rows of an earlier version are shorter
    if missing:
        ids = np.concatenate([ids, np.repeat(ids[:, :1], missing, axis=1)], axis=1)
        grades = np.concatenate([grades, np.zeros((len(grades), missing), dtype=grades.dtype)], axis=1)
    return TableArrays(keys, ids, grades)


def _nearest(arrays: Arrays, vocab_size: int) -> NearestArrays | None:
    if "nearest_keys" not in arrays:  # of an earlier version, or without any rows
        return None
    table = _table(arrays, "nearest", vocab_size)
    previous, before, after, centre = (arrays[f"nearest_{part}"] for part in NearestArrays._fields[1:])
    shapes = [array.shape for array in (previous, before, after, centre)]
    num_rows = len(table.keys)
    if shapes != [(num_rows,), (num_rows, CONTEXT_SIZE), (num_rows, CONTEXT_SIZE), (1, CONTEXT_SIZE)]:
        raise ValueError("its rows by context have a wrong shape")
    if previous.dtype.kind != "i" or any(array.dtype.kind != "f" for array in (before, after, centre)):
        raise ValueError("its rows by context have a wrong type")
    limits = (before, LARGEST_CONTEXT), (after, LARGEST_CONTEXT), (centre, LARGEST_CENTRE)
    if not all(np.abs(array).max(initial=0) < limit for array, limit in limits):  # NaN is not, either
        raise ValueError("its rows by context have numbers out of range")
    return NearestArrays(table, previous, *(array.astype(np.float32) for array, _ in limits))


def _counts(arrays: Arrays, do_sample: bool) -> npt.NDArray[Any]:
    """With the prior for kinds that came later."""
    counts, prior = arrays[f"chances_{int(do_sample)}"], Acceptance(do_sample).as_array()
    is_known = counts.ndim == 2 and len(counts) == 2 and FIRST_NUM_KINDS <= counts.shape[1] <= NUM_KINDS
    if not is_known or not np.isfinite(counts).all():
        raise ValueError("its learned chances are not of this version")
    trials, hits = counts
    if (trials <= 0).any() or (hits < 0).any() or (hits > trials + 1).any():
        raise ValueError("its learned chances are out of range")
    return np.concatenate([counts, prior[:, counts.shape[1] :]], axis=1)


def _texts(arrays: Arrays, vocab_size: int) -> npt.NDArray[Any] | None:
    texts = arrays.get(TEXTS)
    if texts is None:
        return None
    if texts.ndim != 1 or texts.dtype.kind != "i":
        raise ValueError("its texts are not a list of ids")
    if len(texts) and not END <= texts.min() <= texts.max() < vocab_size:
        raise ValueError("its texts hold ids beyond the vocabulary")
    return texts
