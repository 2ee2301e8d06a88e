"""DPO: log-probabilities, loss and gradients against transformers and the formula by hand; preferences are learned."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from training_cases import LORA, quiet

from heedful.errors import BadParameter, FileFormatError
from heedful.train.batches import pairs_of
from heedful.train.chat_store import chat_of
from heedful.train.loop import begin, complete, resume
from heedful.train.low_rank import UpdatedBase
from heedful.train.preference_store import has_reference, open_reference
from heedful.train.preference_trainer import PreferenceTrainer
from heedful.train.run_files import open_run, read_metrics
from heedful.train.settings import TrainSettings, by_name, changed
from heedful.weights.export import export_hf
from heedful.weights.load import load

BETA = 0.3


@pytest.fixture(scope="module")
def base(base_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    export_hf(load(str(base_run)), folder, "f32")
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is preferred says "cat" where the other says "dog", in three shapes of rows."""
    path, draw, rows = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(5), []
    words = "house sea man hat red blue old".split()  # noqa: SIM905
    for number in range(60):
        asked = " ".join(draw.choices(words, k=draw.randint(1, 4)))
        before, after = (" ".join(draw.choices(words, k=draw.randint(0, 2))) for _ in range(2))
        said = [f"{before} {animal} {after}".strip() for animal in ("cat", "dog")]
        question = [{"role": "user", "content": asked}]
        answers = [[{"role": "assistant", "content": each}] for each in said]
        shapes: list[dict[str, Any]] = [
            {"prompt": asked, "chosen": said[0], "rejected": said[1]},
            {"prompt": question, "chosen": answers[0], "rejected": answers[1]},
            {"chosen": question + answers[0], "rejected": question + answers[1]},
        ]
        rows.append(shapes[number % 3])
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def preferring(base: Path, pairs: Path, **more: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model.base": str(base), "data.preferences": [str(pairs)], "data.validation_share": 0.2,
        "dpo.beta": BETA, "optim.batch_tokens": 256, "optim.micro_batches": 2, "optim.loss_chunk": 16,
        "run.steps": 6, "run.threads": 1, "run.save_every": 2, "run.eval_every": 3, "run.sample_every": 0,
        "model.context_len": 96,
    }  # fmt: skip
    return changed(TrainSettings(), values | {name.replace("__", "."): value for name, value in more.items()})


def opened(folder: Path) -> PreferenceTrainer:
    """As the run is before its first step, with what the base thought."""
    trainer = PreferenceTrainer(open_run(folder))
    trainer.prepare(quiet)
    return trainer


# ---- against transformers and the formula


def of_transformers(theirs: Any, token_ids: list[int], answer_len: int) -> torch.Tensor:
    """Σ log p of the last tokens."""
    ids = torch.tensor([token_ids])
    logs = torch.log_softmax(theirs(ids).logits[0, :-1].double(), dim=-1)
    return logs.gather(1, ids[0, 1:, None])[-answer_len:].sum()


@pytest.mark.parametrize(
    "more", [{}, {"dpo__label_smoothing": 0.1, "dpo__sft_weight": 0.7}], ids=["sigmoid", "smoothed-with-sft"]
)
def test_log_probs_loss_and_gradients_of_a_step(more: dict[str, Any], base: Path, pairs: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    settings = preferring(base, pairs, run__steps=2, optim__lr=0.05, optim__clip=0.0, run__save_every=1, **more)
    begin(tmp_path / "run", settings, say=quiet)
    after_one = tmp_path / "run" / "checkpoints" / "step-00000001"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(after_one, dtype=torch.float32)
    of_base = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = opened(tmp_path / "run")
    trainer.load(after_one)
    store = trainer.run.data.store
    batch = trainer.run.data.batch(trainer.state.cursor)
    chats = [chat_of(store, segment.document) for segment in batch.segments]
    assert len(chats) > 4

    for chat in chats:  # what is scored is one answer, at the end
        assert chat.learned == sorted(chat.learned)
    scored = [(chat.token_ids, sum(chat.learned)) for chat in chats]
    now = torch.stack([of_transformers(theirs, *each) for each in scored]).view(-1, 2)
    with torch.no_grad():
        before = torch.stack([of_transformers(of_base, *each) for each in scored]).view(-1, 2)
    numbers = [segment.document for segment in batch.segments]
    assert np.allclose(open_reference(tmp_path / "run/data/train")[numbers], before.flatten(), atol=1e-4)

    dpo = trainer.settings.dpo
    margins = BETA * ((now[:, 0] - before[:, 0]) - (now[:, 1] - before[:, 1]))
    losses = -(1 - dpo.label_smoothing) * torch.log(1 / (1 + torch.exp(-margins)))
    losses = losses - dpo.label_smoothing * torch.log(1 / (1 + torch.exp(margins)))
    loss = losses.mean() - dpo.sft_weight * now[:, 0].sum() / sum(n for _, n in scored[::2])
    loss.backward()
    assert float(margins.detach().abs().max()) > 0.05, "the step has changed something"

    sums = trainer.preference_gradients(pairs_of(batch.segments))
    figures = sums.figures(len(now))
    assert sums.loss == pytest.approx(loss.item(), abs=1e-5)
    assert figures["reward_margin"] == pytest.approx(margins.mean().item(), abs=1e-4)
    assert figures["preference_accuracy"] == pytest.approx((margins > 0).double().mean().item())
    assert figures["chosen_logp"] == pytest.approx(now[:, 0].mean().item(), abs=1e-3)
    assert figures["rejected_logp"] == pytest.approx(now[:, 1].mean().item(), abs=1e-3)
    for block, layer in zip(trainer.decoder.layers, theirs.model.layers, strict=True):
        assert torch.allclose(block.attn.out.weight.grad, layer.self_attn.o_proj.weight.grad, atol=1e-5)
        assert torch.allclose(block.mlp.down.weight.grad, layer.mlp.down_proj.weight.grad, atol=1e-5)
    assert torch.allclose(trainer.decoder.embed.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-5)


def test_a_run_begins_where_nothing_is_preferred(base: Path, pairs: Path, tmp_path: Path) -> None:
    said: list[str] = []
    begin(tmp_path / "run", changed(preferring(base, pairs, run__steps=1, run__log_every=1), LORA), say=said.append)
    first = next(row for row in read_metrics(tmp_path / "run") if "loss" in row)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert said[0].startswith("train: 60 preferences, ")
    line = next(line for line in said if line.startswith("step 1/1 · loss"))
    for name in ("preference accuracy", "reward margin", "chosen logp", "rejected logp"):
        assert f" · {name} " in line
    assert any("log p of 120 answers under the base, once" in line for line in said)


# ---- learning


@pytest.mark.parametrize("more", [{"optim__lr": 0.01}, {"lora__rank": 4, "optim__lr": 0.05}], ids=["whole", "low-rank"])
def test_a_preference_is_learned_and_held_out_pairs_are_judged(
    more: dict[str, Any], base: Path, pairs: Path, tmp_path: Path
) -> None:
    begin(tmp_path / "run", preferring(base, pairs, run__steps=14, run__eval_every=7, **more), say=quiet)
    judged = [row for row in read_metrics(tmp_path / "run") if "judged_by" in row]
    assert {row["judged_by"] for row in judged} == {"preference_loss"}
    before = opened(tmp_path / "run").judge()
    assert before["preference_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert judged[-1]["preference_accuracy"] > max(0.9, before["preference_accuracy"])
    assert judged[-1]["preference_loss"] < 0.6
    assert judged[-1]["chosen_logp"] - judged[-1]["rejected_logp"] > before["chosen_logp"] - before["rejected_logp"]


# ---- stopping and going on


def test_kill_9_and_resume(base: Path, pairs: Path, tmp_path: Path) -> None:
    """With the file of the base's log-probabilities gone too, which is then made again."""
    settings = changed(preferring(base, pairs, optim__lr=0.01), {**LORA, "lora.dropout": 0.2})
    begin(tmp_path / "whole", settings, say=quiet)
    (tmp_path / "settings.json").write_text(json.dumps(settings.as_dict()))
    command = [sys.executable, __file__, "killed", str(tmp_path / "run"), str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    reference = tmp_path / "run" / "data" / "train"
    kept = open_reference(reference).copy()
    (reference / "reference.json").unlink()
    resume(tmp_path / "run", say=quiet)
    assert has_reference(reference)
    assert np.array_equal(open_reference(reference), kept)
    rows = [[row for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("whole", "run")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6
    newest = [tmp_path / name / "checkpoints" / "step-00000006" for name in ("whole", "run")]
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(folder / name) for folder in newest)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[tensor], theirs[tensor]) for tensor in ours)


def test_what_the_base_thought_is_mapped_and_checked(base: Path, pairs: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", preferring(base, pairs, run__steps=1), say=quiet)
    values = tmp_path / "run" / "data" / "train" / "reference.bin"
    assert isinstance(open_reference(values.parent), np.memmap)
    content = bytearray(values.read_bytes())
    content[3] ^= 1
    values.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"reference\.bin is not what was written"):
        resume(tmp_path / "run", steps=2, say=quiet)


def test_a_dry_run_asks_the_base_of_two_steps_alone(base: Path, pairs: Path, tmp_path: Path) -> None:
    from heedful.train.estimate import estimate

    settings = complete(changed(preferring(base, pairs), LORA))
    found = estimate(settings)
    assert found.trained_parameters < found.parameters
    begin(tmp_path / "run", changed(settings, {"run.steps": 1}), say=quiet)
    trainer = PreferenceTrainer(open_run(tmp_path / "run"))
    assert isinstance(trainer.model, UpdatedBase)
    trainer.prepare(quiet, steps=2)
    assert math.isfinite(trainer.step().loss)
    assert math.isfinite(trainer.step().loss)


# ---- more than one process


def test_two_processes_compute_what_one_does(base: Path, pairs: Path, tmp_path: Path) -> None:
    """Their weights cut by FSDP2; what the base thinks too is shared among them."""
    settings = preferring(base, pairs, run__steps=3, optim__lr=0.02)
    begin(tmp_path / "alone", settings, say=quiet)
    (tmp_path / "settings.json").write_text(json.dumps(settings.as_dict()))
    command = [sys.executable, __file__, "two", str(tmp_path / "two"), str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    references = [open_reference(tmp_path / name / "data" / "train") for name in ("alone", "two")]
    assert np.allclose(references[0], references[1], atol=1e-5)
    rows = [[row for row in read_metrics(tmp_path / name) if "chosen_logp" in row] for name in ("alone", "two")]
    assert len(rows[0]) == len(rows[1]) == 4, "three steps and a judgement"
    for alone, two in zip(*rows, strict=True):
        assert alone.keys() == two.keys()
        for name in alone.keys() - {"judged_by", "preference_accuracy"}:  # at first the sign is that of rounding
            assert two[name] == pytest.approx(alone[name], abs=2e-3, rel=1e-3), (alone["step"], name)


# ---- rows


CHOICE = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no JSON"),
        ("[]", "line 2 of .* is no object"),
        (json.dumps({"prompt": "a", "chosen": "b"}), "line 2 of .* has not both"),
        (json.dumps({"chosen": "b", "rejected": "c"}), "line 2 of .* has no prompt"),
        (json.dumps(CHOICE | {"chosen": 3}), "line 2 of .* has chosen that are no list of messages"),
        (json.dumps(CHOICE | {"rejected": [{"content": "x"}]}), "--preferences: line 2 .* message without a role"),
        (json.dumps(CHOICE | {"chosen": [{"role": "user", "content": "x"}]}), "has no prompt"),
        (json.dumps(CHOICE | {"prompt": []}), "has prompt that are no list of messages"),
    ],
)
def test_what_is_no_preference_is_refused(line: str, message: str, base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(CHOICE)}\n{line}\n")
    with pytest.raises(BadParameter, match=message) as refused:
        begin(tmp_path / "run", preferring(base, rows), say=quiet)
    assert refused.value.field == "--preferences"


def test_rows_that_are_left_out_are_said(base: Path, tmp_path: Path) -> None:
    rows, said = tmp_path / "rows.jsonl", []
    same, long = CHOICE | {"chosen": "c"}, CHOICE | {"chosen": "x y z " * 60}
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in [CHOICE, same, long, CHOICE, CHOICE]))
    begin(tmp_path / "run", preferring(base, rows, run__steps=1), say=said.append)
    assert said[0].startswith("train: 3 preferences, ")
    assert "left out are 1 longer than 96 tokens (the longest needs --context " in said[0]
    assert said[0].endswith("left out are 1 whose two answers are the same")
    rows.write_text(f"{json.dumps(same)}\n")
    with pytest.raises(BadParameter, match=r"hold no row to learn from: 0 of 1 are longer .* 1 have the same"):
        begin(tmp_path / "other", preferring(base, rows), say=quiet)


def test_settings_that_do_not_go_together(base: Path, pairs: Path) -> None:
    for more, message in (
        ({"model__base": None}, "--preferences: needs a base"),
        ({"data__chat": [str(pairs)]}, "--preferences: and --chat are two kinds"),
        ({"optim__batch_tokens": 191}, "191 are less than two contexts of 96"),
        ({"dpo__beta": 0.0}, "dpo.beta: is 0"),
        ({"dpo__label_smoothing": 0.5}, "dpo.label_smoothing: is 0.5"),
    ):
        with pytest.raises(BadParameter, match=message):
            complete(preferring(base, pairs, **more))
    told = complete(preferring(base, pairs, optim__batch_tokens=None))
    assert (told.optim.lr, told.optim.batch_tokens) == (5e-6, 192)
    assert complete(preferring(base, pairs, lora__rank=4)).optim.lr == 5e-5


def _two(folder: Path, settings: TrainSettings) -> None:
    from parallel_cases import in_processes

    ended = in_processes(2, lambda: begin(folder, settings, say=quiet))
    assert ended == [0, 0], ended


def _killed(folder: Path, settings: TrainSettings) -> None:
    """In its fourth step."""
    from heedful.train.learner import Learner

    original = Learner.step

    def step(learner: Learner) -> Any:
        if learner.state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(learner)

    Learner.step = step  # type: ignore[method-assign]
    begin(folder, settings, say=quiet)


if __name__ == "__main__":
    what, folder, written = sys.argv[1:]
    values = by_name(json.loads(Path(written).read_text()))
    (_two if what == "two" else _killed)(Path(folder), changed(TrainSettings(), values))
