"""The few tools that a request needs, for all of them cost too much: the 58 of eight reference servers are 7,600 tokens
of JSON, read anew at every uncached turn.

    selector = ToolSelector(catalogue, count=lambda text: len(llm.tokenizer.encode(text, add_bos=False)), embedder=…)
    chosen = selector.select("What time is it in Tokyo?")
    chosen.text()                     # what goes before the model, in as many words as the budget allows
    chosen.schema_tokens, chosen.all_schema_tokens, chosen.visits(shape, prompt_tokens)

A request that no tool fits gets none (`abstained`). Tools that the request names come first and always; recently used
ones stay where they are, so that the prompt's beginning stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from heedful.cost.formulas import Shape, prefill_cost
from heedful.decide.question import Choice
from heedful.mcp.catalogue.catalog import CatalogTool, Catalogue, Form
from heedful.mcp.catalogue.rank import Ranking, ToolRanker
from heedful.mcp.schemas.signature import summary

if TYPE_CHECKING:
    from heedful.cost.encoder_receipt import EncoderReceipt
    from heedful.decide.decider import DecisionModel
    from heedful.engine.embedder import Embedder

K = 5
TOKEN_BUDGET = 600
MOST_RECENT = 2
"""Recently used tools that stay."""
SHORTLIST = 12
"""Tools that a decider is asked about."""
NONE = "none of these"

Cause = Literal["always", "recent", "named", "ranked"]


@dataclass(frozen=True)
class ChosenTool:
    tool: CatalogTool
    cause: Cause
    score: float
    form: Form
    """How it is told to the model."""
    tokens: int
    """Of that."""


@dataclass(frozen=True)
class SchemaVisits:
    """Visits that a prompt's tools add to its prefill: those chosen, and what all tools would have."""

    chosen: int
    all_tools: int
    selection: int
    """Of the encoder that chose; of another model, so not to be added up without a thought."""


@dataclass(frozen=True)
class Selection:
    chosen: tuple[ChosenTool, ...]
    """In the order in which they go before the model."""
    abstained: bool
    """Nothing fits: what is chosen all the same is there by configuration, or was used recently."""
    need: float
    threshold: float
    """`need` at or below it is abstention."""
    all_schema_tokens: int
    """Of every tool of the catalogue as full JSON."""
    all_tools: int
    receipt: EncoderReceipt | None
    """What the encoder cost that chose."""
    ranked: tuple[tuple[CatalogTool, float], ...] = ()
    """All tools with their scores, the best first, whether any is needed or not: what rules may look at, which costs no
    token."""

    @property
    def tools(self) -> tuple[CatalogTool, ...]:
        return tuple(each.tool for each in self.chosen)

    @property
    def schema_tokens(self) -> int:
        """Put before the model by `text()`."""
        return sum(each.tokens for each in self.chosen)

    def as_json(self) -> list[dict[str, Any]]:
        """Tools as chat templates take them, in the chosen forms; there is no JSON of a signature, so brief stands for
        it, and is longer than `schema_tokens` counts. Grammars are made of `CatalogTool.parameters` in any case."""
        return [each.tool.as_json("brief" if each.form == "signature" else each.form) for each in self.chosen]

    def text(self) -> str:
        """What the model is told, a tool a line."""
        return "\n".join(each.tool.text(each.form) for each in self.chosen)

    def visits(self, shape: Shape, prompt_tokens: int) -> SchemaVisits:
        """Of a cold prefill of `prompt_tokens`, tools not among them; the prompt's tokens visit the tools too."""

        encoder = self.receipt.visits.total if self.receipt else 0
        chosen, every = (added_visits(shape, prompt_tokens, n) for n in (self.schema_tokens, self.all_schema_tokens))
        return SchemaVisits(chosen, every, encoder)

    def to_dict(self) -> dict[str, Any]:
        """For receipts: names, causes and tokens."""
        return {
            "tools": [
                {"name": each.tool.model_name, "cause": each.cause, "form": each.form, "tokens": each.tokens}
                for each in self.chosen
            ],
            "abstained": self.abstained,
            "need": self.need,
            "threshold": self.threshold,
            "schema_tokens": self.schema_tokens,
            "all_schema_tokens": self.all_schema_tokens,
            "all_tools": self.all_tools,
            "encoder": self.receipt.to_dict() if self.receipt else None,
        }


class ToolSelector:
    """For one catalogue and one model.

    count: tokens of a text, by the model that will read it. embedder: an encoder's vectors beside the words; without
    one the words decide alone, and abstain less well. decider: has the last word over the best SHORTLIST.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        count: Callable[[str], int],
        *,
        embedder: Embedder | None = None,
        decider: DecisionModel | None = None,
        k: int = K,
        token_budget: int = TOKEN_BUDGET,
    ) -> None:
        assert k >= 1, k
        self.catalogue = catalogue
        self._tools = catalogue.tools
        self._count = count
        self._decider = decider
        self._k = k
        self._token_budget = token_budget
        self._ranker = ToolRanker(self._tools, embedder)
        self._tokens: dict[tuple[str, Form], int] = {}
        self._all_schema_tokens = sum(self._tokens_of(tool, "full") for tool in self._tools)

    def select(self, request: str, *, recent: Sequence[str] = ()) -> Selection:
        """`recent`: model names of tools used before, the newest last; at most MOST_RECENT stay. Raises nothing for a
        request of any length or none."""
        ranking = self._decided(request, self._ranker.rank(request))
        scores = dict(zip(self.catalogue, ranking.scores, strict=True))
        named = _named(request, self._tools)
        abstained = ranking.need <= ranking.threshold and not named
        causes: dict[str, Cause] = {tool.model_name: "always" for tool in self._tools if tool.is_always}
        stays = [name for name in dict.fromkeys(reversed(recent)) if name in self.catalogue][:MOST_RECENT]
        for name in reversed(stays):
            causes.setdefault(name, "recent")
        for name in named:
            causes.setdefault(name, "named")
        if not abstained:
            for name in sorted(scores, key=lambda name: -scores[name]):
                causes.setdefault(name, "ranked")
        kept = dict(list(causes.items())[: self._k])
        forms = self._forms([self.catalogue[name] for name in sorted(kept, key=lambda name: -scores[name])])
        chosen = [
            ChosenTool(tool, cause, scores[name], forms[name], self._tokens_of(tool, forms[name]))
            for name, cause in kept.items()
            for tool in [self.catalogue[name]]
        ]
        return Selection(
            tuple(chosen),
            abstained,
            ranking.need,
            ranking.threshold,
            self._all_schema_tokens,
            len(self._tools),
            ranking.receipt,
            tuple((self.catalogue[name], scores[name]) for name in sorted(scores, key=lambda name: -scores[name])),
        )

    def _decided(self, request: str, ranking: Ranking) -> Ranking:
        """The best by score, put in a decider's order, which may also find that none fits."""
        if self._decider is None or not self._tools or not request.strip():
            return ranking
        order = sorted(range(len(self._tools)), key=lambda i: -ranking.scores[i])[:SHORTLIST]
        meanings = {self._tools[i].model_name: summary(self._tools[i].description) or None for i in order}
        options = {**meanings, NONE: "Small talk, knowledge or writing: no tool is needed."}
        question = Choice("tool", options, "Which tool answers the request?")
        found = self._decider.decide(request, [question])["tool"].to_dict()["probabilities"]
        scores = list(ranking.scores)
        for i in order:
            scores[i] += found[self._tools[i].model_name] - found[NONE] / len(order) + 10.0
        return Ranking(tuple(scores), 1 - found[NONE], 0.5, ranking.receipt)

    def _forms(self, tools: Sequence[CatalogTool]) -> dict[str, Form]:
        """In how many words each is told: one line; more, the best first, as far as the budget goes."""
        forms: dict[str, Form] = {tool.model_name: "signature" for tool in tools}
        left = self._token_budget - sum(self._tokens_of(tool, "signature") for tool in tools)
        for form in ("brief", "full"):
            for tool in tools:
                more = self._tokens_of(tool, form) - self._tokens_of(tool, forms[tool.model_name])
                if more <= left:
                    forms[tool.model_name] = form
                    left -= more
        return forms

    def _tokens_of(self, tool: CatalogTool, form: Form) -> int:
        key = (tool.model_name, form)
        if key not in self._tokens:
            self._tokens[key] = self._count(tool.text(form))
        return self._tokens[key]


def added_visits(shape: Shape, prompt_tokens: int, tokens: int) -> int:
    """That `tokens` more make in a cold prefill of a prompt."""
    if not tokens:
        return 0
    plain = prefill_cost(shape, prompt_tokens).visits if prompt_tokens else 0
    return prefill_cost(shape, prompt_tokens + tokens).visits - plain


def _named(request: str, tools: Sequence[CatalogTool]) -> list[str]:
    """Model names of the tools that a request calls by name, in its order. A plain word, as `fetch`, names nothing."""
    found: dict[str, int] = {}
    for tool in tools:
        forms = {tool.model_name, f"{tool.server}/{tool.name}", f"`{tool.name}`"}
        if re.search(r"[_-]", tool.name):
            forms.add(tool.name)
        pattern = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        if match := re.search(rf"(?<![\w/-])(?:{pattern})(?![\w/-])", request):
            found[tool.model_name] = match.start()
    return sorted(found, key=found.__getitem__)
