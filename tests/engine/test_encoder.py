"""Embeddings: MiniLM against recorded vectors, decoders against their own logits, and what every text costs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from heedful.cost.energy import Energy
from heedful.cost.formulas import Shape, encoder_cost, prefill_cost
from heedful.cost.shapes import KNOWN
from heedful.engine.decoder_embedder import DecoderEmbedder
from heedful.engine.embedder import load_embedder
from heedful.engine.encoder import Encoder
from heedful.engine.engine import Engine
from heedful.engine.pooled import STEP_TOKENS, EmbeddingBatch, TextTooLong, plan_steps
from heedful.engine.torch_embed import embed_with_decoder, make_decoder, pool
from heedful.engine.torch_runner import TorchRunner
from heedful.errors import BadLogits, BadParameter, ContextOverflow, SourceError, UnsupportedModel
from heedful.kernels.text_attention import CausalTextAttend
from heedful.models.pooling import Pooling
from heedful.request import Request, SamplingParams
from heedful.testing import make_tiny_model
from heedful.weights.load import load
from heedful.weights.sentence_files import read_pooling

GOLDEN = Path(__file__).parent.parent / "golden"
SENTENCES = json.loads((GOLDEN / "encoders/minilm/sentences.json").read_text())["sentences"]
TEXTS = [sentence["text"] for sentence in SENTENCES]
LAYERS, HEADS, HIDDEN, MLP = 6, 12, 384, 1536


@pytest.fixture(scope="module")
def minilm(minilm_dir: Path) -> Encoder:
    return Encoder.load(str(minilm_dir), threads=2)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "encoders/minilm/golden.safetensors")


@pytest.fixture
def sentence_model(minilm_dir: Path, tmp_path: Path) -> Path:
    """MiniLM in a folder whose small files a test may change."""
    for file in minilm_dir.iterdir():
        if file.name == "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
        elif file.suffix == ".json":
            shutil.copy(file, tmp_path)
    shutil.copytree(minilm_dir / "1_Pooling", tmp_path / "1_Pooling")
    return tmp_path


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


# ---- MiniLM -----------------------------------------------------------------------------------------------------


def test_vectors_equal_the_recorded_ones(minilm: Encoder, recorded: dict[str, np.ndarray]) -> None:
    batch = minilm.embed(TEXTS, truncate=True)
    assert batch.vectors.dtype == np.float32
    assert np.abs(batch.vectors - recorded["embeddings"]).max() < 1e-5
    assert np.abs(batch.vectors @ batch.vectors.T - recorded["cosine"]).max() < 1e-5
    assert batch.token_counts == tuple(len(sentence["ids"]) for sentence in SENTENCES)
    dropped = tuple(sentence["untruncated_length"] - len(sentence["ids"]) for sentence in SENTENCES)
    assert batch.dropped_tokens == dropped
    assert sum(dropped) == batch.receipt.dropped_tokens > 0


def test_each_text_alone_has_the_vector_that_it_has_among_others(minilm: Encoder) -> None:
    together = minilm.embed(TEXTS, truncate=True).vectors
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.abs(minilm.embed([text], truncate=True).vectors[0] - vector).max() < 1e-6


def test_the_order_of_texts_and_the_steps_change_nothing(minilm: Encoder) -> None:
    many = [f"{'word ' * (i * 37 % 200)}{i}" for i in range(60)]
    batch = minilm.embed(many)
    assert batch.receipt.steps == math.ceil(sum(batch.token_counts) / STEP_TOKENS) > 1
    turned = minilm.embed(many[::-1])
    assert np.abs(batch.vectors - turned.vectors[::-1]).max() < 1e-6
    assert batch.token_counts == turned.token_counts[::-1]


def test_token_ids_are_taken_as_they_are(minilm: Encoder, recorded: dict[str, np.ndarray]) -> None:
    batch = minilm.embed([sentence["ids"] for sentence in SENTENCES])
    assert np.abs(batch.vectors - recorded["embeddings"]).max() < 1e-5
    assert batch.dropped_tokens == (0,) * len(SENTENCES)
    without_marks = minilm.embed([SENTENCES[0]["ids"][1:-1]])
    assert without_marks.token_counts == (len(SENTENCES[0]["ids"]) - 2,)


def test_no_texts(minilm: Encoder) -> None:
    batch = minilm.embed([])
    assert batch.vectors.shape == (0, HIDDEN)
    assert (batch.token_counts, batch.dropped_tokens) == ((), ())
    receipt = batch.receipt.to_dict()
    assert receipt["visits"]["total"] == receipt["weights"]["bytes_read"] == receipt["energy"]["joules"] == 0


def test_the_empty_text_is_its_two_marks(minilm: Encoder) -> None:
    batch = minilm.embed(["", " \n"])
    assert batch.token_counts == (2, 2)
    assert np.abs(batch.vectors - minilm.embed([[101, 102]]).vectors).max() < 1e-6


def test_control_tokens_and_odd_unicode_are_text(minilm: Encoder) -> None:
    batch = minilm.embed(["[CLS] [SEP]", "\ud800 lone", "\ufffd lone", "\ud83d\ude00", "😀", "e\u0301", "\u00e9", "\0"])
    assert batch.token_counts[0] > 4
    for one, other in ((1, 2), (3, 4), (5, 6)):
        assert np.abs(batch.vectors[one] - batch.vectors[other]).max() < 1e-6
    assert np.isfinite(batch.vectors).all()


def test_a_text_that_is_too_long_is_refused_with_both_numbers(minilm: Encoder) -> None:
    texts = ["short", "word " * 254, "word " * 255]
    assert minilm.max_tokens == 256
    assert minilm.embed(texts[:2]).token_counts == (3, 256)
    with pytest.raises(ContextOverflow, match="text 2 has 257 tokens and the model embeds at most 256") as raised:
        minilm.embed(texts)
    assert isinstance(raised.value, TextTooLong)
    assert (raised.value.index, raised.value.prompt_tokens, raised.value.context_len) == (2, 257, 256)
    assert "truncate=True" in raised.value.remedy
    cut = minilm.embed(texts, truncate=True)
    assert (cut.token_counts, cut.dropped_tokens) == ((3, 256, 256), (0, 0, 1))
    assert np.abs(cut.vectors[1] - cut.vectors[2]).max() < 1e-6
    ids = [101] + [2773] * 300  # no mark at its end, so none stands there after the cut
    assert np.abs(minilm.embed([ids], truncate=True).vectors - minilm.embed([ids[:256]]).vectors).max() < 1e-6


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("one string", "is str, not a list"),
        (b"bytes", "is bytes, not a list"),
        (None, "is NoneType, not a list"),
        (["a", 5], "text 1 is neither a string nor a list of token ids"),
        (["a", b"b"], "text 1 is neither"),
        ([[1, 2.0]], "text 0 is neither"),
        ([[True]], "text 0 is neither"),
        ([[101, 30522]], "text 0: token id 30522 is not in the vocabulary of 30,522"),
        ([[-1]], "token id -1"),
        ([[]], "text 0 has no tokens"),
    ],
)
def test_what_is_no_text_is_named(minilm: Encoder, texts: Any, said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        minilm.embed(texts)


def test_every_visit_is_counted(minilm: Encoder) -> None:
    batch = minilm.embed(["a", "one two three", [101, 102, 7, 7]])  # 3, 5 and 4 tokens
    receipt = batch.receipt
    assert batch.token_counts == (3, 5, 4)
    assert receipt.visits.total == receipt.visits.dense == LAYERS * HEADS * (9 + 25 + 16)
    weights = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * MLP)
    assert (receipt.steps, receipt.weights.bytes_read) == (1, 4 * weights)
    assert receipt.flops.linear == 2 * weights * 12
    assert receipt.flops.attention == 4 * 32 * receipt.visits.total
    assert (receipt.texts, receipt.prompt_tokens, receipt.dropped_tokens) == (3, 12, 0)
    assert 0 < receipt.seconds.prefill <= receipt.seconds.total
    assert 0 < receipt.energy.low <= receipt.energy.joules <= receipt.energy.high


def test_paper_and_receipt_agree(minilm: Encoder) -> None:
    paper = encoder_cost(KNOWN["minilm"].shape(), 256)
    receipt = minilm.embed(["word " * 254]).receipt
    assert receipt.visits.total == paper.visits
    assert (receipt.flops.linear, receipt.flops.attention) == (paper.linear_flops, paper.attention_flops)
    assert paper.weight_bytes_read is not None
    assert receipt.weights.bytes_read == paper.weight_bytes_read["f32"]


def test_the_receipt_as_json_and_as_a_line(minilm: Encoder) -> None:
    receipt = minilm.embed(["a"]).receipt
    shown = json.loads(json.dumps(receipt.to_dict()))
    assert shown["visits"] == {"total": 648, "dense": 648, "saved": {"window": 0, "pages": 0, "prefix": 0}}
    assert shown["energy"]["source"] in ("estimated", "measured:rapl")
    assert shown["tokens_per_second"]["prefill"] > 0
    assert receipt.line().startswith("1 text, 3 in · ")
    assert "648 visits of 648 dense · weights 42.5 MB" in receipt.line()


# ---- what the files beside a model ask for ----------------------------------------------------------------------


def test_pooling_of_minilm(minilm_dir: Path) -> None:
    assert read_pooling(minilm_dir) == Pooling("mean", normalize=True, max_tokens=256)


def test_the_first_tokens_state(sentence_model: Path, recorded: dict[str, np.ndarray]) -> None:
    flags = {"word_embedding_dimension": 384, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_json(sentence_model / "1_Pooling" / "config.json", flags)
    write_json(sentence_model / "sentence_bert_config.json", {"max_seq_length": 20})
    modules = json.loads((sentence_model / "modules.json").read_text())
    write_json(sentence_model / "modules.json", modules[:2])
    encoder = Encoder.load(str(sentence_model))
    assert encoder.pooling == Pooling("cls", normalize=False, max_tokens=20)
    state = recorded["last_hidden_state_0"][0]
    assert np.abs(encoder.embed(TEXTS[:1], normalize=False).vectors[0] - state).max() < 1e-4
    assert np.abs(encoder.embed(TEXTS[:1]).vectors[0] - state / np.linalg.norm(state)).max() < 1e-5
    with pytest.raises(ContextOverflow, match="27 tokens and the model embeds at most 20"):
        encoder.embed(TEXTS[4:5])


def test_a_model_that_normalises_itself_does_so_anyway(minilm: Encoder) -> None:
    assert np.abs(minilm.embed(["a"], normalize=False).vectors - minilm.embed(["a"]).vectors).max() == 0


def test_a_plain_bert_is_pooled_by_the_mean_up_to_its_context(
    sentence_model: Path, recorded: dict[str, np.ndarray]
) -> None:
    (sentence_model / "modules.json").unlink()
    (sentence_model / "sentence_bert_config.json").unlink()
    encoder = Encoder.load(str(sentence_model))
    assert (encoder.pooling, encoder.max_tokens) == (Pooling(), 512)
    mean = recorded["last_hidden_state_3"].mean(axis=0)
    assert np.abs(encoder.embed(TEXTS[3:4], normalize=False).vectors[0] - mean).max() < 1e-4
    last = Encoder.load(str(sentence_model), pooling="last").embed(TEXTS[3:4], normalize=False).vectors[0]
    assert np.abs(last - recorded["last_hidden_state_3"][-1]).max() < 1e-4


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pools by pooling_mode_mean_tokens, pooling_mode_cls_token",
        ),
        ("1_Pooling/config.json", {}, "pools by nothing"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pools by weightedmean"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "'Dense'"),
        ("sentence_bert_config.json", {"max_seq_length": "256"}, "max_seq_length is 256"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0"),
        ("sentence_bert_config.json", {"max_seq_length": 1}, "its own marks alone are more"),
        ("modules.json", [{"type": "x.Pooling", "path": "../up"}], "'../up'"),
        ("modules.json", [{"path": "1_Pooling"}], "is no list of modules"),
        ("modules.json", 5, "is no list of modules"),
    ],
)
def test_files_that_ask_for_something_else(sentence_model: Path, file: str, content: Any, said: str) -> None:
    write_json(sentence_model / file, content)
    with pytest.raises((UnsupportedModel, SourceError), match=said):
        Encoder.load(str(sentence_model))


@pytest.mark.parametrize(("word", "mode"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")])
def test_newer_files_name_the_mode_by_a_word(sentence_model: Path, word: str, mode: str) -> None:
    write_json(sentence_model / "1_Pooling" / "config.json", {"pooling_mode": word, "include_prompt": True})
    assert read_pooling(sentence_model).mode == mode


def test_a_model_that_wants_lower_case_gets_it(sentence_model: Path) -> None:
    tokenizer = json.loads((sentence_model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    write_json(sentence_model / "tokenizer.json", tokenizer)
    cased = Encoder.load(str(sentence_model)).embed(["LONDON", "london"]).vectors
    write_json(sentence_model / "sentence_bert_config.json", {"do_lower_case": True})
    lowered = Encoder.load(str(sentence_model)).embed(["LONDON", "london"]).vectors
    assert np.abs(cased[0] - cased[1]).max() > 0.01
    assert np.abs(lowered - cased[1]).max() < 1e-6


def test_weights_that_compute_nothing_usable(minilm: Encoder) -> None:
    broken = Encoder(
        "broken", minilm.tokenizer, Pooling(), minilm.facts, lambda ids, mode: np.full((len(ids), HIDDEN), np.nan)
    )
    with pytest.raises(BadLogits, match="broken computes no usable numbers"):
        broken.embed(["a"])


# ---- decoders ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), sliding_window=8))


def last_logits(runner: TorchRunner, ids: list[int]) -> np.ndarray:
    """Of a prompt, as the engine's plain runner computes them."""
    engine = Engine(runner, model_name="tiny", context_len=512, eos_ids=())
    engine.add(Request(tuple(ids), SamplingParams(max_tokens=1)))
    return runner.run(engine.scheduler.schedule())[0]


def test_the_head_makes_the_runners_logits_of_a_decoders_hidden_states(tiny: str) -> None:
    loaded = load(tiny)
    decoder = make_decoder(loaded.config, loaded.weights, threads=2)
    texts = [[5, 9, 13] * 7, [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    runner = TorchRunner(loaded.config, loaded.weights, capacity_tokens=512, threads=2)
    hidden = embed_with_decoder(decoder, texts, "last")
    logits = decoder.logits(torch.from_numpy(hidden)).numpy()
    for ids, found in zip(texts, logits, strict=True):
        assert np.abs(found - last_logits(runner, ids)).max() < 1e-4


@pytest.mark.parametrize("family", sorted(folder.name for folder in (GOLDEN / "tiny_decoders").iterdir()))
def test_the_head_makes_the_recorded_logits_of_every_family(family: str) -> None:
    from heedful.models.config import config_from_hf
    from heedful.weights import names
    from heedful.weights.safetensors_file import read_safetensors

    folder = GOLDEN / "tiny_decoders" / family
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    decoder = make_decoder(config, names.from_hf(read_safetensors(folder), config), threads=2)
    expected = load_file(folder / "golden.safetensors")
    hidden = embed_with_decoder(decoder, expected["input_ids"].tolist(), "last")
    logits = decoder.logits(torch.from_numpy(hidden)).numpy()
    assert np.abs(logits - expected["logits"][:, -1]).max() < 5e-4


def test_a_decoders_text_is_the_mean_of_its_tokens_states(tiny: str) -> None:
    embedder = load_embedder(tiny)
    loaded = load(tiny)
    decoder = make_decoder(loaded.config, loaded.weights, threads=2)
    ids = torch.tensor(loaded.tokenizer.encode("some text"))
    hidden = decoder(ids, torch.arange(len(ids)), CausalTextAttend([len(ids)])).numpy()
    mean = hidden.mean(axis=0)
    batch = embedder.embed(["other", "some text", "a"])
    assert batch.token_counts == (5, 9, 1)
    assert np.abs(batch.vectors[1] - mean / np.linalg.norm(mean)).max() < 1e-5
    assert np.abs(embedder.embed(["some text"], normalize=False).vectors[0] - mean).max() < 1e-4
    last = load_embedder(tiny, pooling="last").embed(["some text"], normalize=False)
    assert np.abs(last.vectors[0] - hidden[-1]).max() < 1e-4
    first = load_embedder(tiny, pooling="cls").embed(["some text"], normalize=False)
    assert np.abs(first.vectors[0] - hidden[0]).max() < 1e-4


def test_a_decoders_visits(tiny: str) -> None:
    receipt = load_embedder(tiny).embed(["x" * 20, "yyy"]).receipt
    total = 2 * 4 * (sum(min(i, 8) for i in range(1, 21)) + 1 + 2 + 3)  # two layers of four heads, window 8
    dense = 2 * 4 * (20 * 21 // 2 + 6)
    assert (receipt.visits.total, receipt.visits.dense) == (total, dense)
    assert receipt.visits.saved.window == dense - total
    paper = prefill_cost(Shape.from_config(load(tiny).config), 20)
    alone = load_embedder(tiny).embed(["x" * 20]).receipt
    assert (alone.visits.total, alone.visits.dense) == (paper.visits, paper.dense_visits)


def test_a_decoders_limits(tiny: str) -> None:
    embedder = load_embedder(tiny)
    assert (embedder.dimensions, embedder.max_tokens) == (32, 512)
    with pytest.raises(BadParameter, match="text 1 has no tokens"):
        embedder.embed(["a", ""])
    with pytest.raises(ContextOverflow, match="text 0 has 513 tokens and the model embeds at most 512"):
        embedder.embed(["x" * 513])
    cut = embedder.embed(["x" * 513, "x" * 512], truncate=True)
    assert (cut.token_counts, cut.dropped_tokens) == ((512, 512), (1, 0))
    assert np.abs(cut.vectors[0] - cut.vectors[1]).max() < 1e-6


def test_a_decoder_made_for_embeddings_pools_as_its_files_say(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    write_json(folder / "modules.json", modules)
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True})
    embedder = DecoderEmbedder.load(str(folder))
    assert embedder.pooling.mode == "last"


# ---- the way in -------------------------------------------------------------------------------------------------


def test_the_models_config_decides(minilm_dir: Path, tiny: str) -> None:
    assert type(load_embedder(minilm_dir)) is Encoder
    assert type(load_embedder(tiny)) is DecoderEmbedder
    named = load_embedder("minilm")
    assert (named.name, named.dimensions, named.max_tokens) == ("minilm", 384, 256)


def test_what_cannot_be_loaded(tmp_path: Path, tiny: str) -> None:
    with pytest.raises(SourceError, match=r"config\.json"):
        load_embedder(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": "modernbert"})
    with pytest.raises(UnsupportedModel, match="modernbert"):
        load_embedder(tmp_path)
    for bad in ({"threads": 0}, {"threads": True}, {"pooling": "max"}):
        with pytest.raises(BadParameter, match=next(iter(bad))):
            load_embedder(tiny, **bad)
    with pytest.raises(BadParameter, match="model"):
        load_embedder(5)  # type: ignore[arg-type]


def test_without_torch_the_remedy_is_named_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for load_one in (load_embedder, Encoder.load, DecoderEmbedder.load):
        with pytest.raises(UnsupportedModel, match="not installed") as raised:
            load_one("minilm")
        assert raised.value.remedy == "pip install 'heedful[torch]'"
    assert not list(tmp_path.iterdir())


# ---- steps and pooling ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 2 * STEP_TOKENS), max_size=40))
def test_every_text_is_in_one_step_and_no_step_is_too_long(lengths: list[int]) -> None:
    steps = plan_steps(lengths)
    assert sorted(index for step in steps for index in step) == list(range(len(lengths)))
    for step in steps:
        assert len(step) == 1 or sum(lengths[index] for index in step) <= STEP_TOKENS


def test_texts_of_one_length_are_neighbours() -> None:
    assert plan_steps([5, 3, 5, STEP_TOKENS, 3]) == [[1, 4, 0, 2], [3]]


def test_a_line_of_large_and_of_no_numbers(minilm: Encoder) -> None:
    receipt = minilm.embed([]).receipt
    assert receipt.line() == "0 texts, 0 in · 0 visits of 0 dense · weights 0 B · ~0 J (estimated 0–0)"
    dear = dataclasses.replace(receipt, texts=2000, energy=Energy(64.2, 32.1, 1604.0, "estimated"))
    assert dear.line().startswith("2,000 texts, ")
    assert dear.line().endswith("~64 J (estimated 32–1,604)")


def test_pooling_by_hand() -> None:
    hidden = torch.tensor([[1.0, 2], [3, 4], [5, 9]])
    assert pool(hidden, [2, 1], "mean").tolist() == [[2, 3], [5, 9]]
    assert pool(hidden, [2, 1], "cls").tolist() == [[1, 2], [5, 9]]
    assert pool(hidden, [2, 1], "last").tolist() == [[3, 4], [5, 9]]


def test_batches_are_frozen(minilm: Encoder) -> None:
    batch = minilm.embed(["a"])
    assert isinstance(batch, EmbeddingBatch)
    with pytest.raises(AttributeError):
        batch.token_counts = ()  # type: ignore[misc]
