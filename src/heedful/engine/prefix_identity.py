"""What makes a stored page another model's: the fingerprint that pages on disk are kept under.

It covers, by value: the model's config, the tokenizer, the name, shape and format of every tensor, 4 kB samples of each
tensor's bytes (a sha256 of all of a large model would take longer than what a prefix saves), the size of its files, the
runner with its kernels, how a page is laid out, and heedful's version. A file that was changed in place at none of the
sampled bytes is not noticed.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import heedful
from heedful.cache import disk
from heedful.engine.runner import Runner
from heedful.kernels import native
from heedful.request import KVFormat
from heedful.text.tokenizer import Tokenizer
from heedful.weights.load import LoadedModel
from heedful.weights.tensor import StoredTensor

SAMPLES, SAMPLE_BYTES = 16, 256
"""Of each tensor, spread evenly, its first and last bytes among them."""
TOKENS_BETWEEN = 16
"""Every so many tokens, one's bytes count."""


def prefix_fingerprint(loaded: LoadedModel, runner: Runner, weights_format: str | None) -> str:
    """A sha256 in hex."""
    digest = sha256()
    for fact in _facts(loaded, runner, weights_format):
        data = fact if isinstance(fact, bytes) else repr(fact).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _facts(loaded: LoadedModel, runner: Runner, weights_format: str | None) -> Iterator[object]:
    yield heedful.__version__, disk.VERSION, weights_format
    yield loaded.config
    yield sorted((path.name, path.stat().st_size) for path in _files(loaded.path))
    yield from _tokenizer_facts(loaded.tokenizer)
    for name in sorted(loaded.weights):
        tensor = loaded.weights[name]
        yield name, tensor.format_name, tensor.shape
        yield _sampled(tensor)
    yield from _runner_facts(runner)
    for number in runner.cache.numbers:
        yield number, runner.cache.page_bytes_by_group(KVFormat(number, number))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.json")]


def _tokenizer_facts(tokenizer: Tokenizer) -> Iterator[object]:
    template = tokenizer.chat_template
    yield tokenizer.vocab_size, tokenizer.bos_id, sorted(tokenizer.eos_ids), sorted(tokenizer.special_ids)
    yield None if template is None else template.source
    yield b"\0".join(tokenizer.token_bytes(token) for token in range(0, tokenizer.vocab_size, TOKENS_BETWEEN))


def _sampled(tensor: StoredTensor) -> bytes:
    data = tensor.blocks.reshape(-1)
    if len(data) <= SAMPLES * SAMPLE_BYTES:
        return data.tobytes()
    begins = [(len(data) - SAMPLE_BYTES) * i // (SAMPLES - 1) for i in range(SAMPLES)]
    return b"".join(data[begin : begin + SAMPLE_BYTES].tobytes() for begin in begins)


def _runner_facts(runner: Runner) -> Iterator[object]:
    """The kernels: another build may round in another way."""
    kind = type(runner).__name__
    yield kind
    if kind == "NativeRunner":
        yield native.variant()
        yield sha256(Path(native.module().__file__).read_bytes()).digest()
    elif kind == "TorchRunner":
        yield importlib.metadata.version("torch")
