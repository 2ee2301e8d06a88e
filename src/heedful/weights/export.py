"""A loaded decoder as files that others load: a Hugging Face folder, or one GGUF file.

    export_hf(load("runs/first"), Path("out"))
    export_gguf(load("smollm2"), Path("out.gguf"), "q8_0")

What the format cannot say is refused with CannotExport before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heedful.errors import CannotExport
from heedful.models.config_export import freq_divisors, gguf_keys, hf_config
from heedful.text.gguf_to_json import tokenizer_files
from heedful.text.json_to_gguf import gguf_tokenizer_keys
from heedful.weights.gguf_file import GGUFValue, read_gguf
from heedful.weights.gguf_writer import write_gguf
from heedful.weights.load import LoadedModel, read_json
from heedful.weights.out_tensor import FORMAT_BY_OPTION, OutTensor, to_gguf, to_hf
from heedful.weights.quantize import Floats
from heedful.weights.safetensors_writer import write_tensors
from heedful.weights.tensor import StoredTensor
from heedful.weights.written_aside import folder_aside, require_free

HF_TYPES = ("f32", "f16", "bf16")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
_HF_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""general.file_type, llama.cpp's LLAMA_FTYPE_MOSTLY_…"""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_KEPT_GGUF_KEYS = ("general.name", "general.license", "general.author", "general.basename", "general.finetune")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Exported:
    path: Path
    type: str
    num_bytes: int
    """Of the weights."""
    tensors: int


def widest_type(loaded: LoadedModel) -> str:
    """f32 or bf16 where a matrix is stored so; f16 for the rest, quantized ones among them."""
    found = {tensor.format_name for tensor in loaded.weights.values() if len(tensor.shape) > 1}
    return "f32" if "F32" in found else "bf16" if "BF16" in found else "f16"


def hf_tensors(loaded: LoadedModel, kind: str) -> list[OutTensor]:
    return list(to_hf(loaded.weights, loaded.config, FORMAT_BY_OPTION[kind]))


def gguf_tensors(loaded: LoadedModel, kind: str) -> list[OutTensor]:
    divisors = freq_divisors(loaded.config)
    more = [] if divisors is None else [_vector("rope_freqs.weight", divisors)]
    return [*to_gguf(loaded.weights, loaded.config, FORMAT_BY_OPTION[kind]), *more]


def _vector(name: str, values: Floats) -> OutTensor:
    stored = StoredTensor(name, "F32", values.shape, values.view("u1").reshape(1, -1))
    return OutTensor(name, values.shape, "F32", (stored,))


def export_hf(
    loaded: LoadedModel,
    folder: Path,
    kind: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> Exported:
    """`kind`: one of HF_TYPES; None: `widest_type`. Raises CannotExport, UsageError where `folder` is not free."""
    kind = kind or widest_type(loaded)
    assert kind in HF_TYPES, kind
    require_free(folder, overwrite=overwrite)
    documents = hf_documents(loaded, kind)
    tensors = hf_tensors(loaded, kind)
    with folder_aside(folder) as aside:
        for name, content in documents.items():
            (aside / name).write_bytes(content)
        write_tensors(aside / "model.safetensors", tensors, progress=progress)
    return Exported(folder, kind, sum(tensor.num_bytes for tensor in tensors), len(tensors))


def hf_documents(loaded: LoadedModel, kind: str) -> dict[str, bytes]:
    """Every file but the weights."""
    dtype, of_generation = _HF_DTYPES[kind], dict[str, Any]()
    if loaded.path.is_file():
        metadata = read_gguf(loaded.path).metadata
        files, padding = tokenizer_files(metadata), metadata.get("tokenizer.ggml.padding_token_id")
    else:
        files = {n: (loaded.path / n).read_bytes() for n in _TOKENIZER_FILES if (loaded.path / n).is_file()}
        padding = read_json(loaded.path / "config.json").get("pad_token_id")
        found = loaded.path / "generation_config.json"
        of_generation = read_json(found) if found.exists() else {}
    ids: dict[str, Any] = {"eos_token_id": sorted(loaded.tokenizer.eos_ids), "pad_token_id": padding}
    if loaded.tokenizer.bos_id is not None:
        ids["bos_token_id"] = loaded.tokenizer.bos_id
    config = hf_config(loaded.config) | ids | {"dtype": dtype, "torch_dtype": dtype}
    return {
        "config.json": _as_json(config),
        "generation_config.json": _as_json({"_from_model_config": not of_generation, **ids, **of_generation}),
        **_with_template(files, _template(loaded)),
    }


def _template(loaded: LoadedModel) -> str | None:
    template = loaded.tokenizer.chat_template
    return None if template is None else template.source


def _with_template(files: dict[str, bytes], template: str | None) -> dict[str, bytes]:
    """The files with this chat template: an adapter may have another one than its base."""
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    in_files = [settings.get("chat_template"), files.get("chat_template.jinja", b"").decode("utf-8", "replace")]
    if template is None or template in in_files or isinstance(in_files[0], list):
        return files
    others = {name: content for name, content in files.items() if not name.startswith("chat_template")}
    return {**others, "tokenizer_config.json": _as_json({**settings, "chat_template": template})}


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def export_gguf(
    loaded: LoadedModel,
    path: Path,
    kind: str = "f16",
    *,
    overwrite: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> Exported:
    """`kind`: one of GGUF_TYPES. Raises CannotExport, UsageError where `path` is not free."""
    assert kind in GGUF_TYPES, kind
    require_free(path, overwrite=overwrite)
    if path.is_dir():
        raise CannotExport(f"{path} is a folder, and a GGUF is a file", "Give it a name, as model.gguf.")
    keys = _gguf_metadata(loaded, kind)
    tensors = gguf_tensors(loaded, kind)
    write_gguf(path, keys, tensors, progress=progress)
    return Exported(path, kind, sum(tensor.num_bytes for tensor in tensors), len(tensors))


def _gguf_metadata(loaded: LoadedModel, kind: str) -> dict[str, GGUFValue]:
    of_model = gguf_keys(loaded.config)
    described: dict[str, GGUFValue] = {"general.name": Path(loaded.name).name or loaded.path.name}
    if loaded.path.is_file():
        found = read_gguf(loaded.path).metadata
        of_tokenizer = {key: value for key, value in found.items() if key.startswith("tokenizer.")}
        described |= {key: found[key] for key in _KEPT_GGUF_KEYS if key in found}
    else:
        of_tokenizer = gguf_tokenizer_keys(loaded.path / "tokenizer.json", size=loaded.config.vocab_size)
    if (template := _template(loaded)) is not None:  # an adapter may have another one than its base
        of_tokenizer["tokenizer.chat_template"] = template
    architecture = {"general.architecture": of_model.pop("general.architecture"), "general.type": "model"}
    versions = {"general.file_type": _FILE_TYPES[kind], "general.quantization_version": 2}
    return {**architecture, **described, **versions, **of_model, **of_tokenizer}
