"""The synchronous face: text in, text and cost out; what users can ask wrongly; streams; cancelling."""

from __future__ import annotations

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from heedful import LLM
from heedful.errors import BadParameter, ContextOverflow, SourceError, TemplateError, UnsupportedModel, UsageError
from heedful.testing import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(make_tiny_model(tmp_path_factory.mktemp("tiny"), sliding_window=40)))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path))


def all_pages_are_free(llm: LLM) -> bool:
    return llm.engine.runner.cache.taken_bytes == 0


def test_a_real_model_answers(smollm2: LLM) -> None:
    answer = smollm2.generate("The capital of France is", max_tokens=16)
    assert "Paris" in answer.text
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 16
    assert smollm2.tokenizer.decode(answer.token_ids) == answer.text
    assert answer.prompt_token_ids == tuple(smollm2.tokenizer.encode("The capital of France is"))


def test_a_real_chat_ends_by_itself(smollm2: LLM) -> None:
    answer = smollm2.chat([{"role": "user", "content": "Say hello."}], max_tokens=200)
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert not set(answer.token_ids) & smollm2.tokenizer.eos_ids


def test_a_prompt_over_the_context_is_refused_with_both_numbers_and_the_way_out(smollm2: LLM) -> None:
    with pytest.raises(ContextOverflow, match=r"9,000 tokens and the context is 8,192") as refused:
        smollm2.generate([504] * 9000)
    assert "--truncate" in refused.value.remedy
    assert "truncate=True" in refused.value.remedy


def test_text_and_its_token_ids_are_the_same_prompt(tiny: LLM) -> None:
    by_text = tiny.generate("hello there", max_tokens=8)
    by_ids = tiny.generate(tiny.tokenizer.encode("hello there"), max_tokens=8)
    assert by_ids.token_ids == by_text.token_ids
    assert tiny.generate(np.array(by_text.prompt_token_ids), max_tokens=8).token_ids == by_text.token_ids


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [True], [259], [-1], ""])
def test_prompts_that_are_none(tiny: LLM, prompt: object) -> None:
    with pytest.raises(BadParameter, match="prompt"):
        tiny.generate(prompt)  # type: ignore[arg-type]
    assert all_pages_are_free(tiny)


def test_truncate_keeps_the_newest_tokens_and_says_how_many_went(tiny: LLM) -> None:
    ids = [i % 250 for i in range(600)]
    answer = tiny.generate(ids, truncate=True, max_tokens=12)
    assert answer.prompt_token_ids == tuple(ids[-(512 - 12) :])
    assert answer.dropped_tokens == 600 - len(answer.prompt_token_ids)
    assert len(answer.token_ids) == 12 or answer.finish_reason == "stop"
    assert tiny.generate(ids[:100], truncate=True, max_tokens=3).dropped_tokens == 0


def test_truncate_keeps_the_begin_of_text_token(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "bos_id", 7)
    answer = tiny.generate([7, *range(100), *[9] * 499], truncate=True, max_tokens=12)
    assert answer.prompt_token_ids == (7, *[9] * 499)


def test_truncate_leaves_a_prompt_that_fits_and_half_of_the_context_to_one_that_does_not(tiny: LLM) -> None:
    assert tiny.generate([9] * 250, truncate=True, max_tokens=512).dropped_tokens == 0
    answer = tiny.generate([9] * 600, truncate=True, max_tokens=512)
    assert len(answer.prompt_token_ids) == 256


def test_truncating_a_chat_drops_the_oldest_turns_and_keeps_the_system_message(tiny: LLM) -> None:
    system = {"role": "system", "content": "be brief"}
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " + "x" * 150} for i in range(5)]
    with pytest.raises(ContextOverflow):
        tiny.chat([system, *turns], max_tokens=10)
    answer = tiny.chat([system, *turns], truncate=True, max_tokens=10)
    assert answer.prompt_token_ids == tuple(tiny.encode_chat([system, turns[4]]))  # not an answer without its question
    assert answer.dropped_tokens == len(tiny.encode_chat([system, *turns])) - len(answer.prompt_token_ids)
    with pytest.raises(UsageError, match="the context of 512 leaves 502 for it"):
        tiny.chat([system, {"role": "user", "content": "y" * 600}], truncate=True, max_tokens=10)


def test_a_stream_is_the_completion_in_pieces(tiny: LLM) -> None:
    stream = tiny.stream("ab", max_tokens=40, temperature=1.0, seed=3)
    pieces = list(stream)
    whole = tiny.generate("ab", max_tokens=40, temperature=1.0, seed=3)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.completion.text
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)


def test_seeds(tiny: LLM) -> None:
    first, again, other = (tiny.generate("ab", max_tokens=30, temperature=1.5, seed=seed).text for seed in (1, 1, 2))
    assert first == again != other


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(tiny: LLM) -> None:
    whole = tiny.generate("ab", max_tokens=40).text
    cut = whole[10:13]  # spans tokens: each is one byte
    at = whole.index(cut)
    stream = tiny.stream("ab", max_tokens=40, stop=cut)
    shown = "".join(piece.text for piece in stream)
    assert shown == stream.completion.text == whole[:at]
    assert stream.completion.finish_reason == "stop"
    assert tiny.generate("ab", max_tokens=40, stop=["never in it", cut]).text == whole[:at]
    assert all_pages_are_free(tiny)


def test_two_streams_side_by_side_are_the_two_alone(tiny: LLM) -> None:
    alone = [tiny.generate(prompt, max_tokens=20).text for prompt in ("first", "second")]
    streams = [tiny.stream("first", max_tokens=20), tiny.stream("second", max_tokens=20)]
    texts = ["", ""]
    iterators = [iter(stream) for stream in streams]
    for _ in range(30):
        for i, iterator in enumerate(iterators):
            piece = next(iterator, None)
            texts[i] += piece.text if piece else ""
    assert texts == alone


def test_leaving_a_stream_early_cancels_it_and_frees_its_pages(tiny: LLM) -> None:
    with tiny.stream("ab", max_tokens=300) as stream:
        for _, _piece in zip(range(7), stream, strict=False):
            pass
    assert stream.completion.finish_reason == "cancelled"
    assert 7 <= len(stream.completion.token_ids) <= 8
    assert stream.completion.receipt.output_tokens == len(stream.completion.token_ids)
    assert all_pages_are_free(tiny)


def test_a_stream_that_is_closed_has_the_text_of_all_its_tokens(tiny: LLM) -> None:
    """Also of tokens that another stream's steps have computed meanwhile."""
    waiting, stepping = tiny.stream("ab", max_tokens=50), tiny.stream("cd", max_tokens=20)
    stepping.complete()
    waiting.close()
    completion = waiting.completion
    assert len(completion.token_ids) == 20
    assert completion.text == tiny.tokenizer.decode(completion.token_ids, continues=True)
    assert completion.text == tiny.generate("ab", max_tokens=20).text


def test_logprobs(tiny: LLM) -> None:
    answer = tiny.generate("ab", max_tokens=5, logprobs=3)
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    for entry in answer.logprobs:  # greedy: the chosen one is the likeliest
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)
    assert tiny.generate("ab", max_tokens=5).logprobs is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", v) for v in (2.5, "2", True)),
        *(("temperature", v) for v in (None, "hot")),
        *(("top_k", v) for v in (None, 2.5)),
        ("seed", 1.5),
        ("logprobs", 2.5),
        ("stop", 5),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5.7: 1}),
        ("logit_bias", {5: "1"}),
    ],
)
def test_values_of_another_type_are_refused_by_name(tiny: LLM, name: str, value: object) -> None:
    with pytest.raises(BadParameter, match=name):
        tiny.generate("a", **{name: value})
    assert not tiny.engine.scheduler.has_work


def test_threads_take_turns(tiny: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(8)]
    alone = [tiny.generate(prompt, max_tokens=25).text for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: tiny.generate(prompt, max_tokens=25).text, prompts * 4))
    assert together == alone * 4
    assert all_pages_are_free(tiny)


def test_a_stream_that_is_dropped_unread_does_not_run_on(tiny: LLM) -> None:
    requests = tiny.ledger.requests
    stream = tiny.stream("ab", max_tokens=400)
    del stream
    gc.collect()
    tiny.generate("cd", max_tokens=1)
    assert all_pages_are_free(tiny)
    assert tiny.ledger.requests == requests + 2


def test_closing_a_stream_inside_its_loop(tiny: LLM) -> None:
    stream = tiny.stream("ab", max_tokens=50)
    for i, _ in enumerate(stream):
        if i == 3:
            stream.close()
    assert stream.completion.finish_reason == "cancelled"
    with pytest.raises(UsageError, match="not ended"):
        _ = tiny.stream("ab", max_tokens=5).completion


def test_a_stop_string_ends_the_tokens_too_when_another_stream_has_stepped_on(tiny: LLM) -> None:
    whole = tiny.generate("ab", max_tokens=40).text
    alone = tiny.generate("ab", max_tokens=40, stop=whole[10:13], logprobs=0)
    waiting, stepping = tiny.stream("ab", max_tokens=40, stop=whole[10:13], logprobs=0), tiny.stream("x", max_tokens=40)
    stepping.complete()
    late = waiting.complete()
    assert (late.text, late.token_ids, late.finish_reason) == (alone.text, alone.token_ids, "stop")
    assert late.logprobs is not None
    assert len(late.logprobs) == len(late.token_ids)


def test_a_request_that_fails_leaves_the_others_running(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tiny.generate("ab", max_tokens=20).text
    good, bad = tiny.stream("ab", max_tokens=20), tiny.stream("cd", max_tokens=20)
    monkeypatch.setattr(tiny.engine._state[bad.sequence].sampler, "sample", lambda row: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bad.complete()
    assert good.complete().text == expected
    assert all_pages_are_free(tiny)


def test_unknown_and_bad_parameters_are_named(tiny: LLM) -> None:
    with pytest.raises(BadParameter, match="temprature"):
        tiny.generate("a", temprature=1)
    with pytest.raises(BadParameter, match="top_p"):
        tiny.generate("a", top_p=2)
    with pytest.raises(BadParameter, match="logit_bias"):
        tiny.generate("a", logit_bias={100000: 1.0})
    assert not tiny.engine.scheduler.has_work


def test_the_ledger_is_the_sum_of_the_receipts(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path)))
    receipts = [llm.generate("abc", max_tokens=n).receipt for n in (3, 9)]
    assert llm.ledger.requests == 2
    assert llm.ledger.visits == sum(receipt.visits.total for receipt in receipts)
    assert llm.ledger.joules == pytest.approx(sum(receipt.energy.joules for receipt in receipts))


def test_the_receipt_as_json_has_the_public_names(tiny: LLM) -> None:
    receipt = tiny.generate("a" * 100, max_tokens=20).receipt.to_dict()
    assert set(receipt) == {
        *("model", "prompt_tokens", "cached_tokens", "output_tokens", "policy", "visits", "kv", "weights", "flops"),
        *("seconds", "tokens_per_second", "energy", "quality", "guesses", "prefix", "adapter"),
    }
    assert set(receipt["visits"]) == {"prefill", "decode", "total", "dense", "saved", "rejected", "recomputed"}
    assert set(receipt["visits"]["saved"]) == {"window", "pages", "prefix"}
    assert receipt["visits"]["dense"] == receipt["visits"]["total"] + sum(receipt["visits"]["saved"].values())
    assert receipt["visits"]["saved"]["window"] > 0
    assert set(receipt["kv"]) == {
        "format",
        "bytes_read",
        "bytes_written",
        "bytes_held_peak",
        "rows_read",
        "bounds_read",
        "keys_listed",
    }
    assert set(receipt["seconds"]) == {"queue", "prefill", "decode", "first_token", "total"}
    assert set(receipt["energy"]) == {"joules", "low", "high", "source"}
    assert receipt["energy"]["low"] <= receipt["energy"]["joules"] <= receipt["energy"]["high"]


def test_a_base_model_refuses_chats(tmp_path: Path) -> None:
    llm = LLM(str(make_tiny_model(tmp_path, chat=False)))
    with pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_context_len_can_be_lowered_and_not_raised(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path))
    with pytest.raises(ContextOverflow, match="the context is 20"):
        LLM(folder, context_len=20).generate("x" * 21)
    with pytest.raises(BadParameter, match="512"):
        LLM(folder, context_len=513)
    with pytest.raises(BadParameter, match="threads"):
        LLM(folder, threads=0)


def test_models_that_cannot_be_loaded(tmp_path: Path, minilm_dir: Path) -> None:
    with pytest.raises(SourceError, match=r"config\.json"):
        LLM(str(tmp_path))
    with pytest.raises(UnsupportedModel, match="bert"):
        LLM(str(minilm_dir))
    folder = make_tiny_model(tmp_path / "torn")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(UnsupportedModel, match=r"layers\.2"):
        LLM(str(folder))
    (folder / "config.json").write_text(config.replace('"hidden_size": 32', '"hidden_size": 64'))
    with pytest.raises(UnsupportedModel, match="shape"):
        LLM(str(folder))


def test_results_are_frozen(tiny: LLM) -> None:
    answer = tiny.generate("a", max_tokens=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.text = "other"  # type: ignore[misc]


def test_a_long_conversation_is_cut_with_few_renderings(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": role, "content": f"{i} " * 3} for i in range(300) for role in ("user", "assistant")]
    messages.append({"role": "user", "content": "and now?"})
    calls = []
    encode_chat = tiny.encode_chat
    monkeypatch.setattr(tiny, "encode_chat", lambda *a: calls.append(a) or encode_chat(*a))
    kept = tiny.fit(list(messages), 200)
    assert len(calls) <= 11
    without = next(k for k in range(0, 600, 2) if len(encode_chat(messages[k:])) <= 200)
    assert kept == encode_chat(messages[without:])
