"""Pages on disk: what is read is what was written, whatever was killed, cut, changed or shared meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
from test_prefix import MIXED_WINDOWS, POLICIES, account, check_saved, text

from heedful.cache.disk import DiskTier
from heedful.cache.prefix import PageName, PrefixReport
from heedful.engine.engine import Engine
from heedful.engine.scheduler import Scheduler
from heedful.errors import BadParameter
from heedful.request import CachePolicy, Request, SamplingParams, Sequence
from witness import WitnessRunner

FINGERPRINT = sha256(b"model").hexdigest()
PAGE_BYTES = 5000


def name_of(number: int) -> PageName:
    return PageName(sha256(b"%d" % number).digest(), number % 3, "k=q8,v=q4")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


def rows_of(data: bytes) -> list[memoryview]:
    """As layers lie apart in memory."""
    return [memoryview(bytearray(data[begin : begin + 1700])) for begin in range(0, len(data), 1700)]


def write(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        tier.write(name_of(number), rows_of(content(number)))


def read(tier: DiskTier, number: int, repeat: int = 1) -> bytes | None:
    rows = rows_of(bytes(PAGE_BYTES * repeat))
    return b"".join(rows) if tier.read(name_of(number), rows) else None


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def written(folder: Path, *numbers: int) -> DiskTier:
    tier = DiskTier(folder, FINGERPRINT, 1 << 30)
    write(tier, *numbers)
    tier.close()
    return tier


def test_a_page_comes_back_in_another_process(tmp_path: Path) -> None:
    first = written(tmp_path, 1, 2, 3)
    first.close()
    write(first, 4)  # closed: nothing more is written
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    assert [read(tier, number) for number in (1, 2, 3, 4)] == [content(1), content(2), content(3), None]
    assert [tier.has(name_of(number)) for number in (3, 4)] == [True, False]
    assert {path.suffix for path in files(tmp_path)} == {".page"}
    tier.close()


def test_another_model_or_format_or_group_finds_nothing(tmp_path: Path) -> None:
    written(tmp_path, 1)
    name = name_of(1)
    other = DiskTier(tmp_path, sha256(b"another model").hexdigest(), 1 << 30)
    same = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    rows = rows_of(bytes(PAGE_BYTES))
    assert not other.read(name, rows)
    assert not same.read(name._replace(group=2), rows)
    assert not same.read(name._replace(format="q8"), rows)
    assert same.read(name, rows)
    other.close()
    same.close()


def test_a_page_under_another_name_is_no_hit_and_goes(tmp_path: Path) -> None:
    tier = written(tmp_path, 1, 2)
    one, two = sorted(files(tmp_path), key=lambda path: name_of(1).block.hex() not in path.name)
    os.replace(one, two)
    assert read(tier, 2) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("place", [0, 9, 14, 50, 79, 84, 110, 130, 150, 1000, -1])
def test_a_changed_byte_is_a_miss_and_the_file_goes(tmp_path: Path, place: int) -> None:
    tier = written(tmp_path, 7)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert read(tier, 7) is None
    assert not path.exists()


@pytest.mark.parametrize("length", [0, 8, 100, PAGE_BYTES, PAGE_BYTES + 10**6])
def test_a_file_of_another_length_is_a_miss(tmp_path: Path, length: int) -> None:
    tier = written(tmp_path, 7)
    (path,) = files(tmp_path)
    os.truncate(path, length)
    assert read(tier, 7) is None
    assert not path.exists()


def test_pages_of_many_layers_need_several_system_calls(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3000)
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    tier.write(name_of(0), [memoryview(data)[i : i + 1] for i in range(3000)])
    tier.close()
    found = bytearray(3000)
    assert tier.read(name_of(0), [memoryview(found)[i : i + 1] for i in range(3000)])
    assert found == data


def test_the_folder_stays_within_its_bound_and_keeps_what_was_used(tmp_path: Path) -> None:
    bound = 40 * (PAGE_BYTES + 200)
    old = written(tmp_path, *range(20))
    for path in files(tmp_path):
        os.utime(path, (1000, 1000))
    assert read(old, 3) == content(3)  # used, so no longer among the oldest
    tier = DiskTier(tmp_path, sha256(b"another model").hexdigest(), bound)
    tier.touch([name_of(99)])  # never written: no error
    for number in range(100, 136):
        write(tier, number)
    tier.close()
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert sum(sizes) <= bound
    assert len(sizes) > 30
    assert read(old, 3) == content(3)
    assert read(old, 4) is None
    assert read(tier, 135) == content(135)


def test_what_was_touched_last_stays_longest(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    write(tier, *range(10))
    tier.touch([name_of(number) for number in reversed(range(10))])  # as a sequence's end does: the last page first
    tier.close()
    small = DiskTier(tmp_path, FINGERPRINT, 6 * (PAGE_BYTES + 200))
    write(small, 50)
    small.close()
    assert [read(small, number) is not None for number in range(10)] == [True] * 4 + [False] * 6


def test_leftovers_of_dead_writers_go(tmp_path: Path) -> None:
    written(tmp_path, 1)
    folder = files(tmp_path)[0].parent
    dead, alive = folder / ".1-2-3.part", folder / ".4-5-6.part"
    for path in (dead, alive):
        path.write_bytes(b"half")
    os.utime(dead, (1000, 1000))
    written(tmp_path, 2)
    assert not dead.exists()
    assert alive.exists()


def test_a_full_queue_drops_and_never_waits(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30, max_queued=3 * PAGE_BYTES)
    hold = threading.Event()
    with tier._changed:
        tier._put(hold.wait, 0)  # the writer is busy
    write(tier, *range(8))
    assert tier.dropped_pages == 5
    hold.set()
    tier.close()
    assert sum(read(tier, number) is not None for number in range(8)) == 3


def test_a_disk_that_takes_nothing_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    monkeypatch.setattr(os, "fsync", full)
    write(tier, 1, 2)
    tier.close()
    assert files(tmp_path) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"heedful: pages cannot be kept in {tmp_path}: [Errno 28] No space left on device"
    ]


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadParameter, match=r"prefix_cache: .* cannot be made"):
        DiskTier(tmp_path / "file", FINGERPRINT, 1000)


CHILD = f"""
import os, random, sys
from hashlib import sha256
from heedful.cache.disk import DiskTier
from heedful.cache.prefix import PageName

def write(first, count, repeat):
    tier = DiskTier(sys.argv[1], {FINGERPRINT!r}, 1 << 30)
    for number in range(first, first + count):
        data = random.Random(number).randbytes({PAGE_BYTES}) * repeat
        tier.write(PageName(sha256(b"%d" % number).digest(), number % 3, "k=q8,v=q4"), [memoryview(data)])
    tier.close()

for line in sys.stdin:  # a new process each
    child = os.fork()
    if not child:
        write(*map(int, line.split()))
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


class Writers:
    """Starts processes that write pages, without the time that a new interpreter takes."""

    def __init__(self, folder: Path) -> None:
        self._mother = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, first: int, count: int, repeat: int = 1) -> int:
        """Process id. The one before it must have ended, or be about to."""
        assert self._mother.stdin is not None
        assert self._mother.stdout is not None
        self._mother.stdin.write(f"{first} {count} {repeat}\n")
        self._mother.stdin.flush()
        return int(self._mother.stdout.readline())

    def end(self) -> None:
        """Returns when the last one has ended."""
        self._mother.communicate()
        assert self._mother.returncode == 0


def test_whatever_moment_a_writer_is_killed_at_every_file_is_whole(tmp_path: Path) -> None:
    rng, seen, writers, repeat = random.Random(1), 0, Writers(tmp_path), 60
    for first in range(0, 12_000, 200):
        before = len(files(tmp_path))
        writer = writers.start(first, 200, repeat)
        while len(files(tmp_path)) < before + 1 + first // 200 % 4:
            pass
        time.sleep(rng.choice([0, rng.uniform(0, 0.01)]))
        os.kill(writer, signal.SIGKILL)
    writers.end()
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    for number in range(12_000):
        if tier.has(name_of(number)):
            seen += 1
            assert read(tier, number, repeat) == content(number) * repeat
    tier.close()
    assert seen > 60
    assert seen == sum(path.suffix == ".page" for path in files(tmp_path))


def test_two_processes_write_the_same_pages_while_a_third_reads(tmp_path: Path) -> None:
    writers = [Writers(tmp_path) for _ in range(2)]
    tier = DiskTier(tmp_path, FINGERPRINT, 1 << 30)
    for each in writers:
        each.start(0, 150)
    while read(tier, 149) is None:
        for number in range(150):
            assert read(tier, number) in (None, content(number))
    for each in writers:
        each.end()
    assert [read(tier, number) for number in range(150)] == [content(number) for number in range(150)]
    assert {path.suffix for path in files(tmp_path)} == {".page"}
    tier.close()


def engine_with(
    folder: Path, *, windows: tuple[int | None, ...] = MIXED_WINDOWS, capacity_tokens: int = 6000
) -> Engine:
    runner = WitnessRunner(MIXED_WINDOWS, capacity_tokens)
    engine = Engine(runner, model_name="witness", context_len=1 << 20, eos_ids=())
    engine.scheduler = Scheduler(runner.cache, 300, DiskTier(folder, FINGERPRINT, 1 << 30))
    return engine


def finish(engine: Engine, sequence: Sequence) -> PrefixReport:
    while sequence.finish is None:
        engine.step()
    receipt = engine.receipt(sequence)
    check_saved(receipt)
    assert receipt.prefix is not None
    return receipt.prefix


def answer(engine: Engine, prompt: tuple[int, ...], max_tokens: int, policy: CachePolicy) -> tuple[list[int], int]:
    sequence = engine.add(Request(prompt, SamplingParams(max_tokens=max_tokens), policy))
    return sequence.token_ids, finish(engine, sequence).cached_tokens


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_next_process_goes_on_where_this_one_ended(tmp_path: Path, policy: CachePolicy) -> None:
    first = engine_with(tmp_path)
    said, _ = answer(first, text(0, 700), 60, policy)
    question = (*said, *text(1, 40))
    expected, reused = answer(first, question, 10, policy)
    first.close()
    second = engine_with(tmp_path)
    shareable = len(question) - 100 if policy.sparse_prefill else len(question) - 1
    assert answer(second, question, 10, policy) == (expected, shareable // 64 * 64)
    assert reused > 500
    account(second.runner.cache, [])
    second.close()


def test_a_hole_on_disk_ends_the_reuse_there_and_is_filled(tmp_path: Path) -> None:
    policy = CachePolicy()
    first = engine_with(tmp_path)
    expected = answer(first, text(0, 700), 5, policy)[0]
    first.close()
    chain = [path for path in files(tmp_path) if path.stem.endswith("-0-q8")]
    assert len(chain) == 11
    broken = sorted(chain, key=lambda path: path.stat().st_mtime_ns)[4]  # touched from the last page to the first
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    for cached in (6 * 64, 10 * 64):  # pages 7 to 10 were touched before it
        engine = engine_with(tmp_path)
        assert answer(engine, text(0, 700), 5, policy) == (expected, cached)
        account(engine.runner.cache, [])
        engine.close()


def test_pages_come_from_disk_while_memory_is_short_and_others_run(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, capacity_tokens=1400)
    rng = random.Random(3)
    prompts = [text(seed, 500) for seed in range(6)]
    running: list[Sequence] = []
    reused = 0
    for _ in range(120):
        policy = rng.choice(POLICIES[:5])
        prompt = rng.choice(prompts)[: rng.randint(100, 500)] + text(7, 30)
        running.append(engine.add(Request(prompt, SamplingParams(max_tokens=rng.randint(1, 8)), policy)))
        while len(running) > 2:
            reused += finish(engine, running.pop(0)).cached_tokens
        account(engine.runner.cache, running)
    while running:
        finish(engine, running.pop())
    account(engine.runner.cache, [])
    engine.close()
    assert reused  # how much depends on how fast the disk takes what waits
