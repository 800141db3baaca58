"""`lade env`: versions, devices and settings as plain text. Reads transformers' source; importing it is slow."""

from __future__ import annotations

import ast
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import lade
from lade.commands.model import Parser
from lade.common.version import TESTED, is_newer_than_tested, version_problem
from lade.config import SETTINGS
from lade.forward.cpu.free_memory import free_bytes
from lade.switch import apply_environment, current_config

PACKAGES = ("torch", "transformers", "accelerate", "numpy", "triton", "flash-attn", "kernels", "bitsandbytes")
VARIABLES = (
    "DIST_WORKERS",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "TRITON_INTERPRET",
)
# The methods of transformers' GenerationMixin that augment_all() replaces.
PATCHED_METHODS = ("generate", "_sample", "_beam_search", "_assisted_decoding", "init_continuous_batching")


def main(arguments: list[str]) -> int:
    """Print the report."""
    Parser("lade env", "Versions, devices and settings, to paste in a bug report.").parse_args(arguments)
    sys.stdout.write(report())
    return 0


def report() -> str:
    """The text of `lade env`. It describes this process, so a program can call it too."""
    sections = {
        "lade": lade_lines(),
        "packages": package_lines(),
        "devices": device_lines(),
        "patch": patch_lines(),
        "environment": environment_lines(),
    }
    return "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def lade_lines() -> Iterable[str]:
    from lade.common.cache_folder import folder, stored_files

    yield f"version: {lade.__version__}"
    yield f"python: {platform.python_version()} ({platform.python_implementation()}), {platform.platform()}"
    try:
        apply_environment()
    except ValueError as error:
        yield f"WRONG: {error}"
    config = current_config()
    for_processes = ("DIST_WORKERS", "backend") if config.dist_workers is None else ()
    settings = {name: getattr(config, field.name) for name, field in SETTINGS.items() if name not in for_processes}
    yield "settings: " + ", ".join(f"{name}={public(value)}" for name, value in settings.items())
    yield f"packed weights: {packing_line()}"
    if can_store(folder()):
        yield f"step costs: {len(stored_files())} tables in {folder()}"
    else:
        yield "step costs: none can be stored, assumed ones are used"


def can_store(path: Path | None) -> bool:
    """Whether a file stored now in the folder will be found by the next process."""
    if path is None:
        return False
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def public(value: object) -> object:
    """The value as `config_lade` takes it."""
    return "auto" if value is None else int(value) if isinstance(value, bool) else value


def packing_line() -> str:
    """Packed weights on a CPU: by which library, free memory, and the weights packed in this process."""
    import torch

    from lade.common.processor import packing_is_needless
    from lade.forward.cpu.fp16_weights import DTYPES, packs_fp16

    needless = [f"; {reason}" for dtype in DTYPES if (reason := packing_is_needless(dtype))]
    by_fbgemm = [str(dtype).removeprefix("torch.") for dtype in DTYPES if packs_fp16(dtype)]
    free, packed = free_bytes(), sys.modules.get("lade.forward.cpu.packed")
    held = packed.held_bytes() if packed else (0, 0)
    return (
        f"{', '.join(by_fbgemm) or 'nothing'} by FBGEMM in float16, "
        f"oneDNN {'is' if torch.backends.mkldnn.is_available() else 'is not'} in this build of torch, "
        f"{'unknown' if free is None else f'{free >> 20} MiB'} free, "
        f"{held[0]} weights packed in this process ({held[1] >> 20} MiB){''.join(needless)}"
    )


def package_lines() -> Iterable[str]:
    for name in PACKAGES:
        yield f"{name}: {installed_version(name) or 'not installed'}"


def device_lines() -> Iterable[str]:
    import torch

    from lade.common.cache_folder import cpu_name
    from lade.common.processor import has_fast_products
    from lade.forward.cuda.proof import is_proven

    capability = torch.backends.cpu.get_cpu_capability() + " with bfloat16" * has_fast_products(torch.bfloat16)
    yield f"cpu: {cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability}"
    yield f"cuda: {torch.version.cuda or torch.version.hip or 'not in this build of torch'}, {torch.cuda.device_count()} devices"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        used = [name for name in ("graph", "kernel") if is_proven(torch.device("cuda", index), name)]
        yield (
            f"cuda:{index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, compute capability "
            f"{found.major}.{found.minor}; used by default (docs/gpu.md): {', '.join(used) or 'neither graph nor kernel'}"
        )
    yield f"mps: {'available' if torch.backends.mps.is_available() else 'not available'}"
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    yield f"nccl: {'available' if has_nccl else 'not available'}"


def patch_lines() -> Iterable[str]:
    """Compatibility with the installed transformers, by its source, and the state of the patch in this process."""
    version = installed_version("transformers")
    if version is None:
        yield "transformers is not installed"
        return
    fits = (
        f"newer than lade was tested with ({TESTED})"
        if is_newer_than_tested(version)
        else "a version that lade was made for"
    )
    yield version_problem(version) or f"transformers {version} is {fits}"
    missing = sorted(set(PATCHED_METHODS) - methods_of_generation_mixin())
    names = ", ".join(f"GenerationMixin.{name}" for name in PATCHED_METHODS)
    yield f"augment_all() replaces {names}: " + (f"MISSING {', '.join(missing)}" if missing else "all there")
    augment = sys.modules.get("lade.augment")
    yield f"patched in this process: {'yes' if augment and augment._originals else 'no'}"


def environment_lines() -> Iterable[str]:
    names = ["USE_LADE", *sorted(name for name in os.environ if name.startswith(("LADE_", "LOAD_LADE"))), *VARIABLES]
    for name in names:
        yield f"{name}={os.environ[name]}" if name in os.environ else f"{name} is not set"


def methods_of_generation_mixin() -> set[str]:
    """Names of its own methods and of those from continuous batching."""
    spec, found = importlib.util.find_spec("transformers"), set()
    for place in (spec and spec.submodule_search_locations) or ():
        for path in ("utils.py", "continuous_batching/continuous_api.py"):
            source = Path(place, "generation", path)
            for node in ast.parse(source.read_text(encoding="utf-8")).body if source.exists() else ():
                if isinstance(node, ast.ClassDef) and node.name in ("GenerationMixin", "ContinuousMixin"):
                    found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
