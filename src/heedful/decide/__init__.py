"""Typed questions about a state, answered with probabilities.

from heedful.decide import Choice, Decider
decider = Decider("heedful-decider")
answers = decider.ask("Two charges for order 88", [Choice("team", ["billing", "returns"], "Who owns this?")])
answers["team"].to_dict(), answers.receipt.line()
"""

from heedful.decide.answer import Answer, Answers, ChoiceAnswer, NoulAnswer, ScoreAnswer
from heedful.decide.ask import Decider
from heedful.decide.decider import DecisionModel
from heedful.decide.likelihood import Likelihood
from heedful.decide.question import Choice, Noul, Question, Score, State
from heedful.decide.remote import Jev

__all__ = [
    "Answer",
    "Answers",
    "Choice",
    "ChoiceAnswer",
    "Decider",
    "DecisionModel",
    "Jev",
    "Likelihood",
    "Noul",
    "NoulAnswer",
    "Question",
    "Score",
    "ScoreAnswer",
    "State",
]
