"""Needle tests: what they ask, judged by a reader that knows every answer within its sight."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scripted_runner import ScriptedRunner

from heedful.engine.needles import NeedleCase, ask, measure_needles, needle_cases
from heedful.errors import BadParameter
from heedful.request import CachePolicy, Sequence
from heedful.testing import make_tiny_model
from heedful.text.tokenizer import Tokenizer

FACT = re.compile(r"The special magic number for (\w+) is (\d{7})\.")
SIGHT = 700
NEAR = CachePolicy(kv_format="f32", window=SIGHT)


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "base"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token a byte; with a chat template and without."""
    folder = make_tiny_model(tmp_path_factory.mktemp("bytes"), chat=request.param)
    return Tokenizer.from_file(folder / "tokenizer.json")


def text_of(tokenizer: Tokenizer, ids: tuple[int, ...] | list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in ids).decode()


def reader(tokenizer: Tokenizer) -> ScriptedRunner:
    """Sees the whole text, or the policy's window of it, and answers what is asked if it sees the fact."""

    def logits(sequence: Sequence) -> np.ndarray:
        text = text_of(tokenizer, sequence.token_ids)
        prompt = text_of(tokenizer, sequence.request.prompt_ids)
        window = sequence.request.policy.window
        facts = dict(FACT.findall(prompt[-window:] if window else prompt))
        (word,) = re.findall(r"number for (\w+) that the text mentions", prompt)
        row = np.zeros(259, dtype=np.float32)
        answer = text[len(prompt) :]
        given = f"The special magic number for {word} is "
        assert answer.lstrip().startswith(given[: len(answer.lstrip())]), answer
        digits = answer.lstrip()[len(given) :]
        told = facts.get(word, "0000000") + "."
        assert told.startswith(digits[: len(told)])
        if len(digits) < len(told):
            row[tokenizer.encode(told[len(digits)], add_bos=False)[0]] = 5.0
        else:
            row[256] = 5.0  # <|endoftext|>
        return row

    return ScriptedRunner(logits, vocab_size=259)


def cases(tokenizer: Tokenizer, **chosen: object) -> list[NeedleCase]:
    return needle_cases(tokenizer, context_len=4096, **{"lengths": (1024, 2048), **chosen})  # type: ignore[arg-type]


def test_a_reader_who_sees_all_finds_all_and_one_who_sees_the_end_finds_what_lies_there(tokenizer: Tokenizer) -> None:
    found = cases(tokenizer)
    assert len(found) == 2 * 2 * 5
    (score,) = measure_needles(reader(tokenizer), found, [NEAR], tokenizer)
    assert (score.exact_recall, score.exact_choice, score.asked) == (1.0, 1.0, 20)

    def lies_near(case: NeedleCase) -> bool:
        prompt = text_of(tokenizer, case.prompt_ids)
        return f"is {case.value}." in prompt[-SIGHT:]

    near = [lies_near(case) for case in found]
    assert 0 < sum(near) < 20
    assert score.recall == score.choice == pytest.approx(sum(near) / 20)
    for kind in ("single", "multi"):
        of_kind = [hit for hit, case in zip(near, found, strict=True) if case.kind == kind]
        assert score.recall_by_kind[kind] == pytest.approx(sum(of_kind) / 10)
    of_short = [hit for hit, case in zip(near, found, strict=True) if case.length == 1024]
    assert score.recall_by_length["1024"] == pytest.approx(sum(of_short) / 10)


@pytest.mark.parametrize(("kind", "facts"), [("single", 1), ("multi", 8)])
def test_a_haystack(tokenizer: Tokenizer, kind: str, facts: int) -> None:
    depths = (0.0, 0.1, 0.5, 0.9, 1.0)
    for case, depth in zip(
        [c for c in cases(tokenizer, lengths=(4096,), depths=depths) if c.kind == kind], depths, strict=True
    ):
        prompt = text_of(tokenizer, case.prompt_ids)
        found = dict(FACT.findall(prompt))
        assert len(found) == facts
        assert len({value[0] for value in found.values()}) == facts
        (word,) = re.findall(r"number for (\w+) that the text mentions", prompt)
        assert found[word] == case.value
        hay_begins, hay_ends = prompt.index("\n\n") + 2, prompt.rindex("\n\n")
        at = (prompt.index(f"is {case.value}.") - hay_begins) / (hay_ends - hay_begins)
        assert abs(at - depth) < 0.06
        # the prompt, the words given and an answer fit, and hardly a sentence more would
        assert 4096 - 150 < len(case.prompt_ids) + len(case.given_ids) + 16 <= 4096
        firsts = [text_of(tokenizer, [token]) for token in case.first_ids]
        assert firsts[0] == case.value[0]
        assert len(set(firsts)) == 8
        if kind == "multi":
            assert set(firsts) == {value[0] for value in found.values()}


def test_the_answer_begins_with_given_words_behind_the_prompt(tokenizer: Tokenizer) -> None:
    case = cases(tokenizer, lengths=(2048,), depths=(0.5,))[0]
    (word,) = re.findall(r"number for (\w+) that the text mentions", text_of(tokenizer, case.prompt_ids))
    given = text_of(tokenizer, case.given_ids)
    if tokenizer.chat_template is not None:
        assert text_of(tokenizer, case.prompt_ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert given == f"The special magic number for {word} is "
    else:
        assert text_of(tokenizer, case.prompt_ids).endswith("\nAnswer:")
        assert given == f" The special magic number for {word} is "


def test_cases_are_the_same_every_time_and_others_for_another_seed(tokenizer: Tokenizer) -> None:
    chosen = {"lengths": (1024,), "depths": (0.5,)}
    assert cases(tokenizer, **chosen) == cases(tokenizer, **chosen)
    other = cases(tokenizer, **chosen, seed=1)
    assert all(a.value != b.value for a, b in zip(cases(tokenizer, **chosen), other, strict=True))


def test_lengths_beyond_the_context_are_left_out(tokenizer: Tokenizer) -> None:
    found = needle_cases(tokenizer, context_len=2048, lengths=(1024, 2048, 4096), depths=(0.5,))
    assert [case.length for case in found] == [1024, 2048] * 2
    with pytest.raises(BadParameter, match=r"need 1024 tokens; the context is 600"):
        needle_cases(tokenizer, context_len=600, lengths=(1024,))


def test_a_reader_without_any_idea_has_not_chosen_the_right_value(tokenizer: Tokenizer) -> None:
    (case, _) = cases(tokenizer, lengths=(1024,), depths=(0.5,))
    runner = ScriptedRunner(lambda sequence: np.zeros(259, dtype=np.float32), vocab_size=259)
    (outcome,) = ask(runner, case, [NEAR], tokenizer)
    assert (outcome.found, outcome.chosen) == (False, False)
    assert runner.cache.taken_bytes == 0


def test_a_value_that_comes_after_the_end_of_the_answer_does_not_count(tokenizer: Tokenizer) -> None:
    (case, _) = cases(tokenizer, lengths=(1024,), depths=(0.5,))
    eos = max(tokenizer.eos_ids)
    script = [eos, *tokenizer.encode(case.value, add_bos=False)]
    begin = len(case.prompt_ids) + len(case.given_ids)

    def logits(sequence: Sequence) -> np.ndarray:
        row = np.zeros(259, dtype=np.float32)
        said = len(sequence.token_ids) - begin
        row[script[said % len(script)]] = 1.0
        return row

    (outcome,) = ask(ScriptedRunner(logits, vocab_size=259), case, [NEAR], tokenizer)
    assert not outcome.found


def test_real_models_find_needles(smollm2_path: Path) -> None:
    """The score says something: SmolLM2 under exact attention finds a needle at half of 512 tokens."""
    from heedful import LLM
    from heedful.engine.policy_quality import EXACT

    llm = LLM(str(smollm2_path), context_len=1024)
    (case, _) = needle_cases(llm.tokenizer, context_len=1024, lengths=(512,), depths=(0.5,))
    (outcome,) = ask(llm.engine.runner, case, [EXACT], llm.tokenizer)
    assert (outcome.found, outcome.chosen) == (True, True)
