"""SmolLM2 and Gemma 3, real weights, through the paged engine, against results recorded from transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from heedful.engine.engine import Engine
from heedful.engine.torch_runner import TorchRunner
from heedful.kernels.attention import DenseAttend
from heedful.models.config import config_from_gguf
from heedful.request import Request, SamplingParams
from heedful.weights import names
from heedful.weights.gguf_file import read_gguf

GOLDEN = Path(__file__).parent.parent / "golden"


@dataclass(frozen=True)
class Real:
    folder: Path
    runner: TorchRunner
    logit_tolerance: float
    mean_nll_tolerance: float
    single_nll_tolerance: float

    def cases(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "cases.json").read_text())["cases"]  # type: ignore[no-any-return]

    def engine(self) -> Engine:
        return Engine(self.runner, model_name="real", context_len=4096, eos_ids=())


def load_runner(path: Path) -> TorchRunner:
    file = read_gguf(path)
    config = config_from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    return TorchRunner(config, names.from_gguf(file.tensors, config), capacity_tokens=4096, threads=2)


@pytest.fixture(scope="module", params=["smollm2", "gemma3_270m"])
def real(request: pytest.FixtureRequest) -> Real:
    smollm2 = request.param == "smollm2"
    path = request.getfixturevalue("smollm2_path" if smollm2 else "gemma_path")
    tolerances = (2e-3, 1e-4, 1e-3) if smollm2 else (1e-2, 2e-4, 3e-2)
    return Real(GOLDEN / request.param, load_runner(path), *tolerances)


class LastLogits:
    """A runner that remembers the logits it gave."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.config, self.cache, self.facts, self.threads = runner.config, runner.cache, runner.facts, runner.threads
        self.seen: list[np.ndarray] = []

    def run(self, batch: Any) -> np.ndarray:
        logits = self.runner.run(batch)
        self.seen.extend(logits.copy())
        return logits


def test_prompt_logits_and_greedy_continuations(real: Real) -> None:
    for case in real.cases():
        recorder = LastLogits(real.runner)
        engine = Engine(recorder, model_name="real", context_len=4096, eos_ids=())
        sequence = engine.add(Request(tuple(case["ids"]), SamplingParams(max_tokens=32)))
        while sequence.finish is None:
            engine.step()
        first = recorder.seen[0].astype(np.float64)
        assert np.abs(first[case["top20_ids"]] - case["top20_logits"]).max() < real.logit_tolerance, case["name"]
        assert abs(np.logaddexp.reduce(first) - case["logsumexp"]) < real.logit_tolerance, case["name"]
        assert np.argsort(-first, kind="stable")[:20].tolist() == case["top20_ids"], case["name"]
        assert sequence.token_ids[sequence.prompt_len :] == case["greedy_ids"], case["name"]
        engine.receipt(sequence)


def test_passage_nll(real: Real) -> None:
    """Every token of a passage, predicted from those before it, in one dense pass without a cache."""
    passage = json.loads((real.folder / "passage.json").read_text())
    expected = load_file(real.folder / "passage_nll.safetensors")["nll"]
    ids = torch.tensor(passage["ids"])
    decoder = real.runner.decoder
    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)]))
        nll = [
            torch.nn.functional.cross_entropy(decoder.logits(rows), targets, reduction="none")
            for rows, targets in zip(hidden[:-1].split(256), ids[1:].split(256), strict=True)
        ]
    found = torch.cat(nll).numpy()
    assert abs(found.mean() - passage["summary"]["mean_nll"]) < real.mean_nll_tolerance
    assert np.abs(found - expected).max() < real.single_nll_tolerance
