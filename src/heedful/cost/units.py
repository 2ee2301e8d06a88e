"""Counts, bytes, seconds and shares as people read them. ASCII, never more than four significant digits."""

_PREFIXES = "kMGTPEZY"


def si(number: float, unit: str = "") -> str:
    """5120000000 → "5.12 G"; counts under 10,000 stay whole ("8,192"). `unit` follows the prefix: "5.12 GB"."""
    if number < 10_000 and number == int(number):
        return f"{int(number):,} {unit}".rstrip()
    scaled, prefix = float(number), ""
    for larger in _PREFIXES:
        if scaled < 1000:
            break
        scaled, prefix = scaled / 1000, larger
    digits = f"{scaled:.4g}" if scaled < 10_000 else f"{scaled:.3e}"
    return f"{digits} {prefix}{unit}".rstrip()


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for limit, length, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds / 86_400:,.0f} days"


def joules(number: float) -> str:
    return f"{number * 1e3:.3g} mJ" if number < 1 else f"{number:.3g} J" if number < 1000 else si(round(number), "J")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
