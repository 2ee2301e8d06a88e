"""Typed questions about a state, answered with probabilities.

from heedful.decide import Choice, Likelihood, Noul
decider = Likelihood(LLM("smollm2"))
answers = decider.decide("Two charges for order 88", [Choice("team", ["billing", "returns"], "Who owns this?")])
answers["team"].to_dict(), answers.receipt.line()
"""

from heedful.decide.answer import Answer, Answers, ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.decider import Decider
from heedful.decide.question import Choice, Noul, Question, Score, State

__all__ = [
    "Answer",
    "Answers",
    "Choice",
    "ChoiceAnswer",
    "Decider",
    "Noul",
    "NoulAnswer",
    "Question",
    "Score",
    "ScoreAnswer",
    "State",
]
