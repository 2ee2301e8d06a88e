"""From the dial to a ModelConfig, and from that to the config.json by which transformers and heedful know the model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from heedful.errors import BadParameter
from heedful.models import config_export
from heedful.models.config import ModelConfig
from heedful.models.rope import Rope
from heedful.train.base import base_config
from heedful.train.settings import SIZES, ModelSettings, TrainSettings, told

HEAD_DIM = 64
_CONTEXTS = {"tiny": 256, "small": 512, "medium": 1024}
_VOCABULARIES = {"tiny": 2048, "small": 8192, "medium": 16384}
NORM_EPS = 1e-6
FRESH_LR, BASE_LR, LOW_RANK_LR = 3e-3, 1e-4, 1e-3
"""The highest rate, where the settings have none: of fresh weights, of all of a base's, of updates beside them."""
PREFERENCE_LR, PREFERENCE_LOW_RANK_LR = 5e-6, 5e-5
"""The same of a base that learns preferences."""
DECISION_LR, DECISION_LOW_RANK_LR = 5e-5, 5e-4
"""The same of an encoder that learns decisions, its head with it."""
BASE_CONTEXT = 1024
"""Tokens of a row at most, where the settings do not say."""


def dialled(settings: TrainSettings) -> TrainSettings:
    """The settings with nothing left to the dial: layers L give L heads of 64 channels, an MLP of 8/3 of the width.

    Raises BadParameter where what was named does not go together.
    """
    if settings.data.decisions:
        return _deciding(settings)
    if settings.model.base is not None:
        return _based(settings)
    asked = settings.model
    layers = asked.layers or SIZES[asked.size]
    hidden = asked.hidden_size or HEAD_DIM * layers
    heads = asked.heads or max(1, hidden // HEAD_DIM)
    context = asked.context_len or _CONTEXTS[asked.size]
    model = replace(
        asked,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=asked.kv_heads or _shared_by_three(heads),
        intermediate_size=asked.intermediate_size or -(-8 * hidden // 3 // 64) * 64,
        context_len=context,
        window=asked.window or context // 2,
    )
    vocab_size = settings.data.vocab_size or _VOCABULARIES[asked.size]
    batch_tokens = settings.optim.batch_tokens or 8 * context
    if batch_tokens < context:
        raise BadParameter("optim.batch_tokens", f"{batch_tokens:,} are less than a context of {context:,}")
    model_config(model, vocab_size)
    return replace(
        settings,
        model=model,
        data=replace(settings.data, vocab_size=vocab_size),
        optim=replace(
            settings.optim, batch_tokens=batch_tokens, lr=FRESH_LR if settings.optim.lr is None else settings.optim.lr
        ),
    )


def _require_shape_of_base(settings: TrainSettings, free: tuple[str, ...]) -> None:
    """A base brings its shape and its tokenizer: what the settings say of them is refused."""
    defaults = TrainSettings()
    fixed = [f"model.{each.name}" for each in fields(ModelSettings) if each.name not in free]
    for name in [*fixed, "data.tokenizer", "data.vocab_size"]:
        if settings.value(name) != defaults.value(name):
            raise BadParameter(name, "is given, and a base too, which has its own", "Leave one of them out.")


def _deciding(settings: TrainSettings) -> TrainSettings:
    _require_shape_of_base(settings, ("base",))
    default_lr = DECISION_LOW_RANK_LR if settings.lora.rank else DECISION_LR
    lr = default_lr if settings.optim.lr is None else settings.optim.lr
    return replace(settings, optim=replace(settings.optim, lr=lr))


def _based(settings: TrainSettings) -> TrainSettings:
    _require_shape_of_base(settings, ("base", "context_len"))
    config = base_config(str(settings.model.base))
    if settings.lora.rank and config.family == "phi3":
        _require_whole_fusions(settings.lora.targets)
    context = settings.model.context_len or min(config.context_len, BASE_CONTEXT)
    if context > config.context_len:
        raise BadParameter("model.context_len", f"is {context:,}; the base sees {config.context_len:,} at most")
    at_least = context * (2 if settings.data.preferences else 1)
    batch_tokens = settings.optim.batch_tokens or at_least
    if batch_tokens < at_least:
        what = "two contexts" if settings.data.preferences else "a context"
        raise BadParameter("optim.batch_tokens", f"{batch_tokens:,} are less than {what} of {context:,}")
    if settings.data.preferences:
        default_lr = PREFERENCE_LOW_RANK_LR if settings.lora.rank else PREFERENCE_LR
    else:
        default_lr = LOW_RANK_LR if settings.lora.rank else BASE_LR
    lr = default_lr if settings.optim.lr is None else settings.optim.lr
    return replace(
        settings,
        model=replace(settings.model, context_len=context),
        optim=replace(settings.optim, batch_tokens=batch_tokens, lr=lr),
    )


def _require_whole_fusions(targets: tuple[str, ...]) -> None:
    """Phi-3's files have these in one matrix each, whose update is one too."""
    for fused in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if 0 < len(set(fused) & set(targets)) < len(fused):
            together = ", ".join(fused)
            raise BadParameter(
                "lora.targets", f"has some of {together}, which are one matrix here", "Name all or none."
            )


def _shared_by_three(heads: int) -> int:
    """KV heads: the most that divide the heads evenly, three or more query heads to each where there are three."""
    return max(kv for kv in range(1, max(1, heads // 3) + 1) if heads % kv == 0)


def model_config(settings: ModelSettings, vocab_size: int) -> ModelConfig:
    """Of dialled settings. Raises BadParameter where they do not go together."""
    layers, hidden = told(settings.layers), told(settings.hidden_size)
    heads, kv_heads = told(settings.heads), told(settings.kv_heads)
    if hidden % (2 * heads):
        raise BadParameter("model.heads", f"{heads} heads of an even width do not fit {hidden} channels")
    if heads % kv_heads:
        raise BadParameter("model.kv_heads", f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    pattern = (settings.windows * layers)[:layers]
    windows = tuple(settings.window if kind == "S" else None for kind in pattern)
    config = ModelConfig(
        family="qwen3" if settings.qk_norm else "llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=told(settings.intermediate_size),
        context_len=told(settings.context_len),
        windows=windows,
        rope=Rope(hidden // heads, settings.rope_theta),
        norm_eps=NORM_EPS,
        qk_norm=settings.qk_norm,
        tied_head=settings.tied_head,
    )
    if any(config.windows) and not settings.qk_norm:
        raise BadParameter("model.windows", "need model.qk_norm", "No other kind of model has both in its files.")
    return config


def hf_config(config: ModelConfig, end_id: int) -> dict[str, Any]:
    """config.json of what is trained: float32, and one token that begins and ends a text."""
    ids = {"bos_token_id": end_id, "eos_token_id": end_id}
    return {**config_export.hf_config(config), **ids, "dtype": "float32", "torch_dtype": "float32"}
