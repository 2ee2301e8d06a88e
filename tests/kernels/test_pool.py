"""The thread pool of the native kernels: everybody runs, barriers order memory, misuse ends the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

native = pytest.importorskip("heedful._native")


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_regions_and_barriers_keep_threads_in_step(threads: int) -> None:
    assert native.Pool(threads).count_in_step(regions=30, barriers=10) == 0


def test_many_short_regions() -> None:
    assert native.Pool(2).count_in_step(regions=1000, barriers=0) == 0


def test_pools_live_side_by_side() -> None:
    pools = [native.Pool(2) for _ in range(3)]
    for _ in range(3):
        assert [pool.count_in_step(regions=3, barriers=3) for pool in pools] == [0, 0, 0]


def test_a_pinned_pool_works() -> None:
    assert native.Pool(3, pinned=True).count_in_step(regions=5, barriers=5) == 0


@pytest.mark.parametrize("call", ["nest()", "stray_barrier()"])
@pytest.mark.parametrize("threads", [1, 2])
def test_misuse_ends_the_process_with_a_line(call: str, threads: int) -> None:
    code = f"from heedful import _native; _native.Pool({threads}).{call}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "region" in ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_gets_threads_of_its_own() -> None:
    """In a process of its own: pytest's has threads, which Python warns of at a fork."""
    code = """
import os
from heedful import _native
pool, unused = _native.Pool(2), _native.Pool(2)
assert pool.count_in_step(3, 3) == 0
child = os.fork()
if child == 0:
    del unused
    faults = pool.count_in_step(3, 3)
    del pool
    os._exit(faults)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.count_in_step(3, 3) == 0
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
