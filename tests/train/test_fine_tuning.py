"""A base on chats: with all weights, and with low-rank updates beside it as a GGUF file has it."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from training_cases import LORA, quiet, write_documents

from heedful.engine.llm import LLM
from heedful.errors import BadParameter, FileFormatError, SourceError
from heedful.kernels.attention import DenseAttend
from heedful.models.decoder import Decoder
from heedful.train.base import open_base
from heedful.train.batches import IGNORED, arrays
from heedful.train.chat_store import chat_of
from heedful.train.loop import begin, complete, resume
from heedful.train.low_rank import FrozenLinear, UpdatedLinear, merged
from heedful.train.network import last_logits, place
from heedful.train.run_files import open_run, read_metrics
from heedful.train.settings import TrainSettings, changed
from heedful.train.trainer import ChatTrainer, Trainer
from heedful.weights.export import export_gguf, export_hf
from heedful.weights.load import load
from heedful.weights.run_folder import model_in


@pytest.fixture(scope="module")
def base(base_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder as a GGUF in Q8_0, with F16 where rows are not whole blocks."""
    path = tmp_path_factory.mktemp("base") / "base.gguf"
    export_gguf(load(str(base_run)), path, "q8_0")
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, draw = tmp_path_factory.mktemp("chats") / "chats.jsonl", random.Random(3)
    words = "cat dog house sea man hat red blue".split()  # noqa: SIM905
    rows = []
    for _ in range(24):
        turns = [
            {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(1, 4)))}
            for role in ("user", "assistant") * draw.randint(1, 2)
        ]
        rows.append({"messages": turns})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tuning(base: Path, chats: Path, **more: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "model.base": str(base), "data.chat": [str(chats)], "optim.batch_tokens": 128, "optim.micro_batches": 2,
        "run.steps": 6, "run.threads": 1, "run.save_every": 2, "run.eval_every": 3, "run.sample_every": 0,
        "model.context_len": 96,
    }  # fmt: skip
    return changed(TrainSettings(), values | {name.replace("__", "."): value for name, value in more.items()})


KINDS: dict[str, dict[str, Any]] = {
    "whole": {"optim.ema": 0.5},
    "low-rank": {**LORA, "lora.dropout": 0.2},
}


# ---- data and loss


def test_the_loss_is_the_mean_over_what_assistants_say(base: Path, chats: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", tuning(base, chats, run__steps=1), say=quiet)
    run = open_run(tmp_path / "run")
    trainer = ChatTrainer(run)
    batch = run.data.batch(0)
    nats, targets = 0.0, 0
    for segment in batch.segments:
        chat = chat_of(run.data.store, segment.document)
        ids = torch.tensor(chat.token_ids)
        hidden = trainer.decoder(ids, torch.arange(len(ids)), DenseAttend([len(ids)]))
        losses = F.cross_entropy(trainer.decoder.logits(hidden[:-1]), ids[1:], reduction="none").detach()
        nats += float(losses[torch.tensor(chat.learned[1:])].sum())
        targets += sum(chat.learned)
    facts = trainer.step()
    assert facts.targets == targets < facts.tokens
    assert facts.loss == pytest.approx(nats / targets, rel=1e-5)
    row = next(row for row in read_metrics(tmp_path / "run") if "judged_by" in row)
    assert row["judged_by"] == "loss_per_target"


def test_no_chat_is_cut_and_the_last_token_is_a_target_alone(base: Path, chats: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", tuning(base, chats, run__steps=1), say=quiet)
    data = open_run(tmp_path / "run").data
    for segment in data.batch(0).segments:
        chat = chat_of(data.store, segment.document)
        made = arrays(data.store, [segment])
        assert made.token_ids.tolist() == chat.token_ids[:-1]
        expected = np.where(chat.learned, chat.token_ids, IGNORED)[1:]
        assert made.targets.tolist() == expected.tolist()


def test_what_is_learned_is_shown_before(base: Path, chats: Path, tmp_path: Path) -> None:
    said: list[str] = []
    begin(tmp_path / "run", tuning(base, chats, run__steps=1), say=said.append)
    first = json.loads(chats.read_text().splitlines()[0])["messages"]
    assert said[0].startswith("train: 24 rows, ")
    shown = said[1].partition("\n")[2]
    assert shown.startswith(
        f"<|endoftext|><|im_start|>user\n{first[0]['content']}<|im_end|>\n<|im_start|>assistant\n[["
    )
    assert f"[[{first[1]['content']}<|im_end|>]]" in shown


# ---- whole weights


def test_the_run_s_folder_loads_here_and_in_transformers(base: Path, chats: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    begin(tmp_path / "run", tuning(base, chats), say=quiet)
    folder = model_in(tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "the red cat"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert asked == "<|im_start|>user\nthe red cat<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    trainer = ChatTrainer(open_run(tmp_path / "run"))
    trainer.load(folder)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(last_logits(trainer.decoder, ids), expected, atol=1e-4)
    ours = LLM(str(tmp_path / "run")).chat(messages, max_tokens=4, temperature=0)
    made = theirs.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :]
    assert ours.text == tokenizer.decode(made, skip_special_tokens=True)


def test_training_begins_as_the_base(base: Path, chats: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", tuning(base, chats, run__steps=1, optim__lr=0.0), say=quiet)
    before, after = load(str(base)).weights, load(str(tmp_path / "run")).weights
    assert before.keys() == after.keys()
    for name, stored in before.items():
        assert np.array_equal(stored.to_float32(), after[name].to_float32()), name


def test_a_base_goes_on_with_text(base: Path, tmp_path: Path) -> None:
    texts = write_documents(tmp_path / "t.jsonl")
    settings = tuning(base, Path("x"), data__chat=[], data__files=[str(texts)], run__steps=3)
    begin(tmp_path / "run", settings, say=quiet)
    rows = list(read_metrics(tmp_path / "run"))
    assert rows[-1]["judged_by"] == "bits_per_byte"


# ---- low-rank updates


def updated(base: Path, chats: Path, folder: Path, **more: Any) -> ChatTrainer:
    begin(folder, tuning(base, chats, **{**LORA, **more}), say=quiet)
    trainer = ChatTrainer(open_run(folder))
    trainer.load(model_in(folder))
    trainer.decoder.eval()
    return trainer


def test_the_base_stays_as_its_file_has_it_and_computes_alike(base: Path, chats: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", tuning(base, chats, **LORA, run__steps=1), say=quiet)
    trainer = ChatTrainer(open_run(tmp_path / "run"))
    loaded = load(str(base))
    whole = Decoder(loaded.config)
    place(whole, loaded.weights)
    frozen = [module for module in trainer.decoder.modules() if isinstance(module, FrozenLinear)]
    formats = {part.format_name for module in frozen for part in module.parts}
    assert formats == {"Q8_0", "F16"}
    held = sum(parameter.numel() for parameter in trainer.decoder.parameters() if not parameter.requires_grad)
    assert held == 5 * 32, "norms alone are float32"
    ids = torch.arange(40, 70)
    with torch.no_grad():
        assert torch.allclose(last_logits(trainer.decoder, ids.tolist()), last_logits(whole, ids.tolist()), atol=1e-5)
    found = []
    for decoder in (trainer.decoder, whole):
        x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        down = decoder.get_submodule("layers.1.mlp")(x)
        found.append(torch.autograd.grad(down.square().sum(), x)[0])
    assert torch.allclose(found[0], found[1], atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_updates_are_those_that_peft_computes(base: Path, chats: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    trainer = updated(base, chats, tmp_path / "run", lora__targets=["q_proj", "v_proj", "up_proj", "down_proj"])
    export_hf(load(str(base)), tmp_path / "hf", "f32")
    of_base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(of_base, model_in(tmp_path / "run"))
    with_updates = {name.split(".")[-2] for name, _ in theirs.named_modules() if name.endswith(".lora_A")}
    assert with_updates == {"q_proj", "v_proj", "up_proj", "down_proj"}
    ids = list(range(40, 70))
    with torch.no_grad():
        ours, expected = last_logits(trainer.decoder, ids), theirs(torch.tensor([ids])).logits[0, -1]
        assert torch.allclose(ours, expected, atol=1e-4)
        with theirs.disable_adapter():
            without = theirs(torch.tensor([ids])).logits[0, -1]
    assert not torch.allclose(ours, without, atol=1e-3), "they change something"


@pytest.fixture(scope="module")
def phi3(base_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Phi-3, whose q, k and v, and whose gate and up, are one matrix each."""
    transformers = pytest.importorskip("transformers")
    folder, tokenizer = tmp_path_factory.mktemp("phi3"), LLM(str(base_run)).tokenizer
    end_id = min(tokenizer.eos_ids)
    config = transformers.Phi3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=96, original_max_position_embeddings=96,
        pad_token_id=end_id, bos_token_id=end_id, eos_token_id=end_id, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Phi3ForCausalLM(config).save_pretrained(folder)
    for file in model_in(base_run).glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_updates_of_fused_matrices_and_their_gradients_are_those_of_peft(
    phi3: Path, chats: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    trainer = updated(phi3, chats, tmp_path / "run", optim__lr=0.02)
    of_base = transformers.AutoModelForCausalLM.from_pretrained(phi3, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(of_base, model_in(tmp_path / "run"), is_trainable=True)
    with_updates = {name.split(".")[-2] for name, _ in theirs.named_modules() if name.endswith(".lora_A")}
    assert with_updates == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    batch, total, targets = trainer.run.data.batch(0), torch.zeros(()), 0
    for segment in batch.segments:
        chat = chat_of(trainer.run.data.store, segment.document)
        ids, learned = torch.tensor([chat.token_ids]), torch.tensor(chat.learned)[1:]
        losses = F.cross_entropy(theirs(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total, targets = total + losses[learned].sum(), targets + int(learned.sum())
    (total / targets).backward()
    assert trainer.gradients(batch) == pytest.approx(total.item() / targets, rel=1e-5)
    expected = {name.replace(".default", ""): each.grad for name, each in theirs.named_parameters() if "lora_" in name}
    ours = {name: each.grad for name, each in trainer.model._named()}  # type: ignore[union-attr]
    assert ours.keys() == expected.keys()
    assert len(ours) == 2 * 4 * 2
    for name, grad in ours.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-3)
    made = merged(tmp_path / "run")
    whole = Decoder(made.config)
    place(whole, made.weights)
    with torch.no_grad():
        assert torch.allclose(last_logits(whole, ids[0].tolist()), theirs(ids).logits[0, -1], atol=1e-4)


def test_a_part_of_a_fused_matrix_gets_no_update(phi3: Path, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"some of q_proj, k_proj, v_proj, which are one matrix here"):
        begin(tmp_path / "run", tuning(phi3, chats, **LORA, lora__targets=["q_proj", "o_proj"]), say=quiet)
    assert not (tmp_path / "run").exists()


def test_the_merged_base_computes_alike(base: Path, chats: Path, tmp_path: Path) -> None:
    trainer = updated(base, chats, tmp_path / "run")
    made = merged(tmp_path / "run")
    whole = Decoder(made.config)
    place(whole, made.weights)
    ids = list(range(40, 70))
    with torch.no_grad():
        assert torch.allclose(last_logits(trainer.decoder, ids), last_logits(whole, ids), atol=1e-4)
    begin(tmp_path / "other", tuning(base, chats, run__steps=1), say=quiet)
    with pytest.raises(BadParameter, match="trains no low-rank updates"):
        merged(tmp_path / "other")


def test_dropout_leaves_inputs_of_updates_out_and_is_over_when_judged(base: Path, chats: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", tuning(base, chats, **LORA, lora__dropout=0.5), say=quiet)
    trainer = ChatTrainer(open_run(tmp_path / "run"))
    trainer.load(model_in(tmp_path / "run"))
    linear = next(module for module in trainer.decoder.modules() if isinstance(module, UpdatedLinear))
    x = torch.ones(3, 32)
    linear.train()
    assert not torch.equal(linear(x), linear(x))
    first = trainer.judge()
    assert first == trainer.judge()


# ---- stopping and going on


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_one_that_never_stopped(kind: str, base: Path, chats: Path, tmp_path: Path) -> None:
    settings = changed(tuning(base, chats), KINDS[kind])
    begin(tmp_path / "whole", settings, say=quiet)
    original = Trainer.pass_batch

    def stopping(trainer: Trainer) -> Any:
        if trainer.state.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return original(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "pass_batch", stopping)
        assert begin(tmp_path / "run", settings, say=quiet).step == 3
    resume(tmp_path / "run", say=quiet)
    folders = [tmp_path / name / "checkpoints" / "step-00000006" for name in ("whole", "run")]
    files = [{file.name: load_file(file) for file in folder.glob("*.safetensors")} for folder in folders]
    expected = {"whole": {"model", "trained", "optimizer"}, "low-rank": {"adapter_model", "optimizer"}}
    assert {name.removesuffix(".safetensors") for name in files[0]} == expected[kind]
    for name, tensors in files[0].items():
        assert tensors.keys() == files[1][name].keys()
        for tensor, values in tensors.items():
            assert np.array_equal(values, files[1][name][tensor]), (name, tensor)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("whole", "run")]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_a_base_that_changed_is_refused(base: Path, chats: Path, tmp_path: Path) -> None:
    other = tmp_path / "base.gguf"
    other.write_bytes(base.read_bytes())
    begin(tmp_path / "run", tuning(other, chats, **LORA, run__steps=1), say=quiet)
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"base .* has changed: its sha256 was"):
        resume(tmp_path / "run", steps=2, say=quiet)
    other.unlink()
    with pytest.raises(FileFormatError, match=r"base .* cannot be opened"):
        resume(tmp_path / "run", steps=2, say=quiet)


# ---- what is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model__base": None}, "--chat: needs a base"),
        ({"model__layers": 3}, "model.layers: is given, and a base too"),
        ({"data__vocab_size": 300}, "data.vocab_size: is given, and a base too"),
        ({"model__context_len": 97}, "model.context_len: is 97; the base sees 96 at most"),
        ({"data__template": "nowhere.jinja"}, "nowhere.jinja cannot be read"),
        ({"optim__batch_tokens": 5}, "5 are less than a context of 96"),
    ],
)
def test_settings_that_do_not_go_together(
    more: dict[str, Any], message: str, base: Path, chats: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadParameter, match=message):
        begin(tmp_path / "run", tuning(base, chats, **more), say=quiet)


def test_rates_and_contexts_of_a_base(base: Path, chats: Path) -> None:
    whole = complete(tuning(base, chats, model__context_len=None, optim__batch_tokens=None))
    assert (whole.optim.lr, whole.model.context_len, whole.optim.batch_tokens) == (1e-4, 96, 96)
    assert complete(tuning(base, chats, **LORA)).optim.lr == 1e-3
    assert open_base(str(base))[0].source == str(base)


def test_a_run_of_updates_stands_for_its_base_with_them(base: Path, chats: Path, tmp_path: Path) -> None:
    updated(base, chats, tmp_path / "run")
    prompt = "<the red cat"
    alone = LLM(str(tmp_path / "run"))
    beside = LLM(str(base), adapters={"a": str(tmp_path / "run")})
    asked = {"max_tokens": 8, "temperature": 0.0}
    assert alone.generate(prompt, **asked).text == beside.generate(prompt, **asked, adapter="a").text
    answered = alone.chat([{"role": "user", "content": "x"}], max_tokens=1)
    template = alone.tokenizer.chat_template
    assert template is not None, "the run's own"
    assert answered.prompt_token_ids[1] == alone.tokenizer.id_of("<|im_start|>")
    config = model_in(tmp_path / "run") / "adapter_config.json"
    settings = json.loads(config.read_text())
    for name, message in (
        (None, "names no base"),
        (str(tmp_path / "run"), "cannot be opened"),  # no adapter on itself
        (str(tmp_path / "gone"), "cannot be opened"),
    ):
        config.write_text(json.dumps(settings | {"base_model_name_or_path": name}))
        with pytest.raises(SourceError, match=message):
            load(str(config.parent))
