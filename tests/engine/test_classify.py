"""Classifiers from a folder to logits: recorded ones by ids, texts and pairs as the tokenizers package reads them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from heedful.engine.classify import ClassBatch, Classifier, cut_longest_first
from heedful.engine.embedder import load_embedder
from heedful.engine.encoder import trunk_facts
from heedful.engine.pooled import TextTooLong
from heedful.engine.torch_classify import class_logits
from heedful.errors import BadLogits, BadParameter, UnsupportedModel
from heedful.models.encoder_config import encoder_config_from_hf
from heedful.models.head_config import SequenceHeadConfig
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load_encoder import load_encoder

GOLDEN = Path(__file__).parent.parent / "golden" / "encoders"
CLASSIFIERS = ("bert_seqcls", "modernbert_seqcls_cls", "modernbert_seqcls_mean", "deberta_v2_seqcls")
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "sat", "on", "mat", "dog", "ran", "far", "away", "##s", "##ing"]
LETTERS = list("abcdefghijklmnopqrstuvwxyz.,!?")
LONGER: dict[str, Any] = {"max_position_embeddings": 96, "max_relative_positions": 64}
"""DeBERTa's recorded texts are longer than its config says; the same distances, room for 96 tokens."""
TEXTS = ["The cat sat.", "dogs ran, far away!", "on the mat?", "", "what"]
PAIRS = [("the cat", "sat on the mat"), ("Dogs!", "cat"), ("", "far"), ("away away", "")]


def tiny_tokenizer(family: str) -> tokenizers.Tokenizer:
    """WordPiece, or DeBERTa's kind: unigrams with marked word starts. Both put [CLS] and [SEP] around texts."""
    if family == "deberta-v2":
        pieces = [(mark, 0.0) for mark in MARKS] + [(f"▁{word}", -3.0) for word in WORDS if "#" not in word]
        pieces += [("▁", -5.0), *((letter, -4.0) for letter in LETTERS)]
        made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=1))
        made.normalizer = normalizers.NFKC()
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        vocabulary = {word: place for place, word in enumerate([*MARKS, *WORDS, *LETTERS])}
        made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        made.normalizer = normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(MARKS)
    second = 1 if family == "bert" else 0
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    assert made.get_vocab_size() <= 120
    return made


def model_folder(model: str, folder: Path, **changes: Any) -> tuple[Path, tokenizers.Tokenizer]:
    config = json.loads((GOLDEN / model / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / model / "model.safetensors", folder)
    made = tiny_tokenizer(config["model_type"])
    made.save(str(folder / "tokenizer.json"))
    return folder, made


def recorded(model: str) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    tensors = load_file(GOLDEN / model / "golden.safetensors")
    mask = tensors["attention_mask"].astype(bool)
    return tensors, [ids[seen].tolist() for ids, seen in zip(tensors["input_ids"], mask, strict=True)]


@pytest.mark.parametrize("model", [name for name in CLASSIFIERS if name != "bert_seqcls"])
def test_logits_of_ids_equal_the_recorded_ones(model: str, tmp_path: Path) -> None:
    """BERT's were recorded with token types, which ids alone do not carry: tests/models/ has them."""
    folder, _ = model_folder(model, tmp_path, **(LONGER if model.startswith("deberta") else {}))
    expected, ids = recorded(model)
    batch = Classifier.load(str(folder), threads=2).classify(ids)
    assert batch.logits.dtype == np.float32
    assert np.abs(batch.logits - expected["logits"]).max() < 1e-4
    assert batch.token_counts == (80, 37, 5)
    assert batch.labels == tuple(f"LABEL_{i}" for i in range(expected["logits"].shape[1]))


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_texts_and_pairs_are_read_as_the_tokenizers_package_reads_them(model: str, tmp_path: Path) -> None:
    folder, reference = model_folder(model, tmp_path)
    classifier = Classifier.load(str(folder), threads=2)
    encoded = [reference.encode(text) for text in TEXTS] + [reference.encode(*pair) for pair in PAIRS]
    batch = classifier.classify([*TEXTS, *PAIRS])
    assert batch.token_counts == tuple(len(one.ids) for one in encoded)
    trunk, head = classifier._run.args  # type: ignore[attr-defined]
    expected = np.concatenate([class_logits(trunk, head, [one.ids], [one.type_ids]) for one in encoded])
    assert np.abs(batch.logits - expected).max() < 1e-4
    assert np.abs(classifier.classify([list(pair) for pair in PAIRS]).logits - batch.logits[len(TEXTS) :]).max() < 1e-4


def test_the_second_text_has_its_own_token_type(tmp_path: Path) -> None:
    folder, reference = model_folder("bert_seqcls", tmp_path)
    classifier = Classifier.load(str(folder), threads=2)
    as_pair = classifier.classify([PAIRS[0]]).logits
    as_ids = classifier.classify([reference.encode(*PAIRS[0]).ids]).logits
    assert np.abs(as_pair - as_ids).max() > 0.01


def test_recorded_pairs_of_minilms_tokenizer(minilm_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(minilm_dir / "tokenizer.json")
    seen = _Seen()
    classifier = seen.classifier(tokenizer, 512)
    pairs = json.loads((GOLDEN / "minilm/wordpiece.json").read_text())["pairs"]
    classifier.classify([(pair["a"], pair["b"]) for pair in pairs])
    expected = sorted((pair["ids"], pair["token_type_ids"]) for pair in pairs)
    assert len(pairs) == 3
    assert sorted(zip(seen.ids, seen.types, strict=True)) == expected


class _Seen:
    """Keeps what a classifier would run."""

    def __init__(self) -> None:
        self.ids: list[Any] = []
        self.types: list[Any] = []

    def run(self, ids: list[Any], types: list[Any]) -> np.ndarray:
        self.ids += ids
        self.types += types
        return np.zeros((len(ids), 2), dtype=np.float32)

    def classifier(self, tokenizer: Tokenizer, context_len: int) -> Classifier:
        settings = json.loads((GOLDEN / "bert_mlm/config.json").read_text()) | {"max_position_embeddings": context_len}
        facts = trunk_facts(encoder_config_from_hf(settings))
        head = SequenceHeadConfig(48, ("a", "b"), None, "cls", "tanh")
        return Classifier("seen", tokenizer, facts, head, self.run)


# ---- lengths ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 20))
def test_pairs_are_cut_as_the_tokenizers_package_cuts_them(first: int, second: int, most: int) -> None:
    reference = tiny_tokenizer("bert")
    reference.enable_truncation(most)
    pair = (" ".join(WORDS[:9] * 2).split()[:first], " ".join(WORDS[8:0:-1] * 2).split()[:second])
    encoded = reference.encode(" ".join(pair[0]), " ".join(pair[1]))
    kept = cut_longest_first([first, second], most - 3)
    words = [
        [word for word, of in zip(encoded.ids, encoded.sequence_ids, strict=True) if of == which] for which in (0, 1)
    ]
    assert kept == [len(words[0]), len(words[1])]


def test_texts_that_are_too_long(tmp_path: Path) -> None:
    folder, reference = model_folder("bert_seqcls", tmp_path)
    reference.enable_truncation(96)
    classifier = Classifier.load(str(folder), threads=2)
    long: list[Any] = ["cat " * 95, ("dog " * 70, "mat " * 90), [5] * 97]
    for text, tokens in zip(long, (97, 163, 97), strict=True):
        with pytest.raises(TextTooLong, match=f"text 1 has {tokens} tokens and the model classifies at most 96"):
            classifier.classify(["fine", text])
    batch = classifier.classify(long, truncate=True)
    assert batch.token_counts == (96, 96, 96)
    assert batch.dropped_tokens == (1, 67, 1)
    assert batch.receipt.dropped_tokens == 69
    encoded = [reference.encode(long[0]), reference.encode(*long[1])]
    trunk, head = classifier._run.args  # type: ignore[attr-defined]
    expected = class_logits(trunk, head, [one.ids for one in encoded], [one.type_ids for one in encoded])
    assert np.abs(batch.logits[:2] - expected).max() < 1e-4


def test_a_model_without_room_for_its_marks(tmp_path: Path) -> None:
    made = tiny_tokenizer("bert")
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="marks alone"):
        _Seen().classifier(Tokenizer.from_file(tmp_path / "tokenizer.json"), 2)


# ---- what comes back --------------------------------------------------------------------------------------------


def batch_of(logits: list[list[float]], problem: Any, tmp_path: Path) -> ClassBatch:
    made = tiny_tokenizer("bert")
    made.save(str(tmp_path / "tokenizer.json"))
    facts = trunk_facts(encoder_config_from_hf(json.loads((GOLDEN / "bert_mlm/config.json").read_text())))
    head = SequenceHeadConfig(48, tuple("abc"[: len(logits[0])]), problem, "cls", "tanh")
    given = np.array(logits, dtype=np.float32)
    classifier = Classifier("given", Tokenizer.from_file(tmp_path / "tokenizer.json"), facts, head, lambda *_: given)
    return classifier.classify(["cat"] * len(logits))


def test_probabilities(tmp_path: Path) -> None:
    three = [[1.0, 2.0, 4.0], [1000.0, 0.0, -1000.0]]
    total = math.exp(1) + math.exp(2) + math.exp(4)
    for problem in (None, "single_label_classification"):
        shares = batch_of(three, problem, tmp_path).probabilities
        assert shares[0] == pytest.approx([math.exp(z) / total for z in three[0]], rel=1e-5)
        assert shares[1].tolist() == [1.0, 0.0, 0.0]
    several = batch_of(three, "multi_label_classification", tmp_path).probabilities
    assert several[0] == pytest.approx([1 / (1 + math.exp(-z)) for z in three[0]], rel=1e-5)
    assert several[1].tolist() == [1.0, 0.5, 0.0]
    assert several.dtype == np.float32
    assert batch_of([[2.0]], None, tmp_path).probabilities[0] == pytest.approx([1 / (1 + math.exp(-2))], rel=1e-5)
    assert batch_of([[2.5]], "regression", tmp_path).probabilities.tolist() == [[2.5]]


def test_numbers_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadLogits, match="no usable numbers"):
        batch_of([[float("nan"), 0.0]], None, tmp_path)


def test_labels_and_problem_type_come_from_the_config(tmp_path: Path) -> None:
    names = {"0": "entailment", "1": "neutral", "2": "contradiction"}
    changes = {"id2label": names, "problem_type": "multi_label_classification"}
    folder, _ = model_folder("deberta_v2_seqcls", tmp_path, **changes)
    batch = Classifier.load(str(folder), threads=2).classify([PAIRS[0]])
    assert batch.labels == ("entailment", "neutral", "contradiction")
    assert batch.problem_type == "multi_label_classification"


def test_no_texts(tmp_path: Path) -> None:
    folder, _ = model_folder("bert_seqcls", tmp_path)
    batch = Classifier.load(str(folder), threads=2).classify([])
    assert batch.logits.shape == batch.probabilities.shape == (0, 3)
    assert batch.receipt.visits.total == batch.receipt.weights.bytes_read == batch.receipt.steps == 0


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_the_receipt_counts_every_visit(model: str, tmp_path: Path) -> None:
    folder, _ = model_folder(model, tmp_path)
    receipt = Classifier.load(str(folder), threads=2).classify([[5] * 40, [6] * 3]).receipt
    modern = model.startswith("modernbert")
    heads, full, local = (3, 2, 2) if modern else (4, 2, 0)
    near = sum(abs(i - j) <= 8 for n in (40, 3) for i in range(n) for j in range(n))
    assert receipt.visits.total == heads * (full * (40**2 + 3**2) + local * near)
    assert receipt.visits.dense == heads * (full + local) * (40**2 + 3**2)
    assert receipt.visits.saved.window == receipt.visits.dense - receipt.visits.total
    config = load_encoder(str(folder)).config
    classes = 2 if model == "modernbert_seqcls_cls" else 3
    head_weights = 48 * 48 + 48 * classes
    assert receipt.weights.bytes_read == 4 * (config.linear_weights + head_weights)
    assert receipt.flops.linear == 2 * (43 * config.linear_weights + 2 * head_weights)
    assert receipt.flops.attention == 4 * config.head_dim * receipt.visits.total
    assert (receipt.texts, receipt.prompt_tokens, receipt.steps) == (2, 43, 1)


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("one text", "is str, not a list"),
        ([5], "text 0 is neither"),
        ([("a", "b", "c")], "text 0 is neither"),
        ([("a", 5)], "text 0 is neither"),
        (["a", []], "text 1 has no tokens"),
        ([[120]], "token id 120 is not in the vocabulary of 120"),
        ([[True]], "text 0 is neither"),
    ],
)
def test_what_is_no_text(texts: Any, said: str, tmp_path: Path) -> None:
    folder, _ = model_folder("bert_seqcls", tmp_path)
    with pytest.raises(BadParameter, match=said):
        Classifier.load(str(folder), threads=2).classify(texts)


def test_models_without_a_classifier(tmp_path: Path) -> None:
    folder, _ = model_folder("modernbert", tmp_path)
    with pytest.raises(UnsupportedModel, match="no classifier"):
        Classifier.load(str(folder))
    with pytest.raises(BadParameter, match="threads"):
        Classifier.load(str(folder), threads=0)


# ---- vectors of the same trunks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["modernbert", "deberta_v2"])
def test_embeddings_are_the_mean_of_the_recorded_states(model: str, tmp_path: Path) -> None:
    folder, _ = model_folder(model, tmp_path, **(LONGER if model.startswith("deberta") else {}))
    expected, ids = recorded(model)
    batch = load_embedder(folder, threads=2).embed(ids, normalize=False)
    means = [states[: len(text)].mean(0) for states, text in zip(expected["last_hidden_state"], ids, strict=True)]
    assert np.abs(batch.vectors - np.stack(means)).max() < 1e-4


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_a_classifiers_trunk_embeds_too(model: str, tmp_path: Path) -> None:
    folder, reference = model_folder(model, tmp_path)
    vectors = load_embedder(folder, threads=2).embed(TEXTS, normalize=False).vectors
    as_ids = load_embedder(folder, threads=2).embed([reference.encode(text).ids for text in TEXTS], normalize=False)
    assert np.abs(vectors - as_ids.vectors).max() < 1e-5
