"""Any chat model as a decider: how likely it finds each answer. No training, no text generated.

    decider = Likelihood(LLM("smollm2"))
    decider.decide("I was charged twice", [Noul("refund", "Does the writer want money back?")])

The prompt is the chat in which the assistant has given the answer: the state first, so that its keys and values are
computed once and shared by every question and option; then the question and what its options mean. An option's score
is the summed log-likelihood of the tokens in which its chat differs from the other options', the end of the answer
among them, so that one name may be the beginning of another. The answers: a choice's names, a score's numbers, yes or
no. What such scores are worth depends on the model; a Calibration makes them truer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from math import fsum
from time import perf_counter
from typing import Self

from heedful.cost.receipt import Receipt
from heedful.decide.answer import Answers
from heedful.decide.as_text import Reader, with_text_cost
from heedful.decide.calibrate import Calibration
from heedful.decide.chat_prompt import answers_of, orders_of, prompt_text
from heedful.decide.decider import DecisionModel
from heedful.decide.question import Question, State, check_state, checked_questions, json_text
from heedful.decide.receipt import decision_receipt
from heedful.decide.tempered import tempered_answers
from heedful.engine.llm import LLM
from heedful.engine.prompt_scores import common_len, read_prompts, scored_request, summed_logprob
from heedful.errors import BadParameter
from heedful.request import CachePolicy, Request, Sequence

MOST_ORDERS = 16

ReadPrompts = Callable[[ListLike[Request]], list[tuple[Sequence, Receipt]]]
"""Requests for no output, read to their ends: their sequences, and what each cost."""


@dataclass(frozen=True)
class _Ask:
    """One option in one order of the options: the whole chat, and from which token on it is scored."""

    question: int
    label: int
    ids: tuple[int, ...]
    scored_from: int


class Likelihood(DecisionModel):
    """orders: in how many orders the options are shown; log-likelihoods are averaged. 1: as they were asked.

    calibration: temperatures fitted for this model. policy: of the cache, default the LLM's own. cache_salt: states are
    shared among decisions of the same salt. digits: round probabilities. read_prompts: how prompts are read where
    somebody else steps the LLM's engine. adapter: name of one that the LLM was loaded with, to decide through.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        orders: int = 1,
        calibration: Calibration | None = None,
        policy: CachePolicy | None = None,
        cache_salt: str = "",
        digits: int | None = None,
        read_prompts: ReadPrompts | None = None,
        adapter: str | None = None,
    ) -> None:
        if isinstance(orders, bool) or not isinstance(orders, int) or not 1 <= orders <= MOST_ORDERS:
            raise BadParameter("orders", f"must be a whole number from 1 to {MOST_ORDERS}, not {orders!r:.40}")
        self.llm = llm
        self.orders = orders
        self.calibration = calibration or Calibration()
        self.policy = policy or llm.policy
        self.cache_salt = cache_salt
        self.digits = digits
        self.adapter = adapter
        self._read_prompts = read_prompts

    @classmethod
    def load(
        cls,
        name: str,
        *,
        threads: int | None = None,
        orders: int = 1,
        calibration: Calibration | None = None,
        digits: int | None = None,
        weights: str | None = None,
    ) -> Self:
        """`name`: of a chat model, and weights, as LLM takes them; raises as that does."""
        return cls(LLM(name, threads=threads, weights=weights), orders=orders, calibration=calibration, digits=digits)

    @property
    def name(self) -> str:
        return self.llm.name

    def decide(self, state: State, questions: Iterable[Question]) -> Answers:
        """Raises BadParameter for malformed input, ContextOverflow when state and question do not fit."""
        began = perf_counter()
        asked = checked_questions(questions)
        scores, receipts = self._scores(state, asked)
        answers = tempered_answers(asked, scores, self.calibration, digits=self.digits)
        receipt = decision_receipt(self.name, len(asked), receipts, seconds=perf_counter() - began)
        return Answers(self.name, answers, with_text_cost(receipt, state, asked, answers, self._reader()))

    def _reader(self) -> Reader:
        config, tokenizer = self.llm.config, self.llm.tokenizer
        return Reader(self.name, config.num_layers * config.num_heads, lambda text: len(tokenizer.encode(text)))

    def logits(self, state: State, questions: Iterable[Question]) -> list[tuple[float, ...]]:
        """Of each question its options' log-likelihoods, before any temperature: what calibrate.fit takes."""
        return self._scores(state, checked_questions(questions))[0]

    def _scores(self, state: State, questions: tuple[Question, ...]) -> tuple[list[tuple[float, ...]], list[Receipt]]:
        check_state(state)
        text = json_text(state)
        asks = [
            ask
            for at, question in enumerate(questions)
            for order in orders_of(question, self.orders)
            for ask in self._asks(at, text, question, order)
        ]
        found, receipts = self._read(asks)
        sums: list[list[list[float]]] = [[[] for _ in question.labels] for question in questions]
        for ask, score in zip(asks, found, strict=True):
            sums[ask.question][ask.label].append(score)
        return [tuple(fsum(of) / len(of) for of in labels) for labels in sums], receipts

    def _asks(self, at: int, state: str, question: Question, order: ListLike[int]) -> list[_Ask]:
        answers = answers_of(question)
        if len(answers) == 1:
            return [_Ask(at, 0, (), 0)]  # certain, whatever the model says
        prompt = prompt_text(state, question, order)
        chats = [self._encode(prompt, answer) for answer in answers]
        shared = common_len(chats)
        return [_Ask(at, label, tuple(self._up_to_end(ids, shared)), shared) for label, ids in enumerate(chats)]

    def _encode(self, prompt: str, answer: str) -> list[int]:
        """Token ids of a chat with this answer."""
        tokenizer, template = self.llm.tokenizer, self.llm.tokenizer.chat_template
        if template is None:
            return tokenizer.encode(f"{prompt}\n\nAnswer: {answer}\n")
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return tokenizer.encode_segments(template.render(chat, add_generation_prompt=False))

    def _up_to_end(self, ids: list[int], begin: int) -> list[int]:
        """Without what a template writes after the token that ends the answer: no model has learned to expect it."""
        ends = [at for at in range(begin, len(ids)) if ids[at] in self.llm.tokenizer.eos_ids]
        return ids[: ends[-1] + 1] if ends else ids

    def _read(self, asks: ListLike[_Ask]) -> tuple[list[float], list[Receipt]]:
        """Score of each, and the receipts of those that were read."""
        read = self._read_prompts or partial(read_prompts, self.llm)
        found = read([self._request(ask) for ask in asks if ask.scored_from < len(ask.ids)])
        in_turn = iter(found)
        scores = [summed_logprob(next(in_turn)[0]) if ask.scored_from < len(ask.ids) else 0.0 for ask in asks]
        return scores, [receipt for _, receipt in found]

    def _request(self, ask: _Ask) -> Request:
        return scored_request(
            ask.ids, ask.scored_from, policy=self.policy, cache_salt=self.cache_salt, adapter=self.adapter
        )
