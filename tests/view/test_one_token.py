"""The guided page: its numbers against a recomputation in numpy from the weights alone, and its lines of code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipes.one_token.follow import HEAD, LAYER, PROMPT, Followed, follow
from recipes.one_token.make import PAGE
from recipes.one_token.words import page_text

from heedful import LLM
from heedful.weights.load import load

AGAIN = "The page is not what the engine computes. Make it anew: python -m recipes.one_token.make"
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


@pytest.fixture(scope="module")
def followed(smollm2_path: Path) -> Followed:
    return follow()


@pytest.fixture(scope="module")
def naive(smollm2_path: Path) -> dict[str, Any]:
    """SmolLM2 in numpy, float64, written from its description: no line of it is the engine's."""
    loaded = load("smollm2")
    weight: Callable[[str], np.ndarray] = lambda name: loaded.weights[name].to_float32().astype(np.float64)  # noqa: E731
    embedding = weight("embed.weight")
    ids = loaded.tokenizer.encode(PROMPT)
    x, kept = embedding[ids], {}
    for layer in range(30):
        part = lambda name, layer=layer: weight(f"layers.{layer}.{name}.weight")  # noqa: E731
        normed = _norm(x, part("attn_norm"))
        q, k, v = (np.reshape(normed @ part(f"attn.{name}").T, (len(ids), -1, 64)) for name in "qkv")
        turned = _turn(q), _turn(k)
        rows, heads = [], []
        for head in range(9):
            scores = turned[0][:, head] @ turned[1][:, head // 3].T / 8
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            rows.append(powers / powers.sum(-1, keepdims=True))
            heads.append(rows[-1] @ v[:, head // 3])
        if layer == LAYER:
            kept = {"entering": x[-1], "normed": normed[-1], "plain_q": q[-1, HEAD], "q": turned[0][-1, HEAD]}
            kept |= {"weights": rows[HEAD][-1], "out": heads[HEAD][-1]}
        attended = np.concatenate(heads, axis=1) @ part("attn.out").T
        x = x + attended
        normed = _norm(x, part("mlp_norm"))
        gate, up = normed @ part("mlp.gate").T, normed @ part("mlp.up").T
        mlp = (gate / (1 + np.exp(-gate)) * up) @ part("mlp.down").T
        x = x + mlp
        if layer == LAYER:
            kept |= {"attended": attended[-1], "mlp": mlp[-1], "leaving": x[-1]}
    return {**kept, "embedding": embedding[ids[-1]], "logits": _norm(x[-1:], weight("norm.weight"))[0] @ embedding.T}


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def _turn(x: np.ndarray) -> np.ndarray:
    """Pairs (i, i + 32) of each head as complex numbers, times e^(i angle)."""
    angles = np.arange(len(x))[:, None] / 100_000 ** (np.arange(32) / 32)
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate((turned.real, turned.imag), axis=-1)


@pytest.mark.parametrize(
    "name",
    ["embedding", "entering", "normed", "plain_q", "q", "weights", "out", "attended", "mlp", "leaving", "logits"],
)
def test_what_is_followed_is_what_the_weights_say(followed: Followed, naive: dict[str, Any], name: str) -> None:
    found = getattr(followed, name)
    assert found == pytest.approx(naive[name], rel=2e-3, abs=2e-3 * float(np.abs(naive[name]).max()))


def test_the_page_has_these_numbers(followed: Followed) -> None:
    """Every number of the page, to the last digit shown, and every word between."""
    written, anew = PAGE.read_text(encoding="utf-8"), page_text(followed)
    assert NUMBER.sub("#", written) == NUMBER.sub("#", anew), AGAIN
    for shown, computed in zip(NUMBER.findall(written), NUMBER.findall(anew), strict=True):
        digits = len(shown.partition(".")[2])
        step = 10.0**-digits if digits else 0
        assert abs(_value(shown) - _value(computed)) <= 1.01 * step, (shown, computed, AGAIN)


def _value(text: str) -> float:
    return float(text.replace(",", "").removesuffix("."))


def test_the_page_says_what_the_engine_answers(followed: Followed) -> None:
    """The engine that people run, with its own kernels: the same token, nearly the same probability, these visits."""
    llm = LLM("smollm2")
    answer = llm.generate(PROMPT, max_tokens=2, logprobs=3)
    assert answer.logprobs is not None
    first, page = answer.logprobs[0], PAGE.read_text(encoding="utf-8")
    assert llm.tokenizer.decode([first.token_id]) == followed.best[0][0] == " Paris"
    assert np.exp(first.logprob) == pytest.approx(followed.best[0][2], abs=0.05)
    assert f"= {answer.receipt.visits.decode:,} visits" in page
    assert f"{answer.receipt.visits.prefill:,} in all" in page
    assert answer.receipt.visits.prefill == 30 * 9 * sum(range(1, 6))
    plain = LLM("smollm2", runner="torch").generate(PROMPT, max_tokens=1, logprobs=3).logprobs
    assert plain is not None
    shares = [np.exp(logprob) for _, logprob in plain[0].top]
    assert shares == pytest.approx([share for *_, share in followed.best[:3]], abs=1e-4)


def test_every_line_of_code_is_where_the_page_says() -> None:
    links = re.findall(r"\[`([^`]+)`\]\(\.\./(\S+?)#L(\d+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) == 19
    for code, file, number in links:
        line = (PAGE.parent.parent / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
        assert code in line, f"{file}:{number} is {line.strip()!r}, not {code!r}. {AGAIN}"
