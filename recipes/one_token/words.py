"""What `follow()` found, put into the places of page.md: numbers as tables, steps as links to their lines of code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from recipes.one_token.follow import HEAD, LAYER, PROMPT, TEMPERATURE, Followed

ROOT = Path(__file__).parents[2]
SOURCE = "src/heedful"
HEADS_OF_ALL_LAYERS = 270
SPACE = "␣"


@dataclass(frozen=True)
class Line:
    """A line of code that a step is: found by its text, linked by its number."""

    file: str
    code: str
    """Part of the line."""

    def link(self) -> str:
        return f"→ [`{self.code}`](../{SOURCE}/{self.file}#L{self.number()}) in `{self.file}`  "

    def number(self) -> int:
        lines = (ROOT / SOURCE / self.file).read_text(encoding="utf-8").splitlines()
        found = [number for number, line in enumerate(lines, start=1) if self.code in line]
        assert len(found) == 1, f"{self.file} has {self.code!r} {len(found)} times"
        return found[0]


LINES = {
    "encode": Line("text/tokenizer.py", "self._vocabulary.encode_plain(_well_formed(text), True)"),
    "embed": Line("models/decoder.py", "x = self.embed(token_ids)"),
    "layers": Line("models/decoder.py", "for layer, block in enumerate(self.layers)"),
    "norm": Line("kernels/reference.py", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight"),
    "qkv": Line("models/decoder.py", "qkv = self.qkv(x)"),
    "angle": Line("models/layers.py", "angles = positions.float()[:, None] * inv_freq[None, :]"),
    "rotate": Line("kernels/reference.py", "first * cos - second * sin, second * cos + first * sin"),
    "score": Line("kernels/reference.py", 'torch.einsum("thd,nhd->thn", *part)'),
    "mask": Line("kernels/reference.py", "allowed = key_at <= query_at"),
    "softmax": Line("kernels/reference.py", "lse = scores.logsumexp(dim=-1)"),
    "sum": Line("kernels/reference.py", 'torch.einsum("thn,nhd->thd", (scores - lse[..., None]).exp(), v)'),
    "out": Line("models/decoder.py", "self.out(out.reshape(len(x), -1))"),
    "residual": Line("models/decoder.py", "x = x + (attended if self.attn_post_norm is None else"),
    "mlp": Line("models/layers.py", "self.down(_activate(self.activation, gate) * up)"),
    "logits": Line("models/decoder.py", "logits = self.head(hidden)"),
    "greedy": Line("sampling/sampler.py", "likeliest = int(logits.argmax())"),
    "draw": Line("sampling/sampler.py", "position = _draw(weights, self._random.random())"),
    "table": Line("cache/pages.py", "table.append(self.take(index, policy.precise, sequence))"),
    "visits": Line("cost/visits.py", "return heads * layers * seen"),
}


def page_text(found: Followed) -> str:
    pieces = {**_words(found), **_tables(found), **{f"code:{name}": line.link() for name, line in LINES.items()}}
    template = Path(__file__).with_name("page.md").read_text(encoding="utf-8")
    return re.sub(r"\{\{([a-z_:]+)\}\}", lambda place: pieces[place[1]], template)


def _words(found: Followed) -> dict[str, str]:
    words = [word for _, word in found.tokens]
    count, ranks = len(words), {layer: rank for layer, *_, rank in found.lens}
    return {
        "prompt": PROMPT,
        "answer": found.best[0][0].strip(),
        "last": words[-1].strip(),
        "last_id": str(found.tokens[-1][0]),
        "layer": str(LAYER),
        "head": str(HEAD),
        "position": str(count - 1),
        "count": str(count),
        "next_count": str(count + 1),
        "looked_at": words[int(found.weights.argmax())].strip(),
        "most": _percent(float(found.weights.max())),
        "own_visits": f"{count * HEADS_OF_ALL_LAYERS:,}",
        "triangle": " + ".join(map(str, range(1, count + 1))) + f" = {count * (count + 1) // 2}",
        "prefill_visits": f"{found.visits[0]:,}",
        "decode_visits": f"{found.visits[1]:,}",
        "kv_bytes": f"{found.kv_bytes_a_token:,}",
        "temperature": f"{TEMPERATURE:g}",
        "drawn": ", ".join(f"*{word.strip()}*" for word in found.drawn),
        "rank_before": f"{ranks[LAYER - 1]:,}",
        "rank_after": f"{ranks[LAYER]:,}",
        "entering": _inline(found.entering),
        "attended": _inline(found.attended),
        "mlp": _inline(found.mlp),
        "leaving": _inline(found.leaving),
        "embedding": _block(found.embedding),
        "normed": _block(found.normed),
        "plain_q": _block(found.plain_q),
    }


def _tables(found: Followed) -> dict[str, str]:
    words = [_code(word) for _, word in found.tokens]
    answer = _code(found.best[0][0])
    fits = list(zip(words, found.scores, found.weights, strict=True))
    size = len(found.q) ** 0.5
    lens = (
        (layer, _code(word), _percent(share), _percent(own) if own >= 0.0005 else "0 %", f"{rank:,}")
        for layer, word, share, own, rank in found.lens
    )
    places = ("likeliest", "second", "third")
    return {
        "tokens": _table(
            ("position", "token", "number"),
            ((i, _code(word), f"{token:,}") for i, (token, word) in enumerate(found.tokens)),
        ),
        "turn": _turn(found),
        "scores": _table(
            ("key of", "q · k", "score"), ((word, f"{size * score:.3f}", f"{score:.3f}") for word, score, _ in fits)
        ),
        "weights": _table(
            ("looks at", "score", "share", ""),
            ((word, f"{score:.3f}", f"{share:.4f}", "█" * round(30 * share)) for word, score, share in fits),
        ),
        "summed": _table(("channel", *words, "sum"), _summed(found)),
        "lens": _table(("after layer", "likeliest", "its probability", answer, f"place of {answer}"), lens),
        "without": _table(
            ("", *places),
            (
                ("as it is", *(f"{_code(word)} {_percent(share)}" for word, _, share in found.best[:3])),
                (
                    f"without head {HEAD} of layer {LAYER}",
                    *(f"{_code(word)} {_percent(share)}" for word, share in found.without_head),
                ),
            ),
        ),
        "best": _table(
            ("token", "logit", "probability"),
            ((_code(word), f"{logit:.3f}", _percent(share)) for word, logit, share in found.best),
        ),
    }


def _turn(found: Followed) -> str:
    half, angle = len(found.q) // 2, len(found.tokens) - 1
    (a, b), (c, d) = ((numbers[0], numbers[half]) for numbers in (found.plain_q, found.q))
    cos, sin = np.cos(angle), np.sin(angle)
    rows = (
        ("before", f"{a:.3f}", f"{b:.3f}"),
        (
            f"cos {angle} = {cos:.3f}, sin {angle} = {sin:.3f}",
            f"({a:.3f}) · ({cos:.3f}) - ({b:.3f}) · ({sin:.3f})",
            f"({b:.3f}) · ({cos:.3f}) + ({a:.3f}) · ({sin:.3f})",
        ),
        ("after", f"{c:.3f}", f"{d:.3f}"),
    )
    return _table(("", "channel 0", f"channel {half}"), rows)


def _summed(found: Followed) -> Iterable[Sequence[object]]:
    for channel in range(3):
        column = found.values[:, channel]
        parts = (f"{share:.3f} · {value:.3f}" for share, value in zip(found.weights, column, strict=True))
        yield channel, *parts, f"**{found.out[channel]:.3f}**"


def _inline(numbers: np.ndarray) -> str:
    return "(" + ", ".join(f"{number:.3f}" for number in numbers[:4]) + ", …)"


def _block(numbers: np.ndarray) -> str:
    return "    " + ", ".join(f"{number:.3f}" for number in numbers[:6]) + ", …"


def _table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _code(word: str) -> str:
    return f"`{word.replace(' ', SPACE)}`"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
