"""Encoders that learn to decide, in the loop of all training: gradients against a second formulation, resumed to the
bit, and run by the decider that everybody loads.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import Tensor
from training_cases import quiet

from heedful.decide.laya import Laya
from heedful.engine.torch_laya import make_laya, question_logits
from heedful.errors import BadParameter, FileFormatError
from heedful.train.decision_run import open_decision_run
from heedful.train.decision_store import DecisionStore
from heedful.train.decision_trainer import DecisionTrainer
from heedful.train.estimate import estimate
from heedful.train.loop import begin, complete, resume
from heedful.train.low_rank import LowRankUpdate
from heedful.train.run_files import read_metrics
from heedful.train.settings import TrainSettings, by_name, changed
from heedful.weights.load_laya import load_laya
from heedful.weights.run_folder import model_in


def deciding(base: Path | str, rows: Path, **more: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model.base": str(base), "data.decisions": [str(rows)], "data.validation_share": 0.2, "decide.batch": 6,
        "run.steps": 6, "run.threads": 1, "run.save_every": 2, "run.eval_every": 3, "run.sample_every": 6,
    }  # fmt: skip
    return changed(TrainSettings(), values | {name.replace("__", "."): value for name, value in more.items()})


def opened(folder: Path) -> DecisionTrainer:
    """As the run is after its newest checkpoint."""
    trainer = DecisionTrainer(open_decision_run(folder))
    trainer.load(model_in(folder))
    return trainer


# ---- a step


def test_loss_and_gradients_are_those_of_each_question_alone(laya_base: Path, decisions: Path, tmp_path: Path) -> None:
    """In parts, layers computed again, updates beside their matrices; against questions one by one, with the updates in
    the matrices.
    """
    more = {"lora__rank": 4, "optim__lr": 0.02, "optim__micro_batches": 3, "optim__checkpoint_activations": True}
    settings = deciding(laya_base, decisions, **more)
    begin(tmp_path / "run", settings, say=quiet)
    trainer = opened(tmp_path / "run")
    examples = trainer.examples(12)
    loss = trainer.gradients(examples)

    loaded = load_laya(laya_base)
    plain = make_laya(loaded.config, loaded.trunk, loaded.head, threads=1)
    values = {name: value for name, value in plain.named_parameters() if name.startswith("trunk.")}
    values |= {f"head.{name}": each.detach().requires_grad_() for name, each in trainer.network.head.named_parameters()}
    updates: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in trainer.network.named_modules():
        if isinstance(module, LowRankUpdate):
            a, b = (each.detach().clone().requires_grad_() for each in (module.a, module.b))
            matrix, place = name.split(".updates.")
            assert place == "0", "ModernBERT's matrices have one part each"
            updates[name] = (a, b)
            values[f"{matrix}.weight"] = values[f"{matrix}.weight"] + 2.0 * b @ a
    total = torch.zeros(())
    for example in examples:
        (logits,) = functional_logits(plain, values, example.sequence)
        total = total + F.cross_entropy(logits, torch.tensor(example.row.target)) / len(examples)
    total.backward()
    assert len(updates) == 4 * 3
    assert loss == pytest.approx(total.item(), rel=1e-6)
    for name, (a, b) in updates.items():
        ours = trainer.network.get_submodule(name)
        torch.testing.assert_close(ours.a.grad, a.grad, atol=2e-6, rtol=1e-4)
        torch.testing.assert_close(ours.b.grad, b.grad, atol=2e-6, rtol=1e-4)
    for name, each in trainer.network.head.named_parameters():
        if not name.startswith("act."):
            torch.testing.assert_close(each.grad, values[f"head.{name}"].grad, atol=2e-6, rtol=1e-4)


def functional_logits(network: Any, values: dict[str, Tensor], sequence: Any) -> list[Tensor]:
    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def forward(self) -> list[Tensor]:
            return question_logits(self.inner, [sequence])

    return torch.func.functional_call(Called(), {f"inner.{name}": value for name, value in values.items()}, ())


def test_an_order_is_the_files_or_a_shuffle_of_it(encoder_base: Path, decisions: Path, tmp_path: Path) -> None:
    settings = deciding(encoder_base, decisions, run__steps=1, data__shuffle=False)
    begin(tmp_path / "run", settings, say=quiet)
    run = open_decision_run(tmp_path / "run")
    states = [json.loads(line)["state"] for line in decisions.read_text().splitlines()]
    trained = list(states)
    for row in run.data.validation:
        trained.remove(row.state)
    one_epoch = [n for cursor in range(0, 192, 6) for n in run.data.batch(cursor)]
    assert [states[n] for n in one_epoch] == trained
    assert run.data.batch(192) == run.data.batch(0)
    begin(tmp_path / "other", changed(settings, {"data.shuffle": True}), say=quiet)
    shuffled = open_decision_run(tmp_path / "other").data
    again = [n for cursor in range(0, 192, 6) for n in shuffled.batch(cursor)]
    assert sorted(again) == sorted(one_epoch)
    assert again != one_epoch
    assert shuffled.batch(192) != shuffled.batch(0)


# ---- learning, and running what was learned

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"optim.ema": 0.5},
    "low-rank": {"lora.rank": 4, "lora.dropout": 0.2, "optim.ema": 0.5},
    "rlcd": {"decide.loss": "rlcd"},
}


@pytest.mark.parametrize(
    "more",
    [{"optim__lr": 0.003, "run__steps": 40}, {"optim__lr": 0.005, "lora__rank": 8, "run__steps": 60}],
    ids=["whole", "low-rank"],
)
def test_a_decision_is_learned_and_the_decider_answers_alike(
    more: dict[str, Any], laya_base: Path, decisions: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    steps = more["run__steps"]
    often = {"run__eval_every": 20, "run__save_every": steps, "run__sample_every": steps}
    settings = deciding(laya_base, decisions, decide__batch=12, **often, **more)
    begin(tmp_path / "run", settings, say=said.append)
    judged = [row for row in read_metrics(tmp_path / "run") if "judged_by" in row]
    assert judged[-1]["judged_by"] == "loss_per_question"
    assert judged[-1]["accuracy"] > 0.9
    decider, rows = Laya.load(str(tmp_path / "run"), threads=1), open_decision_run(tmp_path / "run").data.validation
    logits = [decider.logits(row.state, [row.question])[0] for row in rows]
    right = [np.argmax(z) == np.argmax(row.target) for z, row in zip(logits, rows, strict=True)]
    assert judged[-1]["accuracy"] == pytest.approx(np.mean(right))
    nats = [-float(np.dot(row.target, z - np.log(np.exp(z).sum()))) for z, row in zip(logits, rows, strict=True)]
    assert judged[-1]["loss_per_question"] == pytest.approx(np.mean(nats), abs=1e-4)
    assert any(line.startswith(f"step {steps} writes: ") for line in said)
    assert said[-1] == f"run it: heedful decide -m {tmp_path / 'run'} --text '…' --noul '…'"


def test_updates_on_an_alias_are_all_that_is_kept_and_are_gone_on_with(
    minilm_dir: Path, decisions: Path, tmp_path: Path
) -> None:
    more = {"lora__rank": 2, "run__steps": 2, "run__eval_every": 0, "run__sample_every": 0, "decide__batch": 2}
    begin(tmp_path / "run", deciding("minilm", decisions, **more), say=quiet)
    folder = model_in(tmp_path / "run")
    names = set(load_file(folder / "model.safetensors"))
    assert "encoder.encoder.layer.5.attention.self.key.lora_B" in names
    assert not [name for name in names if name.startswith("encoder.") and ".lora_" not in name]
    assert not (folder / "tokenizer").exists()
    trainer = opened(tmp_path / "run")
    sequences = [example.sequence for example in trainer.examples(0)]
    asked = [example.row for example in trainer.examples(0)]
    with torch.no_grad():
        expected = question_logits(trainer.network.eval(), sequences)
    decider = Laya.load(str(tmp_path / "run"), threads=1)
    for row, logits in zip(asked, expected, strict=True):
        np.testing.assert_allclose(decider.logits(row.state, [row.question])[0], logits.numpy(), atol=2e-4)
    begin(tmp_path / "next", deciding(tmp_path / "run", decisions, **more, optim__lr=0.0), say=quiet)
    before, after = (load_file(model_in(tmp_path / name) / "model.safetensors") for name in ("run", "next"))
    assert all(np.array_equal(before[name], after[name]) for name in names)
    all_weights = deciding(tmp_path / "run", decisions, **(more | {"lora__rank": 0}), optim__lr=0.0)
    begin(tmp_path / "whole", all_weights, say=quiet)
    whole = Laya.load(str(tmp_path / "whole"), threads=1)
    np.testing.assert_allclose(whole.logits(asked[0].state, [asked[0].question])[0], expected[0].numpy(), atol=2e-4)
    with pytest.raises(
        BadParameter, match=r"lora\.rank: is 3 with alpha 6; the base has updates of rank 2 with alpha 4"
    ):
        begin(tmp_path / "other", changed(deciding(tmp_path / "run", decisions), {"lora.rank": 3}), say=quiet)


# ---- stopping and going on


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_one_that_never_stopped(
    kind: str, laya_base: Path, decisions: Path, tmp_path: Path
) -> None:
    settings = changed(deciding(laya_base, decisions), KINDS[kind])
    begin(tmp_path / "whole", settings, say=quiet)
    original = DecisionTrainer.pass_batch

    def stopping(trainer: DecisionTrainer) -> Any:
        if trainer.state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecisionTrainer, "pass_batch", stopping)
        assert begin(tmp_path / "run", settings, say=quiet).step == 3
    resume(tmp_path / "run", say=quiet)
    folders = [tmp_path / name / "checkpoints" / "step-00000006" for name in ("whole", "run")]
    files = [{file.name: load_file(file) for file in folder.glob("*.safetensors")} for folder in folders]
    extra = {"whole": {"trained"}, "low-rank": {"trained", "updates"}, "rlcd": set()}[kind]
    assert {name.removesuffix(".safetensors") for name in files[0]} == {"model", "optimizer"} | extra
    for name, tensors in files[0].items():
        assert tensors.keys() == files[1][name].keys()
        for tensor, values in tensors.items():
            assert np.array_equal(values, files[1][name][tensor]), (name, tensor)
    rows = [[row for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("whole", "run")]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6
    manifest = json.loads((folders[0] / "manifest.json").read_text())["files"]
    assert {"encoder/config.json", "tokenizer/tokenizer.json", "rl_agent_config.json"} <= manifest.keys()


def test_a_base_or_rows_that_changed_are_refused(encoder_base: Path, decisions: Path, tmp_path: Path) -> None:
    base = shutil.copytree(encoder_base, tmp_path / "base")
    begin(tmp_path / "run", deciding(base, decisions, run__steps=1), say=quiet)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    with pytest.raises(FileFormatError, match=r"base .* has changed"):
        resume(tmp_path / "run", steps=2, say=quiet)
    rows = tmp_path / "run" / "data" / "train" / "rows.jsonl"
    rows.write_bytes(rows.read_bytes().replace(b"refund", b"ransom"))
    with pytest.raises(FileFormatError, match="its sha256 is another"):
        resume(tmp_path / "run", steps=2, say=quiet)


# ---- more than one process


def test_two_processes_compute_what_one_does(laya_base: Path, decisions: Path, tmp_path: Path) -> None:
    """Rewards are compared over both."""
    settings = deciding(laya_base, decisions, run__steps=3, lora__rank=4, decide__loss="rlcd")
    begin(tmp_path / "alone", settings, say=quiet)
    (tmp_path / "settings.json").write_text(json.dumps(settings.as_dict()))
    command = [sys.executable, __file__, str(tmp_path / "two"), str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [
        [row for row in read_metrics(tmp_path / name) if "loss" in row or "judged_by" in row]
        for name in ("alone", "two")
    ]
    assert len(rows[0]) == len(rows[1]) == 4, "three steps and a judgement"
    for alone, two in zip(*rows, strict=True):
        for name in alone.keys() - {"judged_by", "higher_is_better"}:
            assert two[name] == pytest.approx(alone[name], abs=1e-4, rel=1e-3), (alone["step"], name)


# ---- what is told, and what is refused


def test_a_dry_run_counts_the_trunk_that_stays(laya_base: Path, decisions: Path, tmp_path: Path) -> None:
    found = estimate(complete(deciding(laya_base, decisions, lora__rank=4)))
    begin(tmp_path / "run", deciding(laya_base, decisions, lora__rank=4, run__steps=1), say=quiet)
    trainer: DecisionTrainer = DecisionTrainer(open_decision_run(tmp_path / "run"))
    first = trainer.step()
    assert found.trained_parameters == sum(each.numel() for each in trainer.trained)
    assert found.frozen_bytes == 4 * (found.parameters - found.trained_parameters) > 0
    assert found.tokens > first.tokens
    assert found.step_visits < found.dense_visits, "options that do not see each other"
    assert found.epochs == pytest.approx(6 * 6 / 192)


ROW = {
    "state": "x",
    "questions": {"a": {"type": "noul", "instructions": "Is it?"}},
    "expected": {"a": True},
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is no JSON"),
        (json.dumps(ROW | {"expected": {"a": "perhaps"}}), "line 2 of .*: expected: .*does not answer 'a'"),
        (json.dumps({"state": "x", "questions": ROW["questions"]}), "line 2 of .*: .*label for none of the questions"),
        (json.dumps(ROW | {"state": 3}), "line 2 of .*: state: must be text"),
    ],
)
def test_what_is_no_labelled_state_is_refused(line: str, message: str, encoder_base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(BadParameter, match=message) as refused:
        begin(tmp_path / "run", deciding(encoder_base, rows), say=quiet)
    assert refused.value.field == "--decisions"
    assert not (tmp_path / "run").exists()


def test_questions_that_are_too_long_are_left_out_and_said(encoder_base: Path, tmp_path: Path) -> None:
    rows, said = tmp_path / "rows.jsonl", []
    long = ROW | {"state": "a long story " * 100}
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in (ROW, long, ROW)))
    begin(tmp_path / "run", deciding(encoder_base, rows, run__steps=1, data__validation_share=0.5), say=said.append)
    assert said[0].startswith("train: 2 questions, ")
    assert "; 1 left out as too long, the first: question 'a' has " in said[0]
    rows.write_text(f"{json.dumps(long)}\n")
    with pytest.raises(BadParameter, match="no question to learn from; 1 are too long"):
        begin(tmp_path / "other", deciding(encoder_base, rows), say=quiet)


def test_settings_that_do_not_go_together(base_run: Path, encoder_base: Path, decisions: Path, tmp_path: Path) -> None:
    for more, message in (
        ({"model__base": None}, "--decisions: needs a base"),
        ({"data__chat": ["x"]}, "--decisions: and --chat are two kinds"),
        ({"model__layers": 2}, r"model\.layers: is given, and a base too"),
        ({"optim__optimizer": "muon"}, "muon is for decoders"),
        ({"optim__batch_tokens": 64}, "is for texts; a step has questions"),
        ({"decide__loss": "rlcd", "optim__micro_batches": 2}, "must be 1 with rlcd"),
        ({"run__eval_choices": "x"}, "these rows are decisions"),
        ({"lora__rank": 4, "lora__targets": ["gate_proj"]}, "names no matrix of this encoder"),
        ({"model__base": str(base_run)}, "is neither an encoder nor a Laya checkpoint"),
    ):
        with pytest.raises(BadParameter, match=message):
            begin(tmp_path / "run", deciding(encoder_base, decisions, **more), say=quiet)
        assert not (tmp_path / "run").exists(), message
    assert complete(deciding(encoder_base, decisions)).optim.lr == 5e-5
    assert complete(deciding(encoder_base, decisions, lora__rank=4)).optim.lr == 5e-4


def test_a_store_gives_back_what_was_written(encoder_base: Path, decisions: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", deciding(encoder_base, decisions, run__steps=1), say=quiet)
    store, lines = DecisionStore.open(tmp_path / "run" / "data" / "train"), decisions.read_text().splitlines()
    assert len(store) == len(lines) == 240
    for row, line in zip(store, map(json.loads, lines), strict=True):
        ((name, asked),) = line["questions"].items()
        assert row.state == line["state"]
        assert row.question.to_dict() == asked
        assert sorted(row.target, reverse=True)[:2] == [1, 0]
        assert row.question.labels[row.target.index(1)] == str(line["expected"][name]).lower()


if __name__ == "__main__":
    from parallel_cases import in_processes

    folder, written = sys.argv[1:]
    told = changed(TrainSettings(), by_name(json.loads(Path(written).read_text())))
    ended = in_processes(2, lambda: begin(Path(folder), told, say=quiet))
    assert ended == [0, 0], ended
