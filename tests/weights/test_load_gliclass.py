"""GLiClass checkpoints that heedful does not compute, or that are broken: named, never a crash."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heedful.decide.gliclass import GLiClass
from heedful.errors import FileFormatError, HeedfulError, SourceError, UnsupportedModel
from heedful.models.gliclass_config import gliclass_config_from_hf
from heedful.weights.load_gliclass import load_gliclass, names_gliclass

GOLDEN = Path(__file__).parent.parent / "golden" / "decisions" / "gliclass"
UNI, BI = "deberta_simple", "bi_encoder"


def settings_of(model: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((GOLDEN / model / "config.json").read_text())
    return settings


def copied(folder: Path, model: str, **changes: Any) -> Path:
    shutil.copytree(GOLDEN / model, folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(settings_of(model) | changes))
    return folder / "model"


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (UNI, {"model_type": "bert"}, "model_type 'bert', not GLiClass"),
        (UNI, {"architecture_type": "encoder-decoder"}, "architecture_type is 'encoder-decoder'"),
        (UNI, {"architecture_type": "decoder-kv"}, "architecture_type is 'decoder-kv'"),
        (UNI, {"architecture_type": "bi-encoder-fused"}, "architecture_type is 'bi-encoder-fused'"),
        (UNI, {"architecture_type": "bi-encoder"}, "no label_model_config"),
        (UNI, {"scorer_type": "hopfield"}, "scorer_type is 'hopfield'"),
        (UNI, {"scorer_type": "cross-attn"}, "scorer_type is 'cross-attn'"),
        (UNI, {"scorer_type": ["simple"]}, r"scorer_type is \"\['simple'\]\""),
        (UNI, {"pooling_strategy": "pass"}, "pooling_strategy is 'pass'"),
        (UNI, {"class_token_pooling": "last"}, "class_token_pooling is 'last'"),
        (UNI, {"use_lstm": True}, "asks for use_lstm"),
        (UNI, {"use_segment_embeddings": True, "use_calibrator": True}, "use_segment_embeddings, use_calibrator"),
        (UNI, {"squeeze_layers": True}, "asks for squeeze_layers"),
        (UNI, {"encoder_layer_id": 1}, "a layer before the last"),
        (UNI, {"encoder_config": None}, "no encoder_config"),
        (UNI, {"encoder_config": {"model_type": "t5"}}, "model_type 't5'"),
        (UNI, {"encoder_config": {"model_type": "bert"}}, "of this bert lacks 'vocab_size'"),
        (UNI, {"vocab_size": "many"}, "vocab_size is many"),
        (UNI, {"hidden_size": -3}, "hidden_size is '-3'"),
        (UNI, {"projector_hidden_act": "sin"}, "activation 'sin'"),
        (UNI, {"prompt_first": "yes"}, "prompt_first is 'yes'"),
        (UNI, {"class_token_index": -1}, "class_token_index is -1"),
        (UNI, {"text_token_index": 303}, "text_token_index is 303"),
        (UNI, {"text_token_index": 299.5}, "text_token_index is 299.5"),
    ],
)
def test_settings_that_are_not_computed(model: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        gliclass_config_from_hf(settings_of(model) | changes)


def test_marks_added_after_the_encoders_config_was_written() -> None:
    """Old files leave the encoder's vocabulary as it was; a missing model_type means DeBERTa."""
    settings = settings_of(UNI)
    settings["encoder_config"] |= {"vocab_size": 300}
    del settings["encoder_config"]["model_type"]
    config = gliclass_config_from_hf(settings)
    assert (config.encoder.family, config.encoder.vocab_size, config.label_id) == ("deberta-v2", 303, 300)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (UNI, {"class_token_index": 301, "text_token_index": 300}, "<<LABEL>> is token 301, tokenizer.json that it is"),
        (UNI, {"vocab_size": 302, "class_token_index": 300}, "tokenizer has 303 tokens and its encoder 302"),
        (UNI, {"scorer_type": "mlp"}, "no weight for scorer.layers.0.weight"),
        ("deberta_mlp", {"scorer_type": "simple"}, "nothing uses the weights scorer.layers.0"),
        (UNI, {"hidden_size": 16}, r"shape \(32, 32\), \(16, 32\) is needed for text.up"),
        (BI, {"architecture_type": "uni-encoder", "text_token_index": 1}, "class_token_index is 300"),
        (BI, {"label_model_name": "some/model"}, "label tokenizer is 'some/model', which is no folder"),
        (BI, {"label_model_name": "../bi_encoder/label_tokenizer"}, "which is no folder"),
        (BI, {"label_model_name": "/tmp"}, "which is no folder"),
        (BI, {"label_model_name": None}, "label tokenizer is 'None'"),
        (BI, {"label_model_name": "."}, "which is no folder"),
    ],
)
def test_files_that_do_not_belong_together(model: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        GLiClass.load(str(copied(tmp_path, model, **changes)), threads=1)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("model", "change", "said"),
    [
        (UNI, _without("model.logit_scale"), "no weight for logit_scale"),
        (UNI, _without("model.text_projector.linear_2.bias"), "no weight for text.down.bias"),
        (UNI, _without("model.encoder_model.embeddings.word_embeddings.weight"), "no weight for embed"),
        (UNI, _with("model.segment_embeddings.weight"), "'model.segment_embeddings.weight' has no place in a GLiClass"),
        (UNI, _with("calibrator.beta"), "'calibrator.beta' has no place"),
        (UNI, _with("model.encoder_model.strange.weight"), "'strange.weight' has no place"),
        (UNI, _with("model.label_encoder.embeddings.LayerNorm.bias"), "uni-encoder's file holds a label encoder"),
        (UNI, _with("model.logit_scale"), r"model.logit_scale has shape \(2,\)"),
        (BI, _without("model.biencoder_projector.linear_1.weight"), "no weight for from_label_encoder.up.weight"),
        (BI, _without("model.label_encoder.embeddings.LayerNorm.bias"), "no weight for embed_norm.bias"),
    ],
)
def test_weights_that_are_missing_or_strange(
    model: str, change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    folder = copied(tmp_path, model)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=said):
        GLiClass.load(str(folder), threads=1)


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("config.json", b"{", SourceError),
        ("config.json", b"[]", SourceError),
        ("config.json", None, SourceError),
        ("tokenizer.json", b"{}", FileFormatError),
        ("tokenizer.json", None, FileFormatError),
        ("model.safetensors", b"12345678", FileFormatError),
        ("model.safetensors", None, FileFormatError),
        ("label_tokenizer/tokenizer.json", None, FileFormatError),
    ],
)
def test_damaged_files(file: str, content: bytes | None, error: type[HeedfulError], tmp_path: Path) -> None:
    path = copied(tmp_path, BI) / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(error):
        load_gliclass(str(tmp_path / "model"))


def test_a_tokenizer_that_loses_the_text(tmp_path: Path) -> None:
    file = copied(tmp_path, "modernbert_simple") / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["post_processor"]["single"] = []
    file.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match="of a letter"):
        GLiClass.load(str(file.parent), threads=1)


def test_a_gguf_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="is a GGUF file"):
        load_gliclass(str(tmp_path / "model.gguf"))


def test_which_folders_hold_one() -> None:
    assert names_gliclass(GOLDEN / UNI)
    assert not names_gliclass(GOLDEN.parent.parent / "encoders" / "bert_seqcls")
