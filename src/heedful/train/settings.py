"""What a training run is told: every setting, its default, and how a config file or `section.key=value` changes it.

One dial, `size` or `layers`, sets the shape of the model; what is named beside it stays as it was named. Knows nothing
of tensors.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from heedful.errors import BadParameter

SIZES = {"tiny": 4, "small": 6, "medium": 12}
"""Name on the dial → layers."""


@dataclass(frozen=True)
class ModelSettings:
    """Of what is None, the dial decides: see `shape.py`. A base brings its own; `context_len` may be less."""

    base: str | None = None
    """The model that training begins from, as any verb names one; None: fresh weights."""
    size: Literal["tiny", "small", "medium"] = "small"
    layers: int | None = None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate_size: int | None = None
    context_len: int | None = None
    qk_norm: bool = True
    tied_head: bool = True
    windows: str = "L"
    """Repeated over the layers: S sees `window` tokens, L all."""
    window: int | None = None
    """None: half the context."""
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class DataSettings:
    files: tuple[str, ...] = ()
    """Text files (each is one document), or JSONL with {"text": …} in every line."""
    chat: tuple[str, ...] = ()
    """JSONL with {"messages": […]} or {"prompt": …, "completion": …} in every line; what assistants say is learned."""
    preferences: tuple[str, ...] = ()
    """JSONL with {"prompt": …, "chosen": …, "rejected": …} in every line."""
    decisions: tuple[str, ...] = ()
    """JSONL with {"state": …, "questions": …, "expected": …} in every line."""
    template: str | None = None
    """A file with the chat template to use, instead of the model's own."""
    validation: tuple[str, ...] = ()
    """Files to judge by; (): a share of the training text is kept apart."""
    validation_share: float = 0.02
    shuffle: bool = True
    """False: in the order of the files, every epoch."""
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    vocab_size: int | None = None
    """Of a byte-level BPE trained on the data. None: the dial decides."""


@dataclass(frozen=True)
class OptimSettings:
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of the layers; everything else is AdamW's even then."""
    lr: float | None = None
    """The highest. None: the kind of training decides."""
    schedule: Literal["wsd", "cosine"] = "wsd"
    warmup: float = 0.02
    """Share of the steps."""
    decay: float = 0.4
    """wsd: share of the steps, the last ones, in which the rate falls."""
    min_lr: float = 0.0
    """Share of `lr` that is left at the end."""
    schedule_steps: int | None = None
    """The rate is that of a run of so many steps, which is stopped before. None: run.steps."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    """muon's."""
    clip: float = 1.0
    """Largest norm of all gradients together; 0: any."""
    batch_tokens: int | None = None
    """Most tokens of a step. None: 8 contexts."""
    precision: Literal["f32", "bf16"] = "f32"
    """Of the layers' matrix products in steps. bf16 (mixed precision) is faster on processors that have products of it
    (AVX-512 BF16, AMX), slower on others; weights, their gradients and the optimizer stay float32.
    """
    micro_batches: int = 1
    """Parts of a step's batch that run one after another; the step is the same."""
    loss_chunk: int = 1024
    """Tokens whose logits are held at once."""
    checkpoint_activations: bool = False
    """Compute a layer again when its gradients are due, rather than keep what it made."""
    ema: float = 0.0
    """Decay of an average of the weights, which is then what is judged and saved to be run; 0: none."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank updates beside a base that stays as it is, in the format of its file (arXiv:2106.09685)."""

    rank: int = 0
    """0: none, all weights are trained."""
    alpha: float | None = None
    """Updates count alpha / rank times. None: twice the rank."""
    dropout: float = 0.0
    """Share of an update's inputs that a step leaves out."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Matrices of every layer that get one, by the names that the peft package knows."""

    @property
    def told_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scale(self) -> float:
        return self.told_alpha / self.rank


@dataclass(frozen=True)
class DpoSettings:
    """Direct preference optimization (arXiv:2305.18290)."""

    beta: float = 0.1
    """How dear it is to move away from the base."""
    label_smoothing: float = 0.0
    """How often a preference is taken to be the wrong way round: 0 to less than a half."""
    sft_weight: float = 0.0
    """Of −log p of a token of the chosen answers, added to the loss."""


@dataclass(frozen=True)
class DecideSettings:
    """Learning to decide: typed questions about states, answered by a head on an encoder."""

    loss: Literal["ce", "rlcd"] = "ce"
    """Cross-entropy against the rows' shares; rlcd: and a reward of sampled distributions."""
    batch: int = 8
    """Questions of a step."""
    head_layers: int = 1
    """Of the head that a base without one gets."""


@dataclass(frozen=True)
class ParallelSettings:
    """How the processes that torchrun starts share a model. Of what is None, their number decides."""

    data: int | None = None
    """Ranks that share the batch, and weights and optimizer by rows. None: all processes over `tensor`."""
    tensor: int | None = None
    """Ranks that share every matrix of a layer. None: 1."""
    timeout: int = 1800
    """Seconds that a process waits for the others before the run ends."""


@dataclass(frozen=True)
class RunSettings:
    steps: int = 1000
    seed: int = 0
    threads: int | None = None
    """Of a machine, for its processes together. None: all processors. A resumed run equals one that was never stopped
    with the same number only.
    """
    log_every: int = 10
    eval_every: int = 100
    eval_tokens: int = 65536
    """About so many of the validation text, the same ones every time."""
    eval_choices: str | None = None
    """JSONL of questions with choices, which are judged with the validation."""
    sample_every: int = 200
    sample_tokens: int = 60
    sample_prompt: str = ""
    save_every: int = 200
    keep: int = 2
    """Newest checkpoints that stay, besides the one with the best validation."""


@dataclass(frozen=True)
class TrainSettings:
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    dpo: DpoSettings = field(default_factory=DpoSettings)
    decide: DecideSettings = field(default_factory=DecideSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = self.value(name)
            if value is not None and not low <= value <= high:
                raise BadParameter(name, f"is {value}; {low:g} to {high:g} are possible")
        if not self.model.windows or set(self.model.windows) - set("SL"):
            raise BadParameter("model.windows", f"is {self.model.windows!r}", "Write a pattern of S and L, as SSSL.")
        if self.optim.warmup + self.optim.decay > 1:
            raise BadParameter("optim.decay", "and optim.warmup are together more than all steps", "They are shares.")
        named = {
            "--data": self.data.files,
            "--chat": self.data.chat,
            "--preferences": self.data.preferences,
            "--decisions": self.data.decisions,
        }
        if len(given := [option for option, paths in named.items() if paths]) > 1:
            raise BadParameter(given[1], f"and {given[0]} are two kinds of training", "Give one of them.")
        if given and given[0] != "--data" and self.model.base is None:
            base = "minilm" if self.data.decisions else "smollm2"
            raise BadParameter(given[0], "needs a base", f"Name one: --base {base}")
        if self.optim.precision != "f32":
            if self.data.preferences:
                raise BadParameter(
                    "optim.precision", "must be f32 for preferences: they teach small differences of log p"
                )
            if self.parallel.tensor is not None and self.parallel.tensor > 1:
                raise BadParameter("optim.precision", "must be f32 where layers are cut", "Leave parallel.tensor out.")
        if self.lora.rank:
            self._require_lora_can_be()
        if self.data.decisions:
            self._require_decisions_can_be()

    def _require_lora_can_be(self) -> None:
        if self.model.base is None:
            raise BadParameter("lora.rank", "needs a base that the updates belong to", "Name one: --base smollm2")
        if unknown := set(self.lora.targets) - set(LoraSettings().targets):
            known = ", ".join(LoraSettings().targets)
            raise BadParameter("lora.targets", f"has {', '.join(sorted(unknown))}", f"Known: {known}.")
        if not self.lora.targets:
            raise BadParameter("lora.targets", "names none", f"Known: {', '.join(LoraSettings().targets)}.")
        if self.optim.optimizer == "muon":
            raise BadParameter("optim.optimizer", "muon is for whole matrices", "Train low-rank updates with adamw.")

    def _require_decisions_can_be(self) -> None:
        if self.optim.optimizer == "muon":
            raise BadParameter("optim.optimizer", "muon is for decoders", "Train deciders with adamw.")
        if self.optim.batch_tokens is not None:
            raise BadParameter("optim.batch_tokens", "is for texts; a step has questions", "Set decide.batch.")
        if self.decide.loss == "rlcd" and self.optim.micro_batches > 1:
            raise BadParameter("optim.micro_batches", "must be 1 with rlcd, which compares a batch's rewards")
        for name in ("data.template", "run.eval_choices"):
            if self.value(name) is not None:
                raise BadParameter(name, "is for models that write, and these rows are decisions", "Leave it out.")

    def value(self, name: str) -> Any:
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_MOST = 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {
    "model.layers": (1, 4096),
    "model.hidden_size": (2, 1 << 20),
    "model.heads": (1, 1 << 14),
    "model.kv_heads": (1, 1 << 14),
    "model.intermediate_size": (1, 1 << 22),
    "model.context_len": (2, _MOST),
    "model.window": (1, _MOST),
    "model.rope_theta": (1.001, 1e12),
    "data.validation_share": (0, 0.5),
    "data.vocab_size": (259, 1 << 20),
    "optim.lr": (0, 10),
    "optim.warmup": (0, 1),
    "optim.decay": (0, 1),
    "optim.min_lr": (0, 1),
    "optim.schedule_steps": (1, _MOST),
    "optim.weight_decay": (0, 10),
    "optim.beta1": (0, 0.9999999),
    "optim.beta2": (0, 0.9999999),
    "optim.eps": (1e-16, 1),
    "optim.momentum": (0, 0.9999999),
    "optim.clip": (0, 1e9),
    "optim.batch_tokens": (1, _MOST),
    "optim.micro_batches": (1, 1 << 16),
    "optim.loss_chunk": (1, _MOST),
    "optim.ema": (0, 0.9999999),
    "lora.rank": (0, 1 << 14),
    "lora.alpha": (1e-6, 1 << 20),
    "lora.dropout": (0, 0.95),
    "dpo.beta": (1e-6, 1e3),
    "dpo.label_smoothing": (0, 0.4999),
    "dpo.sft_weight": (0, 1e3),
    "decide.batch": (1, 1 << 16),
    "decide.head_layers": (1, 64),
    "parallel.data": (1, 1 << 20),
    "parallel.tensor": (1, 1 << 14),
    "parallel.timeout": (1, 1 << 20),
    "run.steps": (1, _MOST),
    "run.seed": (0, 2**63 - 1),
    "run.threads": (1, 4096),
    "run.log_every": (1, _MOST),
    "run.eval_every": (0, _MOST),
    "run.eval_tokens": (1, _MOST),
    "run.sample_every": (0, _MOST),
    "run.sample_tokens": (1, _MOST),
    "run.save_every": (0, _MOST),
    "run.keep": (1, 1 << 16),
}


def changed(settings: TrainSettings, values: Mapping[str, Any]) -> TrainSettings:
    """`settings` with other values, by "section.key". Raises BadParameter for unknown names and impossible values."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        known = _types_of(section)
        if key not in known:
            raise _unknown(name)
        sections.setdefault(section, {})[key] = _checked(name, value, known[key])
    parts = {section: replace(getattr(settings, section), **keys) for section, keys in sections.items()}
    return replace(settings, **parts)


Number = TypeVar("Number", int, float)


def told(value: Number | None) -> Number:
    """A setting that the dial has filled in."""
    assert value is not None
    return value


def from_file(path: Path) -> dict[str, Any]:
    """Values by "section.key" of a TOML or JSON file with the sections of TrainSettings."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise BadParameter("--config", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadParameter(
            "--config", f"{path} is not valid: {error}", "It is read as TOML, or JSON as *.json."
        ) from None
    if not isinstance(found, dict):
        raise BadParameter(
            "--config",
            f"{path} holds no table",
            f"Its sections: {', '.join(part.name for part in fields(TrainSettings))}.",
        )
    return by_name(found)


def by_name(sections: Mapping[str, Any]) -> dict[str, Any]:
    """{"model": {"layers": 2}} → {"model.layers": 2}."""
    values: dict[str, Any] = {}
    for section, keys in sections.items():
        if not isinstance(keys, dict):
            raise _unknown(str(section))
        values.update({f"{section}.{key}": value for key, value in keys.items()})
    return values


def from_words(words: Iterable[str]) -> dict[str, Any]:
    """`section.key=value` each; the value is read as JSON where it can be, else as a word."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise BadParameter("--set", f"{word!r} sets nothing", "Write it as optim.lr=0.001.")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values


def _types_of(section: str) -> dict[str, Any]:
    kinds = {part.name: part.default_factory for part in fields(TrainSettings)}
    return get_type_hints(kinds[section]) if section in kinds else {}


def _unknown(name: str) -> BadParameter:
    known = [f"{part.name}.{key}" for part in fields(TrainSettings) for key in _types_of(part.name)]
    same_key = [full for full in known if full.endswith(f".{name.rpartition('.')[2]}")]
    near = same_key or get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known)}."
    return BadParameter(name, "there is no such setting", hint)


def _checked(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise BadParameter(name, f"is {value!r}", f"Known: {', '.join(get_args(kind))}.")
        return value
    if kind == tuple[str, ...]:
        words = [value] if isinstance(value, str) else value
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise BadParameter(name, f"is {value!r}", "It is a list of texts.")
        return tuple(words)
    allowed = get_args(kind) or (kind,)
    if float in allowed and type(value) is int:
        value = float(value)
    if type(value) not in allowed:
        wanted = " or ".join({int: "a whole number", float: "a number", bool: "true or false", str: "a text",
                              NoneType: "nothing"}[each] for each in allowed)  # fmt: skip
        raise BadParameter(name, f"is {value!r}, it must be {wanted}")
    return value
