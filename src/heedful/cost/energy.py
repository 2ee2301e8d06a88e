"""Joules: measured where the processor counts them, else estimated with an interval. Also seconds of paper costs.

Owns the energy model and its constants. Knows nothing of tokens or models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# (typical, low, high). Watts of one busy core with its share of the caches, the memory controller and the rest of the
# package. Public cloud-footprint coefficients, fitted to published server power benchmarks, give 1.6 to 6 W for a
# hardware thread of a busy server processor, so 3 to 12 W a core with two threads: AMD EPYC (Zen 2 and 3) near 4,
# Intel Skylake and Cascade Lake near 8. Sockets' rated power over their cores gives 3 to 10; laptops 2 to 6.
WATTS_PER_CORE = (4.0, 2.0, 10.0)

# (typical, low, high). Joules to bring one byte from DRAM. Horowitz's table (ISSCC 2014) has 1.3 to 2.6 nJ for 64 bits,
# 0.16 to 0.33 nJ a byte, for memory at 1.5 V; times the square of the voltage ratio to 1.2 and 1.1 V (DDR4, DDR5) that
# is 0.09 to 0.21. Low-power memory soldered beside the processor needs about half.
DRAM_JOULES_PER_BYTE = (0.1e-9, 0.05e-9, 0.2e-9)

SLOWEST_SHARE_OF_ROOFLINE = 0.5
"""Tuned kernels were measured between about this share of the reference machine's roofline and all of it."""

JOULES_PER_KWH = 3.6e6

MEASURED_RAPL = "measured:rapl"
ESTIMATED = "estimated"


@dataclass(frozen=True)
class Energy:
    joules: float
    low: float
    high: float
    """The interval; equal to `joules` where it was measured."""
    source: str
    """"measured:rapl" or "estimated"."""


def estimate_energy(busy_core_seconds: float, dram_bytes: float) -> Energy:
    """`busy_core_seconds`: seconds that cores worked, summed over cores; `dram_bytes`: read and written."""
    joules, low, high = (
        watts * busy_core_seconds + per_byte * dram_bytes
        for watts, per_byte in zip(WATTS_PER_CORE, DRAM_JOULES_PER_BYTE, strict=True)
    )
    return Energy(joules, low, high, ESTIMATED)


class EnergyMeter:
    """Energy between start() and read(): RAPL's where Linux lets us read it, else an estimate.

    RAPL counts whole sockets (and their DRAM where there is a domain for it): idle power and other programs' work
    are in it. A counter that wraps more than once in between (minutes at full power) cannot be noticed.
    """

    def __init__(self, powercap: Path = Path("/sys/class/powercap")) -> None:
        """`powercap`: directory of the kernel's power capping framework (Documentation/power/powercap)."""
        self._domains = _rapl_domains(powercap)
        self._started: list[int] | None = None

    def start(self) -> None:
        self._started = _counters(self._domains)

    def read(self, busy_core_seconds: float, dram_bytes: float) -> Energy:
        """Since start(); may be read several times. The arguments are used where nothing can be measured."""
        ended = _counters(self._domains) if self._started else None
        if not self._started or not ended:
            return estimate_energy(busy_core_seconds, dram_bytes)
        joules = sum(map(_joules_between, self._domains, self._started, ended))
        return Energy(joules, joules, joules, MEASURED_RAPL)


@dataclass(frozen=True)
class _RaplDomain:
    energy_uj: Path
    max_energy_range_uj: int


def _rapl_domains(powercap: Path) -> list[_RaplDomain]:
    """Packages and their DRAM; [] if one of them cannot be read (a part would pass for the whole).

    Left out: core and uncore (inside the package), psys (contains it), and dies after the first: on AMD each die's
    domain repeats the counter of the whole socket.
    """
    domains = []
    try:
        for directory in sorted(powercap.glob("intel-rapl:*")):
            name = (directory / "name").read_text().strip()
            if re.fullmatch(r"package-\d+(-die-0)?|dram", name):
                limit = int((directory / "max_energy_range_uj").read_text())
                domains.append(_RaplDomain(directory / "energy_uj", limit))
    except (OSError, ValueError):
        return []
    return domains


def _counters(domains: list[_RaplDomain]) -> list[int] | None:
    """Microjoules by domain; None where nothing can be read (since 2020 only root may, by default)."""
    try:
        return [int(domain.energy_uj.read_text()) for domain in domains] or None
    except (OSError, ValueError):
        return None


def _joules_between(domain: _RaplDomain, started: int, ended: int) -> float:
    wrapped = domain.max_energy_range_uj if ended < started else 0
    return (ended - started + wrapped) * 1e-6


@dataclass(frozen=True)
class Machine:
    """What a paper estimate runs on. The defaults are the reference machine: 2 cores of a server, AVX2."""

    bytes_per_second: float = 31e9
    flops_per_second: float = 350e9
    cores: int = 2
    watts: float | None = None
    """What the whole machine draws when busy; None: estimated from the cores and the bytes."""

    def seconds(self, flops: int, dram_bytes: int) -> float:
        """The roofline: whichever takes longer, the arithmetic or the memory. A lower bound of the real time."""
        return max(flops / self.flops_per_second, dram_bytes / self.bytes_per_second)

    def energy(self, seconds: float, dram_bytes: int) -> Energy:
        """Of `seconds` at the roofline. The interval covers power and kernels at half of the roofline's speed."""
        slowest = seconds / SLOWEST_SHARE_OF_ROOFLINE
        if self.watts is not None:
            return Energy(self.watts * seconds, self.watts * seconds, self.watts * slowest, ESTIMATED)
        fast, slow = (estimate_energy(self.cores * s, dram_bytes) for s in (seconds, slowest))
        return Energy(fast.joules, fast.low, slow.high, ESTIMATED)
