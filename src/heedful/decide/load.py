"""From a name to a decider."""

from __future__ import annotations

from heedful.decide.decider import Decider
from heedful.decide.likelihood import Likelihood
from heedful.decide.remote import Jev
from heedful.engine.llm import LLM


def load_decider(name: str, *, orders: int = 1, threads: int | None = None) -> Decider:
    """ "jev": the hosted API, or where TYPESAFE_BASE_URL points; a URL: a System One server there; else a chat model's
    alias, path, hf:… or wheel:…, whose likelihoods decide (`orders` is for those). Raises as they do.
    """
    if name == "jev":
        return Jev()
    if name.startswith(("http://", "https://")):
        return Jev(name)
    return Likelihood(LLM(name, threads=threads), orders=orders)
