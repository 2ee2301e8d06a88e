"""Documents out of files, and the tokenizer that is trained on them or takes bytes as they are.

Writes tokenizer.json and tokenizer_config.json as every loader of Hugging Face files reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from heedful.errors import BadParameter

END = "<|endoftext|>"
SPECIAL_TOKENS = (END, "<|im_start|>", "<|im_end|>")
"""The last two are for chats that the model may be taught later."""
NUM_BYTES = 256


def documents(paths: Iterable[Path]) -> Iterator[str]:
    """Texts that are not empty: of a *.jsonl file the "text" of every line, of any other file the whole.

    Raises BadParameter, with the place, for a file that is not UTF-8 or no such JSONL.
    """
    for path in paths:
        texts = _lines(path) if path.suffix == ".jsonl" else [_read(path)]
        yield from filter(None, texts)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise BadParameter("--data", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadParameter("--data", f"{path} is not UTF-8 text (byte {error.start:,})", "Convert it first.") from None


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _text_of(line, f"line {number:,} of {path}")
    except OSError as error:
        raise BadParameter("--data", f"{path} cannot be read: {error.strerror}") from error


def _text_of(line: bytes, where: str) -> str:
    remedy = 'Every line is {"text": "…"}.'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadParameter("--data", f"{where} is no JSON: {error}", remedy) from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise BadParameter("--data", f"{where} has no text: {str(row)[:60]}", remedy)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def write_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int) -> None:
    """A byte-level BPE trained on `texts` with up to `vocab_size` tokens; with 256 and the special ones, plain bytes.

    What it decodes is what it encoded, to the byte: nothing is normalised.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    assert vocab_size >= NUM_BYTES + len(SPECIAL_TOKENS), vocab_size
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    engine.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, engine.token_to_id(END))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    engine.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
