"""Typed questions about a state, answered with probabilities.

from heedful import LLM
from heedful.decide import Choice, Likelihood
decider = Likelihood(LLM("smollm2"))
answers = decider.decide("Two charges for order 88", [Choice("team", ["billing", "returns"], "Who owns this?")])
answers["team"].to_dict(), answers.receipt.line()
"""

from heedful.decide.answer import Answer, Answers, ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.decider import Decider
from heedful.decide.likelihood import Likelihood
from heedful.decide.question import Choice, Noul, Question, Score, State
from heedful.decide.remote import Jev

__all__ = [
    "Answer",
    "Answers",
    "Choice",
    "ChoiceAnswer",
    "Decider",
    "Jev",
    "Likelihood",
    "Noul",
    "NoulAnswer",
    "Question",
    "Score",
    "ScoreAnswer",
    "State",
]
