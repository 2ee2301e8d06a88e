"""What this machine offers: processors that we may use, memory that is free, CPU features. Read from the system."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "i8mm")


@dataclass(frozen=True)
class Hardware:
    cpu: str
    threads: int
    """Processors that this process may run on, at most the cores of a container's quota."""
    features: tuple[str, ...]
    memory_bytes: int
    free_memory_bytes: int


def detect(root: Path = Path("/")) -> Hardware:
    """Looks at /proc and /sys below `root`; what a system does not say is empty or 0."""
    cpuinfo = _read(root / "proc/cpuinfo")
    fields = dict(_colon_pair(line) for line in reversed(cpuinfo.splitlines()) if ":" in line)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    memory = dict(_colon_pair(line) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (_kib(memory.get(name, "0 kB")) for name in ("MemTotal", "MemAvailable"))
    limit, used = (_number(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    return Hardware(
        cpu=fields.get("model name") or platform.processor() or platform.machine(),
        threads=_threads(root),
        features=tuple(name for name in FEATURES if name in flags),
        memory_bytes=min(total, limit) if limit else total,
        free_memory_bytes=min(free, max(limit - used, 0)) if limit else free,
    )


def _threads(root: Path) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if quota.strip().isdigit() and period.strip().isdigit():
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system, or a container that hides it
        return ""


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0


def _colon_pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _kib(value: str) -> int:
    number = value.split()[0] if value.split() else "0"
    return int(number) * 1024 if number.isdigit() else 0


def measure_read_bandwidth(threads: int, bytes_a_thread: int = 1 << 28, repeats: int = 5) -> float:
    """Bytes a second that `threads` threads read together from memory too large for the caches; the best of `repeats`.

    This bounds decoding: every token reads all weights and its KV rows once.
    """
    from concurrent.futures import ThreadPoolExecutor
    from time import perf_counter

    import numpy as np

    parts = [np.ones(bytes_a_thread // 8, dtype=np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(repeats):
            began = perf_counter()
            list(pool.map(np.max, parts))  # vectorised, lets other threads run, and faster than memory
            seconds.append(perf_counter() - began)
    return threads * bytes_a_thread / min(seconds)
