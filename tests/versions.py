"""The suite's core on other versions of transformers, each in a virtual environment of its own.

    python tests/versions.py                  # 5.8, 5.12, 5.18, and the newest release if it is not the pinned one
    python tests/versions.py 5.8 5.20.1       # these
    python tests/versions.py --newest         # the newest release; nothing where that is the pinned one

Everything else is as requirements.txt has it, except what a version of transformers wants otherwise (5.8:
huggingface_hub 1, tokenizers 0.22), which is left to pip. Prints one line for each version; ends with 1 where the tests
of one have failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
OLDER = ("5.8", "5.12", "5.18")
# Exactness, the contract with generate(), and the names that lade uses: a few minutes on one core.
CORE = ("compat", "augment", "kv_cache", "exactness", "contract", "fuzz", "reasons", "recurrent")
LEFT_TO_PIP = ("transformers", "tokenizers", "-e")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of transformers; 5.8 means the last 5.8.x")
    parser.add_argument("--newest", action="store_true", help="the newest release alone, if it is not the pinned one")
    parser.add_argument("--folder", type=Path, help="keep the environments here, and use those that are there")
    options = parser.parse_args()
    if options.newest and options.versions:
        parser.error("--newest takes no versions")
    versions = options.versions or ([] if options.newest else [*OLDER])
    if not options.versions:
        newest = newer_release()
        versions += [newest] if newest else []
    if not versions:
        print("no release of transformers is newer than the pinned one")
    with tempfile.TemporaryDirectory() as folder:
        results = {version: outcome(version, options.folder or Path(folder)) for version in versions}
    for version, (is_passed, last_line) in results.items():
        print(f"transformers {version}: {'passed' if is_passed else 'FAILED'} ({last_line})")
    return int(not all(is_passed for is_passed, _ in results.values()))


def requirements() -> list[str]:
    """The lines of requirements.txt, torch first, and of the tests' own."""
    paths = (ROOT / "requirements.txt", ROOT / "tests" / "requirements.txt")
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "-r"))]


def newer_release() -> str | None:
    """The newest release of transformers, where pip finds one that is not the pinned one."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    newest = re.match(r"transformers \(([\w.]+)\)", found)
    return newest[1] if newest and f"transformers=={newest[1]}" not in requirements() else None


def outcome(version: str, folder: Path) -> tuple[bool, str]:
    """Whether the core passes, and the last line that was printed."""
    place = folder / version
    python = str(place / "bin" / "python")
    if not place.exists():
        venv.create(place, with_pip=True)
        exact = version if version.count(".") > 1 else f"{version}.*"
        others = [line for line in requirements() if not line.startswith((*LEFT_TO_PIP, "torch"))]
        torch = next(line for line in requirements() if line.startswith("torch=="))
        for wanted in ([torch], [f"transformers=={exact}", *others]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/test_{name}.py" for name in CORE)]
    tests = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert tests.stdout is not None
    last_line = "no output"
    for line in tests.stdout:
        print(line, end="", flush=True)
        last_line = line.strip() or last_line
    return tests.wait() == 0, last_line


if __name__ == "__main__":
    sys.exit(main())
