"""Places and zones in a text, as IANA names: "Tokyo", "Japan", "San Francisco", "UTC", "Europe/London".

From the system's own time zone database; a few big cities that it does not name are listed here. A country counts where
one time holds in all of it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from zoneinfo import TZPATH, ZoneInfo, available_timezones

MAX_WORDS = 4
_CITIES = {
    "America/Los_Angeles": "San Francisco|San Diego|Seattle|Las Vegas|Portland|San Jose|California|LA",
    "America/New_York": "Boston|Washington|Miami|Atlanta|Philadelphia|NYC|Florida",
    "America/Chicago": "Houston|Dallas|Austin|Texas|New Orleans|Minneapolis",
    "America/Sao_Paulo": "Rio de Janeiro|Brasilia",
    "America/Toronto": "Ottawa|Montreal|Quebec",
    "Asia/Kolkata": "Mumbai|Delhi|New Delhi|Bangalore|Bengaluru|Chennai|Hyderabad|Kolkata",
    "Asia/Shanghai": "Beijing|Shenzhen|Guangzhou|Wuhan",
    "Asia/Tokyo": "Osaka|Kyoto|Yokohama|Nagoya",
    "Asia/Dubai": "Abu Dhabi",
    "Asia/Karachi": "Lahore|Islamabad",
    "Asia/Ho_Chi_Minh": "Hanoi|Saigon",
    "Asia/Jerusalem": "Tel Aviv",
    "Australia/Sydney": "Canberra",
    "Europe/London": "Manchester|Edinburgh|Liverpool|Birmingham|Glasgow|England|Scotland|UK",
    "Europe/Berlin": "Munich|Hamburg|Frankfurt|Cologne",
    "Europe/Paris": "Lyon|Marseille",
    "Europe/Rome": "Milan|Naples",
    "Europe/Madrid": "Barcelona|Seville",
    "Europe/Zurich": "Geneva|Basel|Bern",
    "Europe/Kyiv": "Kiev|Odesa",
    "Europe/Istanbul": "Ankara",
    "Europe/Moscow": "Saint Petersburg",
    "Africa/Johannesburg": "Cape Town|Pretoria|Durban",
    "Pacific/Auckland": "Wellington",
}
_WORD = re.compile(r"[^\W\d_]+(?:['’.-][^\W\d_]+)*")
_IANA = re.compile(r"\b[A-Z][A-Za-z]+/[A-Z][A-Za-z_+-]+(?:/[A-Z][A-Za-z_]+)?\b")
_BEFORE = re.compile(r"\b(?:in|for|to|from|at|of|is|into|and)\s+$", re.IGNORECASE)
_NO_PLACES = {"us", "center", "general", "central", "eastern", "mountain", "pacific", "west", "east", "north", "south"}


def places_in(text: str) -> list[tuple[str, int, int]]:
    """(IANA name, start, end) of each, in the text's order. A name in small letters counts after in, for, to, …"""
    found = [(match[0], *match.span()) for match in _IANA.finditer(text) if match[0] in available_timezones()]
    words = list(_WORD.finditer(text))
    at = 0
    while at < len(words):
        for count in range(min(MAX_WORDS, len(words) - at), 0, -1):
            start, end = words[at].start(), words[at + count - 1].end()
            zone = _zone(text[start:end], text[:start])
            if zone is not None and not any(start < other[2] and other[1] < end for other in found):
                found.append((zone, start, end))
                at += count - 1
                break
        at += 1
    return sorted(found, key=lambda each: each[1])


def _zone(name: str, before: str) -> str | None:
    plain = " ".join(name.split())
    if plain.islower() and not _BEFORE.search(before):
        return None
    if len(plain) <= 3 and not plain.isupper():
        return None
    return _index().get(plain.lower())


@lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    """Name in small letters → zone; cities go before countries."""
    found: dict[str, str] = {}
    for zone in sorted(available_timezones(), key=lambda zone: (zone.count("/") != 1, zone)):
        area, _, city = zone.rpartition("/")
        name = city.replace("_", " ").lower()
        if area not in ("Etc", "SystemV", "posix", "right", "US") and name not in _NO_PLACES:
            found.setdefault(name, zone)
    for zone, names in _CITIES.items():
        found.update({name.lower(): zone for name in names.split("|")})
    for name, zone in _countries().items():
        found.setdefault(name, zone)
    return found


def _countries() -> dict[str, str]:
    """From the database's own tables, where they are installed."""
    folder = next((Path(path) for path in TZPATH if (Path(path) / "zone.tab").exists()), None)
    if folder is None or not (folder / "iso3166.tab").exists():
        return {}
    zones: dict[str, list[str]] = {}
    for code, zone in ((row[0], row[2]) for row in _rows(folder / "zone.tab")):
        zones.setdefault(code, []).append(zone)
    names = {row[0]: row[1].lower() for row in _rows(folder / "iso3166.tab")}
    now = datetime.now(UTC)
    return {
        names[code]: first
        for code, (first, *others) in zones.items()
        if code in names and all(now.astimezone(ZoneInfo(each)).utcoffset() == _offset(first, now) for each in others)
    }


def _offset(zone: str, now: datetime) -> object:
    return now.astimezone(ZoneInfo(zone)).utcoffset()


def _rows(path: Path) -> list[list[str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]
