"""What a decision would have cost as generated text: the least of it, for a receipt to show beside its own visits.

Each question is then a request of its own: a chat model reads the state, the question and its options, without reuse
(as `visits.dense` counts), and writes the answer's label and the end of its turn. A text answer gives no probabilities;
asked for in JSON, or with a word of explanation, it costs more than this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from heedful.cost.visits import attended
from heedful.decide.answer import Answer, NoulAnswer, ScoreAnswer
from heedful.decide.chat_prompt import prompt_text
from heedful.decide.question import Question, State, json_text
from heedful.decide.receipt import AsText, DecisionReceipt


@dataclass(frozen=True)
class Reader:
    """Who would read and write the text."""

    name: str
    layer_heads: int
    """Layers × query heads of a layer."""
    count_tokens: Callable[[str], int]


def default_reader(count_tokens: Callable[[str], int]) -> Reader:
    """The default chat model, for deciders that write no text: SmolLM2-135M has 30 layers of 9 query heads."""
    return Reader("smollm2", 30 * 9, count_tokens)


def with_text_cost(
    receipt: DecisionReceipt, state: State, questions: Iterable[Question], answers: Mapping[str, Answer], reader: Reader
) -> DecisionReceipt:
    """The receipt with `as_text` filled in for these answers to these questions."""
    text = json_text(state)
    prompts, outputs, visits = 0, 0, 0
    for question in questions:
        prompt_len = reader.count_tokens(prompt_text(text, question, range(len(question.labels))))
        output_len = reader.count_tokens(_said(answers[question.name])) + 1  # the end of the turn
        prompts, outputs = prompts + prompt_len, outputs + output_len
        visits += reader.layer_heads * attended(0, prompt_len + output_len - 1, None)
    return replace(receipt, as_text=AsText(reader.name, prompts, outputs, visits))


def _said(answer: Answer) -> str:
    if isinstance(answer, NoulAnswer):
        return "yes" if answer.value else "no"
    return str(round(answer.score)) if isinstance(answer, ScoreAnswer) else answer.choice
