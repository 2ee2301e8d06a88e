"""Which tokens are trained on when: the shuffle, segments, batches, visits, and the files behind them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import small_settings, write_documents

from heedful.errors import BadParameter, FileFormatError
from heedful.kernels.reference import attention_mask
from heedful.text.tokenizer import Tokenizer
from heedful.train.batches import Segment, Segments, TrainingData, arrays, in_parts, visits
from heedful.train.corpus import END, documents, write_tokenizer
from heedful.train.loop import complete
from heedful.train.order import Permutation
from heedful.train.shape import model_config
from heedful.train.token_store import TokenStore, write_store

END_ID = 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.text(max_size=8))
def test_the_shuffle_is_a_permutation(n: int, key: str) -> None:
    assert sorted(Permutation(n, key)) == list(range(n))


def test_the_shuffle_depends_on_its_key_and_moves_nearly_all() -> None:
    first, second = list(Permutation(1000, "a")), list(Permutation(1000, "b"))
    assert first != second
    for shuffled in (first, second):
        assert sum(i == x for i, x in enumerate(shuffled)) < 10
    assert Permutation(1 << 40, "far")[(1 << 40) - 1] < 1 << 40, "nothing is listed"
    with pytest.raises(IndexError):
        Permutation(5, "a")[5]


def test_a_place_of_the_shuffle_is_random() -> None:
    """Over many keys, item 0 of 8 comes to every place about as often (χ² with 7 degrees of freedom)."""
    found = Counter(Permutation(8, f"key {i}")[0] for i in range(4000))
    assert sum((found[place] - 500) ** 2 / 500 for place in range(8)) < 24.3  # p = 0.001


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, (), 259)
    return Tokenizer.from_file(folder / "tokenizer.json")


def store_of(folder: Path, texts: list[str], tokenizer: Tokenizer) -> TokenStore:
    return write_store(folder / "store", texts, tokenizer, END_ID)


def data_of(store: TokenStore, *, context_len: int = 8, batch_tokens: int = 20, share: float = 0.2) -> TrainingData:
    return TrainingData(
        store, context_len=context_len, batch_tokens=batch_tokens, seed=3, validation_share=share, validation=None
    )


def test_documents_lie_between_end_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = store_of(tmp_path, ["ab", "c", "def"], tokenizer)
    ids = {text: tokenizer.encode(text, add_bos=False) for text in ("ab", "c", "def")}
    assert store.tokens.tolist() == [0, *ids["ab"], 0, *ids["c"], 0, *ids["def"], 0]
    assert store.starts.tolist() == [0, 3, 5, 9]
    assert store.facts.text_bytes == 6


def test_every_token_is_a_target_once_an_epoch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["x" * n for n in (1, 7, 8, 9, 30, 16, 2, 3)]
    store = store_of(tmp_path, texts, tokenizer)
    data, seen, cursor = data_of(store), Counter[int](), 0
    whole_epochs = 3
    segments: list[Segment] = []
    while cursor < whole_epochs * data.epoch_segments:
        batch = data.batch(cursor)
        assert 0 < batch.tokens <= 20
        segments += batch.segments
        cursor = batch.cursor
    for segment in segments[: whole_epochs * data.epoch_segments]:
        seen.update(range(segment.start + 1, segment.start + segment.length + 1))
    for segment in data.validation_segments:
        seen.update(dict.fromkeys(range(segment.start + 1, segment.start + segment.length + 1), whole_epochs))
    assert seen == dict.fromkeys(range(1, len(store.tokens)), whole_epochs)


def test_segments_are_as_few_and_as_equal_as_fit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = store_of(tmp_path, ["x" * n for n in range(1, 40)], tokenizer)
    for document in range(39):
        lengths = [s.length for s in Segments(store, 8) if s.document == document]
        assert sum(lengths) == document + 2
        assert len(lengths) == -(-(document + 2) // 8)
        assert 2 <= max(lengths) <= 8
        assert max(lengths) - min(lengths) <= 1


def test_epochs_and_seeds_have_orders_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = store_of(tmp_path, ["x" * 7 for _ in range(40)], tokenizer)
    first = data_of(store, batch_tokens=8 * 32)
    orders = [tuple(segment.start for segment in first.batch(32 * epoch).segments) for epoch in range(3)]
    other = TrainingData(store, context_len=8, batch_tokens=8 * 32, seed=4, validation_share=0.2)
    assert len({*orders, tuple(segment.start for segment in other.batch(0).segments)}) == 4
    assert len({tuple(sorted(order)) for order in orders}) == 1, "of the same segments"
    assert other.validation_segments == first.validation_segments, "what is kept apart does not depend on the seed"


def test_a_batch_is_found_without_those_before_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = store_of(tmp_path, ["x" * (n % 13 + 1) for n in range(50)], tokenizer)
    walked, cursor = [], 0
    for _ in range(30):
        walked.append((cursor, data_of(store).batch(cursor)))
        cursor = walked[-1][1].cursor
    for cursor, batch in reversed(walked):
        assert data_of(store).batch(cursor) == batch


def test_parts_are_the_same_segments_and_about_as_long() -> None:
    segments = [Segment(i, 10 * i, length) for i, length in enumerate((8, 3, 5, 8, 8, 2, 1, 6, 8, 4))]
    for parts in range(1, 14):
        found = in_parts(segments, parts)
        assert len(found) <= parts
        assert Counter(segment for part in found for segment in part) == Counter(segments)
        assert max(sum(s.length for s in part) for part in found) <= 53 / parts + 8
        assert all(part == sorted(part, key=lambda s: s.length) for part in found)


def test_arrays_restart_positions_and_shift_targets(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = store_of(tmp_path, ["abcdefghij", "kl"], tokenizer)
    segments = list(Segments(store, 8))
    assert [(s.document, s.start, s.length) for s in segments] == [(0, 0, 5), (0, 5, 6), (1, 11, 3)]
    made = arrays(store, segments)
    ids = store.tokens.astype(int).tolist()
    assert made.token_ids.tolist() == ids[0:5] + ids[5:11] + ids[11:14]
    assert made.targets.tolist() == ids[1:6] + ids[6:12] + ids[12:15]
    assert made.positions.tolist() == [*range(5), *range(6), *range(3)]
    assert made.lengths == [5, 6, 3]


def test_visits_are_those_of_the_masks() -> None:
    config = model_config(complete(small_settings(Path("x"))).model, 300)
    segments = [Segment(0, 0, 20), Segment(1, 20, 5), Segment(2, 25, 32)]
    masks = [
        attention_mask(0, segment.length, 0, segment.length, window)
        for segment, window in product(segments, config.windows)
    ]
    assert config.windows == (8, None)
    assert visits(segments, config) == config.num_heads * sum(int(mask.sum()) for mask in masks)


def test_what_is_encoded_is_the_text_to_the_byte(tmp_path: Path) -> None:
    texts = ["Ein Käse für 3 €,\r\n\tbitte!  ", "\ufeffabc\u0301 中文 😀", f"{END} is text here", " the the the cat"]
    write_tokenizer(tmp_path, texts * 3, 300)
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert 259 < tokenizer.vocab_size <= 300
    for text in texts:
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text
        assert sum(len(tokenizer.token_bytes(i)) for i in ids) == len(text.encode())
        assert not set(ids) & tokenizer.special_ids
        assert tokenizer.encode(text) == [tokenizer.id_of(END), *ids]
    assert tokenizer.id_of(END) == END_ID


def test_files_become_documents(tmp_path: Path) -> None:
    plain, lines, empty = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.txt"
    plain.write_bytes(b"one\r\ntwo\n")
    lines.write_text('{"text": "x"}\n\n{"text": ""}\n{"text": "y \\ud800", "id": 3}\n')
    empty.write_text("")
    assert list(documents([plain, lines, empty])) == ["one\r\ntwo\n", "x", "y \ufffd"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xff", r"not UTF-8 text \(byte 2\)"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2 of .* has no text"),
        ("a.jsonl", b'["x"]\n', "line 1 of .* has no text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1 of .* is no JSON"),
        ("a.jsonl", b"[" * 100000, "line 1 of .* is no JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 of .* is no JSON"),
    ],
)
def test_data_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadParameter, match=message):
        list(documents([tmp_path / name]))
    with pytest.raises(BadParameter, match="No such file"):
        list(documents([tmp_path / "nowhere" / name]))


def test_no_text_and_too_little_text_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="holds no text"):
        write_store(tmp_path / "none", [], tokenizer, END_ID)
    store = store_of(tmp_path, ["abc"], tokenizer)
    with pytest.raises(BadParameter, match="cannot be shared"):
        data_of(store)
    assert data_of(store, share=0.0).validation_segments == []


def test_a_damaged_store_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store_of(tmp_path, ["abc"], tokenizer)
    facts = json.loads((folder / "store.json").read_text())
    for broken in ("{", "[]", json.dumps(facts | {"dtype": "x"}), json.dumps(facts | {"tokens": 9})):
        (folder / "store.json").write_text(broken)
        with pytest.raises(FileFormatError, match="is not the data that was written"):
            TokenStore.open(folder)


def test_many_documents_are_written_in_pieces(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.train.token_store._BUFFERED_TOKENS", 5)
    texts = ["x" * (n % 7 + 1) for n in range(30)]
    pieces = store_of(tmp_path / "a", texts, tokenizer)
    monkeypatch.undo()
    whole = store_of(tmp_path / "b", texts, tokenizer)
    assert np.array_equal(pieces.tokens, whole.tokens)
    assert np.array_equal(pieces.starts, whole.starts)
    assert pieces.facts == whole.facts


def test_documents_of_the_cases_have_many_lengths(tmp_path: Path) -> None:
    assert len({len(text) for text in documents([write_documents(tmp_path / "t.jsonl")])}) > 20
