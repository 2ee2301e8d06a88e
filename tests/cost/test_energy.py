"""The meter over made-up powercap directories, and the energy model worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from heedful.cost.energy import Energy, EnergyMeter, Machine, estimate_energy


def write_domain(powercap: Path, directory: str, name: str, microjoules: int, limit: int = 1_000_000) -> Path:
    domain = powercap / directory
    domain.mkdir(exist_ok=True)
    (domain / "name").write_text(f"{name}\n")
    (domain / "max_energy_range_uj").write_text(f"{limit}\n")
    (domain / "energy_uj").write_text(f"{microjoules}\n")
    return domain / "energy_uj"


def measured(joules: float) -> Energy:
    return Energy(pytest.approx(joules), pytest.approx(joules), pytest.approx(joules), "measured:rapl")


def test_packages_are_summed_and_their_parts_are_not(tmp_path: Path) -> None:
    first = write_domain(tmp_path, "intel-rapl:0", "package-0", 100_000)
    second = write_domain(tmp_path, "intel-rapl:1", "package-1", 500_000)
    core = write_domain(tmp_path, "intel-rapl:0:0", "core", 0)
    platform = write_domain(tmp_path, "intel-rapl:2", "psys", 0)
    memory_mapped = write_domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    meter = EnergyMeter(tmp_path)
    meter.start()
    first.write_text("350000")
    second.write_text("600000")
    for other in (core, platform, memory_mapped):
        other.write_text("900000")
    assert meter.read(1.0, 1e9) == measured(0.35)


def test_dram_is_added_where_it_is_counted(tmp_path: Path) -> None:
    package = write_domain(tmp_path, "intel-rapl:0", "package-0", 0)
    dram = write_domain(tmp_path, "intel-rapl:0:1", "dram", 0)
    meter = EnergyMeter(tmp_path)
    meter.start()
    package.write_text("200000")
    dram.write_text("30000")
    assert meter.read(1.0, 1e9) == measured(0.23)


def test_dies_that_repeat_the_socket_count_once(tmp_path: Path) -> None:
    dies = [write_domain(tmp_path, f"intel-rapl:{i}", f"package-0-die-{i}", 0) for i in range(2)]
    meter = EnergyMeter(tmp_path)
    meter.start()
    for die in dies:
        die.write_text("70000")
    assert meter.read(1.0, 1e9) == measured(0.07)


def test_a_counter_that_wraps(tmp_path: Path) -> None:
    package = write_domain(tmp_path, "intel-rapl:0", "package-0", 990_000, limit=1_000_000)
    meter = EnergyMeter(tmp_path)
    meter.start()
    package.write_text("15000")
    assert meter.read(1.0, 1e9) == measured(0.025)


def test_read_again_counts_from_the_start(tmp_path: Path) -> None:
    package = write_domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter(tmp_path)
    meter.start()
    package.write_text("10000")
    assert meter.read(1.0, 1e9) == measured(0.01)
    package.write_text("30000")
    assert meter.read(1.0, 1e9) == measured(0.03)
    meter.start()
    assert meter.read(1.0, 1e9) == measured(0.0)


def unreadable(path: Path) -> None:
    """A directory in its place raises OSError for root too, whom file modes do not stop."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["name", "max_energy_range_uj", "energy_uj"])
def test_what_cannot_be_read_is_estimated(tmp_path: Path, file: str) -> None:
    write_domain(tmp_path, "intel-rapl:0", "package-0", 0)
    write_domain(tmp_path, "intel-rapl:1", "package-1", 0)
    unreadable(tmp_path / "intel-rapl:1" / file)  # half of the machine must not pass for all of it
    meter = EnergyMeter(tmp_path)
    meter.start()
    assert meter.read(1.0, 1e9) == estimate_energy(1.0, 1e9)


def test_a_counter_that_becomes_unreadable(tmp_path: Path) -> None:
    package = write_domain(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = EnergyMeter(tmp_path)
    meter.start()
    package.write_text("not a number")
    assert meter.read(1.0, 1e9).source == "estimated"


@pytest.mark.parametrize("directory", ["", "nowhere"])
def test_no_counters_at_all(tmp_path: Path, directory: str) -> None:
    meter = EnergyMeter(tmp_path / directory)
    meter.start()
    assert meter.read(2.0, 0.0).source == "estimated"


def test_the_estimate_by_hand() -> None:
    """3 core seconds at 4 (2 to 10) W, 10 GB at 0.1 (0.05 to 0.2) nJ a byte."""
    found = estimate_energy(busy_core_seconds=3.0, dram_bytes=10e9)
    assert found == Energy(pytest.approx(12 + 1), pytest.approx(6 + 0.5), pytest.approx(30 + 2), "estimated")


def test_time_is_the_slower_of_arithmetic_and_memory() -> None:
    machine = Machine(bytes_per_second=10e9, flops_per_second=100e9)
    assert machine.seconds(flops=10**12, dram_bytes=10**10) == 10.0
    assert machine.seconds(flops=10**11, dram_bytes=10**12) == 100.0


def test_energy_on_paper_covers_half_the_speed() -> None:
    machine = Machine(cores=2)
    # 5 s on 2 cores, or 10 s at half of the roofline; 100 GB
    expected = Energy(pytest.approx(40 + 10), pytest.approx(20 + 5), pytest.approx(200 + 20), "estimated")
    assert machine.energy(seconds=5.0, dram_bytes=10**11) == expected
    known = Machine(watts=30.0).energy(seconds=5.0, dram_bytes=10**11)
    assert known == Energy(150.0, 150.0, 300.0, "estimated")
