"""Questions with choices that a run is judged on beside its validation: `run.eval_choices`. Format and conventions are
engine/multiple_choice.py's. A context is computed once for all of its choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heedful.engine.multiple_choice import ChoiceIds, ChoiceRow, choice_ids, parse_choices, score_choices
from heedful.engine.torch_branches import read_state, run_branches
from heedful.errors import BadParameter
from heedful.models.decoder import Decoder
from heedful.text.tokenizer import Tokenizer

OPTION = "run.eval_choices"


@dataclass(frozen=True)
class Choices:
    rows: tuple[ChoiceRow, ...] = ()
    ids: tuple[ChoiceIds, ...] = ()


def read_choices(path: str | None, tokenizer: Tokenizer, context_len: int) -> Choices:
    """None where no file is named. Raises BadParameter for one that cannot be read, or a row beyond the context."""
    if path is None:
        return Choices()
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise BadParameter(OPTION, f"{path} cannot be read: {error.strerror}") from error
    rows = parse_choices(((number, line) for number, line in enumerate(lines, 1) if line.strip()), OPTION)
    ids = tuple(choice_ids(tokenizer, row) for row in rows)
    longest = max(len(text) for of_row in ids for text in of_row.texts)
    if longest > context_len:
        raise BadParameter(OPTION, f"a question with its choice has {longest:,} tokens, the context {context_len:,}")
    return Choices(tuple(rows), ids)


def choice_figures(decoder: Decoder, choices: Choices) -> dict[str, float]:
    """Of a decoder on this machine."""
    score = score_choices(choices.rows, [loglikelihoods(decoder, of_row) for of_row in choices.ids])
    return {"choices_acc": score.acc.share, "choices_acc_norm": score.acc_norm.share}


def loglikelihoods(decoder: Decoder, ids: ChoiceIds) -> list[float]:
    """Of each choice's own tokens, in nats."""
    shared = ids.shared_len
    branches = [text[shared - 1 : -1] for text in ids.texts]  # what foretells the first that is not shared leads
    state = read_state(decoder, ids.texts[0][: shared - 1], room=max(map(len, branches)))
    found = []
    for text, begin, hidden in zip(ids.texts, ids.scored_from, run_branches(decoder, state, branches), strict=True):
        logprobs = decoder.logits(hidden[begin - shared :]).double().log_softmax(-1)
        found.append(_picked(logprobs, text[begin:]))
    return found


def _picked(logprobs: torch.Tensor, targets: Sequence[int]) -> float:
    return float(logprobs.gather(1, torch.tensor(targets)[:, None]).sum())
