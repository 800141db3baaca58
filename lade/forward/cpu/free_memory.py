"""The memory that this process can still allocate: the machine's, and the limits of its control groups (cgroups v1, v2)
and of its address space (`ulimit -v`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Of a control group: the folder, the names of limit and usage, and the field of reclaimable bytes in memory.stat.
VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping or exceeding a limit; None if unknown (not Linux).

    root: the root of the file system, for tests.
    """
    available = field(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    limits = [*left_in_groups(root), *left_in_address_space(root)]
    return max(0, min([available * 1024, *limits]))  # given in kB, which means KiB


def left_in_address_space(root: Path) -> Iterator[int]:
    """The bytes that the process may still map, if that is limited."""
    import resource  # not on every system

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    size = field(root / "proc/self/status", "VmSize:")
    if limit != resource.RLIM_INFINITY and size is not None:
        yield limit - size * 1024


def left_in_groups(root: Path) -> Iterator[int]:
    """The bytes left in each control group of the process with a limit, its parents included."""
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_name, usage_name, reclaimable = VERSION_1 if controllers else VERSION_2
        top, group = root / mount, root / mount / path.strip("/")
        folders = (group, *group.parents)
        # In a container the path is often the host's; only the topmost group is visible, the container's own.
        for folder in folders[: folders.index(top) + 1]:
            limit, usage = number(folder / limit_name), number(folder / usage_name)
            if limit is not None and usage is not None:
                yield limit - usage + (field(folder / "memory.stat", reclaimable) or 0)


def number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or contains "max"."""
    return next((int(line) for line in lines_of(path) if line.isdecimal()), None)


def field(path: Path, name: str) -> int | None:
    """The number after a name in a file of lines "name number"; None if missing."""
    return next((int(line.split()[1]) for line in lines_of(path) if line.split()[:1] == [name]), None)


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
