"""Encoders and the deciders on them against the same network through `transformers` in float32.

    pip install transformers
    python bench/encoders.py [--cases minilm decider laya_large] [--rounds 5] [--threads 2]

    minilm      64 texts of 8 to 250 tokens to vectors; the peer pads batches of 32, in the order given
    decider     heedful-decider, three questions on a state of about 200 tokens
    laya_large  a Laya of random weights with the shape of ModernBERT-large (a small vocabulary: its embedding is only
                looked up), five questions on a state of about 400 tokens

Both sides take turns, medians of the rounds; the peer gets ready token ids. Beside each speed stands how far the result
is from the peer's: of vectors 1 − cosine, of decisions the probability. A table, and a JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heedful import hardware
from heedful.decide import Choice, Noul, Question, Score
from heedful.decide.laya import Laya
from heedful.engine.encoder import Encoder
from heedful.models.laya_config import LayaSequence
from heedful.weights.sources import resolve

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
FORMATS: tuple[str | None, ...] = (None, "q8", "q6")
GOLDEN = Path(__file__).parent.parent / "tests/golden/decisions/laya/sequential"
WORDS = (
    "the",
    "customer",
    "says",
    "that",
    "a",
    "parcel",
    "was",
    "late",
    "and",
    "wants",
    "money",
    "back",
    "or",
    "another",
)
QUESTIONS: tuple[Question, ...] = (
    Choice("team", {"billing": "invoices and double charges", "returns": "wants money back", "other": None}, "Who?"),
    Noul("urgent", "Is this urgent?"),
    Score("anger", ["calm", "annoyed", "furious"], "How upset is the writer?"),
    Choice("tone", ["polite", "neutral", "rude"], "What is the tone?"),
    Noul("refund", "Does the writer want money back?"),
)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    cases = {"minilm": minilm, "decider": decider, "laya_large": laya_large}
    results = {name: cases[name](args) for name in args.cases}
    for name, result in results.items():
        print(f"{name}: transformers {result['peer_seconds']:.3f} s")
        for case in result["heedful"]:
            print(
                f"  heedful {case['weights']:4} {case['seconds']:8.3f} s  {case['ratio']:5.2f} ×  "
                f"differs by {case['difference']:.2g}"
            )
    print(json.dumps({"bench": "encoders", "threads": args.threads, "rounds": args.rounds, **results}))


def minilm(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModel

    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice((6, 12, 20, 40, 80, 160, 240)))) for _ in range(64)]
    model = AutoModel.from_pretrained(resolve("minilm").path).eval()
    encoders = [Encoder.load("minilm", threads=args.threads, weights=form) for form in FORMATS]
    ids = [encoders[0].tokenizer.encode(text) for text in texts]

    def peer() -> np.ndarray[Any, Any]:
        batches = [_padded(ids[at : at + 32]) for at in range(0, 64, 32)]
        found = [_mean(model(input_ids=i, attention_mask=m).last_hidden_state, m) for i, m in batches]
        vectors = torch.cat(found).numpy()
        return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))

    runs = [lambda encoder=encoder: encoder.embed(texts, truncate=True).vectors for encoder in encoders]
    return _compared(peer, runs, args.rounds, lambda a, b: float(1 - (a * b).sum(axis=1).min()))


def decider(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModel

    from heedful.decide.load import find_decider

    folder = find_decider("heedful-decider").path
    assert folder is not None
    config, stored = json.loads((folder / "rl_agent_config.json").read_text()), load_file(folder / "model.safetensors")
    trunk = AutoModel.from_pretrained(resolve("minilm").path).eval()
    for name, up in stored.items():
        if name.endswith(".lora_B"):
            bare = name.removesuffix(".lora_B")
            update = up.float() @ stored[f"{bare}.lora_A"].float()
            trunk.get_parameter(f"{bare.removeprefix('encoder.')}.weight").data += (
                update * config["lora_alpha"] / config["lora_r"]
            )
    network = _Reference(trunk, trunk.config.hidden_size, config["head_layers"])
    network.load_head(stored)
    state = " ".join(random.Random(2).choices(WORDS, k=190))
    return _decisions(network, "heedful-decider", state, QUESTIONS[:3], args)


def laya_large(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import ModernBertConfig, ModernBertModel

    torch.manual_seed(0)
    vocabulary = json.loads((GOLDEN / "encoder/config.json").read_text())["vocab_size"]
    special = {f"{kind}_token_id": 0 for kind in ("pad", "bos", "eos", "cls", "sep")}
    config = ModernBertConfig(
        vocab_size=vocabulary,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=2624,
        **special,
    )
    network = _Reference(ModernBertModel(config).eval(), 1024, 2)
    for parameter in network.head_parameters():
        parameter.data = (torch.randn_like(parameter) * 0.05).half().float()
    for parameter in network.trunk.parameters():
        parameter.data = parameter.data.half().float()
    state = " ".join(random.Random(3).choices(WORDS, k=args.laya_words))
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(Path(folder), network, config)
        return _decisions(network, folder, state, QUESTIONS, args)


def _decisions(
    network: _Reference, name: str, state: str, questions: tuple[Question, ...], args: argparse.Namespace
) -> dict[str, Any]:
    deciders = [Laya.load(name, threads=args.threads, weights=form) for form in FORMATS]
    packed = list(deciders[0].packed(state, questions).values())
    ids, mask = _padded([list(one.sequence.ids) for one in packed])
    types = torch.tensor([one.sequence.type for one in packed])
    counts = [len(question.labels) for question in questions]
    markers = [torch.tensor(one.sequence.markers) for one in packed]
    extra = _parallel_layout([one.sequence for one in packed], mask)

    def peer() -> list[float]:
        logits = network(ids, mask, types, markers, extra)
        return [p for of in logits.split(counts) for p in of.softmax(0).tolist()]

    def ours(decider: Laya) -> list[float]:
        found = decider.logits(state, questions)
        return [p for of in found for p in torch.tensor(of).softmax(0).tolist()]

    runs = [lambda decider=decider: ours(decider) for decider in deciders]
    result = _compared(peer, runs, args.rounds, lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=True)))
    return {"tokens": [len(one.sequence.ids) for one in packed], **result}


class _Reference(nn.Module):
    """Laya's network in plain PyTorch on a trunk of transformers, questions padded to one length."""

    def __init__(self, trunk: Any, width: int, layers: int) -> None:
        super().__init__()
        self.trunk = trunk
        block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, norm_first=True, batch_first=True, dropout=0)
        self.head = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).eval()
        self.type_emb = nn.Embedding(3, width)
        self.scorer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(
        self, ids: Tensor, mask: Tensor, types: Tensor, markers: list[Tensor], extra: dict[str, Tensor]
    ) -> Tensor:
        """extra: what the trunk takes in place of the mask where options do not see each other."""
        hidden = self.trunk(input_ids=ids, **(extra or {"attention_mask": mask})).last_hidden_state
        hidden = hidden + self.type_emb(types)[:, None]
        hidden = self.head(hidden, src_key_padding_mask=mask == 0)
        rows = torch.cat([hidden[row, at] for row, at in enumerate(markers)])
        return self.scorer(rows).squeeze(-1)  # type: ignore[no-any-return]

    def head_parameters(self) -> list[nn.Parameter]:
        return [p for part in (self.head, self.type_emb, self.scorer) for p in part.parameters()]

    def load_head(self, stored: dict[str, Tensor]) -> None:
        for part, name in ((self.head, "head"), (self.type_emb, "type_emb"), (self.scorer, "scorer")):
            named = {k.removeprefix(f"{name}."): v.float() for k, v in stored.items() if k.startswith(f"{name}.")}
            part.load_state_dict(named)


def _parallel_layout(sequences: list[LayaSequence], mask: Tensor) -> dict[str, Tensor]:
    """Positions (questions, T), and a mask (questions, 1, T, T) in which no option sees another; {}: all see all."""
    if sequences[0].options is None:
        return {}
    positions, options = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, one in enumerate(sequences):
        assert one.options is not None
        assert one.positions is not None
        positions[row, : len(one.ids)] = torch.tensor(one.positions)
        options[row, : len(one.ids)] = torch.tensor(one.options)
    apart = (options[:, :, None] != options[:, None]) & (options[:, :, None] > 0) & (options[:, None] > 0)
    seen = (mask[:, None] > 0) & ~apart
    return {"position_ids": positions, "attention_mask": torch.where(seen, 0.0, float("-inf"))[:, None]}


def _write_checkpoint(folder: Path, network: _Reference, config: Any) -> None:
    settings = json.loads((GOLDEN / "rl_agent_config.json").read_text())
    settings |= {"head_layers": 2, "max_len": 512, "head_max_len": 192, "option_layout": "sequential"}
    (folder / "rl_agent_config.json").write_text(json.dumps(settings))
    (folder / "encoder").mkdir()
    (folder / "encoder/config.json").write_text(config.to_json_string())
    (folder / "tokenizer").symlink_to((GOLDEN / "tokenizer").resolve())
    tensors = {f"encoder.{name}": tensor for name, tensor in network.trunk.state_dict().items()}
    tensors |= {f"head.{name}": tensor for name, tensor in network.head.state_dict().items()}
    tensors |= {f"{n}.{k}": t for n in ("type_emb", "scorer") for k, t in getattr(network, n).state_dict().items()}
    tensors["temperature"] = torch.ones(3)
    save_file({name: tensor.half().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _compared(
    peer: Callable[[], Any], runs: list[Callable[[], Any]], rounds: int, difference: Callable[[Any, Any], float]
) -> dict[str, Any]:
    seconds: list[list[float]] = [[] for _ in range(len(runs) + 1)]
    with torch.inference_mode():
        results = [run() for run in (peer, *runs)]  # warm
        for _ in range(rounds):
            for of, run in zip(seconds, (peer, *runs), strict=True):
                began = perf_counter()
                run()
                of.append(perf_counter() - began)
    peers = statistics.median(seconds[0])
    return {
        "peer_seconds": round(peers, 4),
        "heedful": [
            {
                "weights": form or "f32",
                "seconds": round(statistics.median(of), 4),
                "ratio": round(peers / statistics.median(of), 3),
                "difference": difference(results[0], result),
            }
            for form, of, result in zip(FORMATS, seconds[1:], results[1:], strict=True)
        ],
    }


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """ids and mask (rows, longest)."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].float()
    return (hidden * weights).sum(1) / weights.sum(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["minilm", "decider", "laya_large"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=hardware.detect().threads)
    parser.add_argument("--laya-words", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
