"""The heap against the definition: join the best-scored neighbours for as long as any can be joined."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.text.sentencepiece import SPACE, ScoredBPE
from heedful.text.tokenizer import Tokenizer
from heedful.weights.gguf_file import read_gguf

BYTE_IDS = list(range(256))


def merged_by_definition(text: str, scores: dict[str, float]) -> list[str]:
    parts = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


@given(
    pieces=st.lists(st.text("ab" + SPACE, min_size=1, max_size=5), unique=True, max_size=14),
    scores=st.lists(st.integers(-4, 0), min_size=14, max_size=14),
    text=st.text("ab \n", max_size=40),
)
def test_merges_in_the_order_of_scores(pieces: list[str], scores: list[int], text: str) -> None:
    pieces = [*"ab\n", SPACE, *(p for p in pieces if len(p) > 1)]
    floats = [0.0] * 256 + [0.0] * 4 + [float(s) for s in scores]
    ids = {piece: 256 + i for i, piece in enumerate(pieces)}
    bpe = ScoredBPE(ids, floats, BYTE_IDS, whole={}, space_prefix=False)
    expected = merged_by_definition(text.replace(" ", SPACE), {piece: floats[i] for piece, i in ids.items()})
    assert bpe.encode(text) == [ids[piece] for piece in expected]


def test_characters_without_a_piece_become_bytes() -> None:
    bpe = ScoredBPE({"a": 256}, [0.0] * 257, BYTE_IDS, whole={}, space_prefix=False)
    assert bpe.encode("aé\0") == [256, 0xC3, 0xA9, 0]


def test_pieces_that_hold_an_inner_space_are_not_cut() -> None:
    pieces = {">": 256, SPACE: 257, f">{SPACE}": 258, "\n": 259, f"\n{SPACE}": 260}
    bpe = ScoredBPE(pieces, [0.0] * 261, BYTE_IDS, whole={}, space_prefix=False)
    assert bpe.encode("> \n  ") == [258, 260, 257]


def test_space_prefix_stands_at_the_start_and_after_whole_tokens() -> None:
    ids = {"a": 256, SPACE: 257, f"{SPACE}a": 258}
    bpe = ScoredBPE(ids, [0.0] * 260, BYTE_IDS, whole={"<t>": 259}, space_prefix=True)
    assert bpe.encode("a<t>a a<t>") == [258, 259, 258, 258, 259]


def test_space_prefix_equals_llama_cpp(gemma_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(read_gguf(gemma_path).metadata | {"tokenizer.ggml.add_space_prefix": True})
    recorded = json.loads((Path(__file__).parent / "llama_cpp_ids.json").read_text())["space_prefix"]
    for case in recorded:
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"], case["text"]


@pytest.mark.parametrize("text", ["a" * 1_000_000, "ab" * 200_000, " " * 300_000])
def test_long_runs(text: str) -> None:
    ids = {"a": 256, "aa": 257, "b": 258, SPACE: 259, SPACE * 2: 260}
    bpe = ScoredBPE(ids, [0.0] * 261, BYTE_IDS, whole={}, space_prefix=False)
    pieces = {token_id: piece.replace(SPACE, " ") for piece, token_id in ids.items()}
    assert "".join(pieces[i] for i in bpe.encode(text)) == text
