"""How much memory this process can still take: what the machine has left, and what each control group around the process allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Of a control group: the folder of its files, its limit, what it uses, and what of that the kernel would give back.
VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping and without passing a limit; None where the system does not say (not Linux).

    root: where the system's files lie.
    """
    available = fields(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    return max(0, min([available * 1024, *left_in_groups(root)]))  # it says kB and means KiB


def left_in_groups(root: Path) -> Iterator[int]:
    """What each control group that has a limit leaves, those around it included."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_name, usage_name, reclaimable = VERSION_1 if controllers else VERSION_2
        folder = root / mount / path.strip("/")
        # In a container the path is often the host's, and only the group at the top is to be seen: it is the container's own.
        while True:
            limit, usage = number(folder / limit_name), number(folder / usage_name)
            if limit is not None and usage is not None:
                yield limit - usage + (fields(folder / "memory.stat", reclaimable) or 0)
            if folder == root / mount:
                break
            folder = folder.parent


def number(path: Path) -> int | None:
    """What a file of one number says; None where it is not there, or says "max"."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def fields(path: Path, name: str) -> int | None:
    """The number behind a name in a file of such lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
