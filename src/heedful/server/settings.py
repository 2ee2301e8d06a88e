"""What `heedful serve` was told: one frozen record, handed to everything that needs a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heedful.request import CachePolicy

MOST_BODY_BYTES = 16 << 20
MOST_HEADER_BYTES = 64 << 10


@dataclass(frozen=True)
class ServerSettings:
    models: tuple[str, ...]
    """As they are named in requests; the first one answers requests that name none."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Of the first model: names that requests give as their model, and where each adapter is."""
    deciders: tuple[str, ...] = ()
    """As they are named in requests; the first one answers those that name none. None: a chat model decides."""
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    """None: no key is asked for."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names besides the loopback ones that requests may be addressed to; with "*" any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of other sites' pages that may call; with "*" any."""
    policy: CachePolicy = CachePolicy()  # noqa: RUF009  # frozen
    """For requests that bring none."""
    speculate: bool = False
    most_waiting: int = 256
    most_body_bytes: int = MOST_BODY_BYTES
    most_models_loaded: int = 2
    idle_unload_seconds: float | None = 900.0
    """A model that nobody used for so long is unloaded; None: never."""
    drain_seconds: float = 30.0
    """Going down, how long answers that are being written may take to end."""
    history_path: str | None = None
    """The page's conversations (SQLite); None: the page keeps none."""
