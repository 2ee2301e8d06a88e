"""Multiple choice and text loss against logits of a plain decoder, and of transformers, that compute all anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import LLM
from heedful.engine.multiple_choice import (
    ChoiceRow,
    choice_ids,
    choice_row,
    measure_choices,
    score_choices,
    share_of,
)
from heedful.engine.text_loss import measure_text, windows
from heedful.engine.torch_runner import build_decoder
from heedful.errors import BadParameter, ContextOverflow
from heedful.kernels.attention import DenseAttend
from heedful.request import CachePolicy
from heedful.testing import make_tiny_model
from heedful.weights.load import load

Logits = Callable[[list[int]], torch.Tensor]
ROWS = [
    ChoiceRow("One two", ("three", "four five six", "é"), 0),
    ChoiceRow("Question: what is it?\nAnswer: ", ("a", "bb"), 1),
    ChoiceRow("x" * 150, ("left", "right", "straight on"), 2),
    ChoiceRow("q", ("abc", "abd"), 1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_len=256)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, runner="torch", threads=1, policy=CachePolicy(kv_format="f32"))


def plain(folder: Path) -> Logits:
    loaded = load(str(folder))
    decoder = build_decoder(loaded.config, loaded.weights)

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            hidden = decoder(torch.tensor(ids), torch.arange(len(ids)), DenseAttend([len(ids)]))
            return decoder.logits(hidden)

    return logits


def of_transformers(folder: Path) -> Logits:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]  # type: ignore[no-any-return]

    return logits


def loglikelihood(logits: Logits, ids: list[int], begin: int) -> float:
    logprobs = logits(ids).double().log_softmax(-1)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(begin, len(ids)))


@pytest.mark.parametrize("judge", [plain, of_transformers])
def test_likelihoods_are_those_of_the_choice_s_tokens(
    judge: Callable[[Path], Logits], folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "heedful.engine.multiple_choice.score_choices",
        lambda rows, sums: seen.extend(sums) or score_choices(rows, sums),
    )
    score, _ = measure_choices(llm, ROWS)
    logits = judge(folder)
    right = right_norm = 0
    for row, found in zip(ROWS, seen, strict=True):
        expected = []
        for choice in row.choices:
            # the tokenizer's tokens are bytes, so the choice's own are the last ones
            text = f"{row.context.rstrip()} {choice}"
            ids = llm.tokenizer.encode(text)
            assert len(ids) == len(text.encode())
            expected.append(loglikelihood(logits, ids, len(row.context.rstrip().encode())))
        assert list(found) == pytest.approx(expected, abs=1e-4)
        per_byte = [value / len(choice.encode()) for value, choice in zip(expected, row.choices, strict=True)]
        right += expected.index(max(expected)) == row.answer
        right_norm += per_byte.index(max(per_byte)) == row.answer
    assert (score.acc.share, score.acc_norm.share) == (right / 4, right_norm / 4)
    assert score.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 3 + 1 / 2) / 4)


def test_a_long_context_is_computed_once(llm: LLM) -> None:
    _, ledger = measure_choices(llm, [ChoiceRow("y" * 200, ("one", "two", "three"), 0)])
    layers_heads = 2 * 4
    dense = sum(layers_heads * n * (n + 1) // 2 for n in (204, 204, 206))
    assert ledger.dense_visits == dense
    once = layers_heads * 192 * 193 // 2  # three whole pages
    assert ledger.visits == dense - 2 * once


def test_the_higher_sum_and_the_higher_sum_per_byte() -> None:
    row = ChoiceRow("c", ("ab", "abcdefgh"), 1)
    score = score_choices([row, row], [(-2.0, -3.0), (-2.0, -9.0)])
    assert (score.acc.share, score.acc_norm.share) == (0.0, 0.5)


def test_wilson_s_interval() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (count, total), (low, high) in published.items():
        found = share_of(count, total)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([], "must be a JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, "needs a question or a context"),
        ({"question": "q", "context": "c", "choices": ["a", "b"], "answer": 0}, "one of them"),
        ({"question": "q", "choices": ["a", 3], "answer": 0}, "must be a list of texts"),
        ({"question": "q", "choices": ["a"], "answer": 0}, "are 1; 2 to 256"),
        ({"question": "q", "choices": ["a", "a"], "answer": 0}, "the same text twice"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "2 is neither"),
        ({"question": "q", "choices": ["a", "b"], "answer": True}, "True is neither"),
        ({"question": "q", "choices": ["a", "b"]}, "None is neither"),
    ],
)
def test_rows_that_are_none(value: Any, what: str) -> None:
    with pytest.raises(BadParameter, match=what):
        choice_row(value)


def test_a_question_is_asked_as_one() -> None:
    row = choice_row({"question": "Why?", "choices": ["so", "no"], "answer": "no"})
    assert row == ChoiceRow("Question: Why?\nAnswer:", ("so", "no"), 1)
    assert choice_row({"context": "As is", "choices": ["so", "no"], "answer": 0}).context == "As is"


def test_a_token_across_the_border_is_the_choice_s(llm: LLM) -> None:
    ids = choice_ids(llm.tokenizer, ROWS[0])
    assert ids.scored_from == (7, 7, 7)
    assert ids.shared_len == 7, "the space after it is scored for each"


def test_nothing_before_a_choice_is_refused(llm: LLM) -> None:
    for context in ("", " \n"):
        with pytest.raises(BadParameter, match="context: is empty"):
            choice_ids(llm.tokenizer, ChoiceRow(context, ("a", "b"), 0))


def test_rows_that_do_not_fit_are_named(llm: LLM) -> None:
    with pytest.raises(ContextOverflow) as caught:
        measure_choices(llm, [ROWS[0], ChoiceRow("z" * 300, ("a", "b"), 0)])
    assert "row 2: the prompt has 302 tokens and the context is 256" in caught.value.message


@pytest.mark.parametrize(("length", "window"), [(50, None), (256, None), (300, None), (90, 16), (91, 16), (17, 16)])
def test_a_text_is_foretold_token_by_token(length: int, window: int | None, folder: Path, llm: LLM) -> None:
    text = ("The cat sät on " * 60).encode()[:length].decode("utf-8", "ignore")
    loss, ledger = measure_text(llm, text, window=window)
    ids, size = llm.tokenizer.encode(text), window or 256
    logits, nats = plain(folder), 0.0
    for i in range(1, len(ids)):
        # by hand: the windows begin at 0, size/2, size, …; a token is foretold by the first that reaches it
        start = 0 if i < size else ((i - size) // (size // 2) + 1) * (size // 2)
        nats -= loglikelihood(logits, ids[start : i + 1], i - start)
    assert loss.nats == pytest.approx(nats, abs=2e-3)
    assert loss.bits_per_byte == pytest.approx(nats / math.log(2) / (len(text.encode()) - 1), rel=1e-5)
    assert loss.perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)
    assert (loss.tokens, loss.num_bytes) == (len(ids) - 1, len(text.encode()) - 1)
    assert ledger.requests == len(list(windows(len(ids), size)))


def test_windows_count_every_token_once() -> None:
    for length, size in ((1, 4), (4, 4), (5, 4), (6, 4), (7, 4), (31, 7)):
        found = list(windows(length, size))
        assert [i for _, first, end in found for i in range(first, end)] == list(range(length))
        assert all(end - start <= size for start, _, end in found)
        assert all(first - start >= size // 2 for start, first, _ in found[1:])


def test_texts_that_cannot_be_measured(llm: LLM) -> None:
    for text, window, what in (
        ("", None, "no token"),
        ("a", None, "no token"),
        ("abc", 1, "2 to 256"),
        ("abc", 999, "2 to 256"),
    ):
        with pytest.raises(BadParameter, match=what):
            measure_text(llm, text, window=window)
