"""Arrays in a file: written atomically, and read without trusting the sizes that the file states."""

from __future__ import annotations

import os
import secrets
import stat
import zipfile
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_UNPACKED = 8  # times max_bytes that a file may unpack to; reading it takes time, even where little of it is kept
TEXTS = "texts"  # an array of tokens, which has a limit of its own
WHOLE = "vocabulary_"  # arrays that are of no use in part
MAX_TEXTS = 10_000_000  # tokens
MAX_TEXT_BYTES = 4 * MAX_TEXTS + 4096
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # np.savez's and np.savez_compressed's
HEADER_VERSION = (1, 0)  # what numpy writes for arrays without names of their own

Arrays = dict[str, npt.NDArray[Any]]


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write an .npz file atomically. An existing file keeps its mode, a new one gets the umask's."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))  # before there is anything to read in it
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what was written does
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_arrays(path: Path, max_bytes: int, max_rows: int, max_whole: int = 0, max_texts: int = 0) -> Arrays:
    """The arrays of an .npz file by name, of longer ones the last `max_rows` rows; of TEXTS so many tokens.

    max_whole: bytes that those whose name begins with WHOLE, which are read as they are, may take together.
    Raises an exception for any other file, and ValueError before anything is unpacked when the file unpacks to more
    than MAX_UNPACKED * max_bytes, or what is to be kept of it takes more than max_bytes.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        texts = sum(entry.file_size for entry in entries if entry.filename == f"{TEXTS}.npy")
        if texts > MAX_TEXT_BYTES:
            raise ValueError(f"its texts unpack to {texts} bytes, which is more than {MAX_TEXT_BYTES}")
        unpacked = sum(entry.file_size for entry in entries if not entry.filename.startswith(WHOLE)) - texts
        if unpacked > MAX_UNPACKED * max_bytes:
            raise ValueError(f"it unpacks to {unpacked} bytes, which is too much for max_bytes={max_bytes}")
        found, kept, whole = {}, 0, 0
        for entry in entries:
            if entry.compress_type not in COMPRESSIONS:
                raise ValueError(f"{entry.filename} is compressed in a way that numpy does not write")
            with archive.open(entry) as file:
                shape, dtype = _read_header(file, entry)
                is_whole, is_texts = entry.filename.startswith(WHOLE), entry.filename == f"{TEXTS}.npy"
                skipped = max(0, shape[0] - (max_texts if is_texts else max_rows)) if shape and not is_whole else 0
                row_bytes = prod(shape[1:]) * dtype.itemsize
                size = entry.file_size - file.tell() - skipped * row_bytes
                if is_whole:
                    whole += size
                elif not is_texts:
                    kept += size
                if kept > max_bytes:
                    raise ValueError(f"its arrays take more than max_bytes={max_bytes}")
                if whole > max_whole:
                    raise ValueError(f"its rows of tokens alone take more than {max_whole} bytes")
                file.seek(skipped * row_bytes, os.SEEK_CUR)
                array = np.frombuffer(file.read(size), dtype)
            kept_shape = (shape[0] - skipped, *shape[1:]) if shape else ()
            found[entry.filename.removesuffix(".npy")] = array.reshape(kept_shape)
        return found


def _read_header(file: Any, entry: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array, which have to account for every byte of the file's entry."""
    if np.lib.format.read_magic(file) != HEADER_VERSION:
        raise ValueError(f"{entry.filename} is of another version of numpy's format")
    shape, is_fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    is_whole = file.tell() + prod(shape) * dtype.itemsize == entry.file_size
    if is_fortran_order or not is_whole or min(shape, default=0) < 0:
        raise ValueError(f"{entry.filename} does not hold the array that its header speaks of")
    return shape, dtype
