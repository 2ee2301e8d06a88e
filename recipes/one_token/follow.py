"""Follows one real token of SmolLM2 through the engine's plain model and keeps what passes by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heedful import LLM
from heedful.models.carried import Carried

PROMPT = "The capital of France is"
LAYER, HEAD = 23, 4
"""A head in which something readable happens."""
LENS = (0, 5, 10, 15, 20, 22, 23, 24, 26, 27, 28, 29)
TEMPERATURE, SEED = 1.0, 4


@dataclass(frozen=True)
class Followed:
    """What the last token of PROMPT met. H heads, D channels a head, N tokens."""

    tokens: list[tuple[int, str]]
    embedding: np.ndarray
    """(C,)"""
    entering: np.ndarray
    """(C,) hidden state of the token before LAYER."""
    normed: np.ndarray
    """(C,) after the norm."""
    plain_q: np.ndarray
    """(D,) the query before positions."""
    q: np.ndarray
    """(D,) with its position."""
    keys: np.ndarray
    """(N, D) with their positions."""
    values: np.ndarray
    """(N, D)"""
    out: np.ndarray
    """(D,) what the head brings home."""
    attended: np.ndarray
    """(C,) of all heads, after the output matrix."""
    mlp: np.ndarray
    """(C,)"""
    leaving: np.ndarray
    """(C,) hidden state after LAYER."""
    lens: list[tuple[int, str, float, float, int]]
    """(layer, likeliest token, its probability, the answer's probability, the answer's rank)."""
    logits: np.ndarray
    """(vocab,)"""
    best: list[tuple[str, float, float]]
    """(token, logit, probability), the likeliest first."""
    without_head: list[tuple[str, float]]
    """(token, probability) where LAYER and HEAD had brought nothing."""
    drawn: list[str]
    """What the sampler chooses at TEMPERATURE with the seeds from SEED on."""
    visits: tuple[int, int]
    """Receipt of a run with two output tokens: prefill, decode."""
    kv_bytes_a_token: int
    """Of 8-bit rows, on paper."""

    @property
    def scores(self) -> np.ndarray:
        return self.keys @ self.q / np.sqrt(len(self.q))

    @property
    def weights(self) -> np.ndarray:
        powers = np.exp(self.scores - self.scores.max())
        return powers / powers.sum()


class _Watching(Carried):
    """Keeps what LAYER hands to attention; `off`: a head whose result is set to zero."""

    off: tuple[int, int] | None = None
    met: dict[str, Tensor]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **facts: object) -> Tensor:
        out = super().__call__(layer, q, k, v, **facts)
        if layer == LAYER and self.off is None:
            self.met = {"q": q, "k": k, "v": v, "out": out}
        if self.off is not None and self.off[0] == layer:
            out = out.clone()
            out[:, self.off[1]] = 0
        return out


@torch.inference_mode()
def follow() -> Followed:
    llm = LLM("smollm2", runner="torch")
    network, config, tokenizer = llm.engine.runner.decoder, llm.config, llm.tokenizer
    ids = tokenizer.encode(PROMPT)
    states: list[Tensor] = []
    parts: dict[str, Tensor] = {}
    block = network.layers[LAYER]
    watched = (("norm", block.attn_norm), ("qkv", block.attn.qkv), ("attn", block.attn), ("mlp", block.mlp))
    handles = [one.register_forward_hook(lambda _, __, out: states.append(out[-1])) for one in network.layers]
    handles += [
        module.register_forward_hook(lambda _, __, out, name=name: parts.update({name: out[-1]}))
        for name, module in watched
    ]
    watching = _Watching(config)
    logits = network.logits(network(torch.tensor(ids), torch.arange(len(ids)), watching))[-1]
    for handle in handles:
        handle.remove()
    answer = int(logits.argmax())
    kv_head, met = HEAD * config.num_kv_heads // config.num_heads, watching.met
    return Followed(
        tokens=[(token, tokenizer.decode([token])) for token in ids],
        embedding=network.embed.weight[ids[-1]].numpy(),
        entering=states[LAYER - 1].numpy(),
        normed=parts["norm"].numpy(),
        plain_q=parts["qkv"].view(-1, config.head_dim)[HEAD].numpy(),
        q=met["q"][-1, HEAD].numpy(),
        keys=met["k"][:, kv_head].numpy(),
        values=met["v"][:, kv_head].numpy(),
        out=met["out"][-1, HEAD].numpy(),
        attended=parts["attn"].numpy(),
        mlp=parts["mlp"].numpy(),
        leaving=states[LAYER].numpy(),
        lens=[_lens(network, tokenizer, layer, states[layer], answer) for layer in LENS],
        logits=logits.numpy(),
        best=_best(tokenizer, logits, 5),
        without_head=[(word, share) for word, _, share in _without_head(network, tokenizer, ids)],
        drawn=[_drawn(llm, SEED + i) for i in range(8)],
        visits=_visits(llm),
        kv_bytes_a_token=2 * config.num_kv_heads * len(config.windows) * (config.head_dim + 4),
    )


def _best(tokenizer: object, logits: Tensor, count: int) -> list[tuple[str, float, float]]:
    shares, top = logits.softmax(-1), logits.topk(count).indices.tolist()
    return [(tokenizer.decode([one]), float(logits[one]), float(shares[one])) for one in top]


def _lens(network, tokenizer, layer: int, state: Tensor, answer: int) -> tuple[int, str, float, float, int]:
    shares = network.logits(network.norm(state[None]))[0].softmax(-1)
    top = int(shares.argmax())
    rank = 1 + int((shares > shares[answer]).sum())
    return layer, tokenizer.decode([top]), float(shares[top]), float(shares[answer]), rank


def _without_head(network, tokenizer, ids: list[int]) -> list[tuple[str, float, float]]:
    watching = _Watching(network.config)
    watching.off = (LAYER, HEAD)
    logits = network.logits(network(torch.tensor(ids), torch.arange(len(ids)), watching))[-1]
    return _best(tokenizer, logits, 3)


def _drawn(llm: LLM, seed: int) -> str:
    return llm.generate(PROMPT, max_tokens=1, temperature=TEMPERATURE, seed=seed).text


def _visits(llm: LLM) -> tuple[int, int]:
    visits = llm.generate(PROMPT, max_tokens=2).receipt.visits
    return visits.prefill, visits.decode
