"""The options of a cache policy, the same for every verb that computes answers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from heedful.errors import BadParameter
from heedful.request import CachePolicy

Kv = Annotated[
    str | None, typer.Option(help="Number format of keys and values: f32, f16, q8, q4, or k=q8,v=q4; default: q8.")
]
Precise = Annotated[
    int | None, typer.Option(help="With 4-bit keys or values: newest tokens that stay 8-bit; 0: none; default: 128.")
]
Window = Annotated[int | None, typer.Option(help="Attend to so many newest tokens only; no limit to the length then.")]
Sinks = Annotated[int, typer.Option(help="With --window: the first tokens, seen nevertheless; 4 keep it coherent.")]
Budget = Annotated[int | None, typer.Option(help="While decoding, read only the pages that matter: so many tokens.")]
Prefill = Annotated[str, typer.Option(help="dense, or sparse: prompt tokens see the first and the newest tokens only.")]
PackedWeights = Annotated[
    str | None, typer.Option("--weights", help="Quantize at load: q8, q6 or q4; faster, and less exact.")
]
Speculate = Annotated[
    bool,
    typer.Option("--speculate", help="Guess ahead from the text so far: the same answer, sooner where it repeats."),
]


def policy_from_options(
    kv: str | None, precise: int | None, window: int | None, sinks: int, budget: int | None, prefill: str
) -> CachePolicy:
    """Raises BadParameter."""
    if prefill not in ("dense", "sparse"):
        raise BadParameter("prefill", f"must be dense or sparse, not {prefill!r:.40}")
    return CachePolicy(
        kv_format=kv, precise=precise, window=window, sinks=sinks, budget=budget, sparse_prefill=prefill == "sparse"
    )


def warn_of_loss(model: str, policy: CachePolicy) -> None:
    """On stderr, where a policy was chosen that loses much, or of which nobody knows what it loses."""
    from heedful.cost.quality import quality_warning

    if (warning := quality_warning(model, policy)) is not None:
        print(f"heedful: {warning}", file=sys.stderr)
