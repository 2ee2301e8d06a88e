"""heedful: attention, spent with care. A transformer engine that counts what every token costs.

The public names are the ones in __all__; they load on first use, so `import heedful` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.cost.ledger import Ledger
    from heedful.cost.receipt import Receipt
    from heedful.decide.ask import Decider
    from heedful.engine.answer import Completion, Logprob, Piece
    from heedful.engine.llm import LLM, TextStream
    from heedful.errors import HeedfulError
    from heedful.request import CachePolicy, Finish, SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "heedful.engine.llm",
    "CachePolicy": "heedful.request",
    "Completion": "heedful.engine.answer",
    "Decider": "heedful.decide.ask",
    "Finish": "heedful.request",
    "HeedfulError": "heedful.errors",
    "Ledger": "heedful.cost.ledger",
    "Logprob": "heedful.engine.answer",
    "Piece": "heedful.engine.answer",
    "Receipt": "heedful.cost.receipt",
    "SamplingParams": "heedful.request",
    "TextStream": "heedful.engine.llm",
}

__all__ = [
    "LLM",
    "CachePolicy",
    "Completion",
    "Decider",
    "Finish",
    "HeedfulError",
    "Ledger",
    "Logprob",
    "Piece",
    "Receipt",
    "SamplingParams",
    "TextStream",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'heedful' has no attribute {name!r}")
