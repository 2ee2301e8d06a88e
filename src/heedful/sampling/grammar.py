"""Answers that must have a form: a JSON schema, a regex, one of some choices, a grammar. Through llguidance.

    grammar = GrammarCompiler(tokenizer).compile(GrammarSpec("json_object", ""))
    state = grammar.begin()                    # one an answer
    state.mask(logits); state.accept(token)    # each step

Everything fails closed: what cannot be honoured is refused when it is compiled, and a failure on the way is an error,
never text without its form. How schemas are bounded is json_schema.py's business. Regexes are Rust's (no look-around,
no back-references), match as a whole, and are as long as they allow.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heedful.errors import BadParameter, UsageError
from heedful.sampling.json_schema import (
    MAX_ENUM,
    SEPARATORS,
    Refused,
    bounded_schema,
    checked_regex,
    checked_size,
    parsed_json,
)
from heedful.text.chat import Segment

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from heedful.request import GrammarSpec
    from heedful.text.tokenizer import Tokenizer

MAX_LEXER_STATES = 150_000
"""1 to 2 kB each, of one grammar; a string of 4,096 characters takes about 40,000."""
MAX_GRAMMAR_SYMBOLS = 200_000
START_FUEL = 3_000_000
"""llguidance's measure of the work on regexes before the first token; about 50,000 a millisecond."""
MAX_BOUNDED_CHARS = 4_000_000
"""Of a grammar whose schemas have got their bounds."""

# Penalties of eight tokens for each byte of a bitmask, lowest bit first: 0 where the bit is set, else -inf.
_PENALTIES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_PENALTIES = _PENALTIES.astype(np.float32)

# What must be told apart to find the schemas in a Lark grammar: strings, regexes, comments. Each reads on, never back.
_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])*/?|%json\b', re.DOTALL)
_SPACE = re.compile(r"\s*")


FORMS_KEPT = 32
MAX_PARSER_ROW = 20_000


class GrammarFailed(UsageError):
    """llguidance gave up in the middle of an answer: the form was too much for its limits."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the answer's form could not be kept up: {reason}", "Simplify the schema, regex or grammar, or ask again."
        )


class GrammarCompiler:
    """For one tokenizer; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._llg_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        """The latest ones: a service asks for the same form again and again."""

    def compile(self, spec: GrammarSpec, field: str = "response_format") -> Grammar:
        """Raises BadParameter, naming `field`, for what cannot be honoured, and when llguidance is not installed."""
        llguidance = _llguidance(field)
        with self._lock:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
                return self._compiled[spec]
        try:
            source = _source(spec)
            tokenizer = self._prepared()
            limits = llguidance.LLParserLimits(
                max_lexer_states=MAX_LEXER_STATES,
                max_grammar_size=MAX_GRAMMAR_SYMBOLS,
                max_items_in_row=MAX_PARSER_ROW,
                initial_lexer_fuel=START_FUEL,
                verbose_errors=False,
            )
            matcher = _guarded(lambda: llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits))
            grammar = Grammar(matcher, self._tokenizer)
            _check_usable(matcher, grammar)
        except Refused as error:
            raise BadParameter(field, f"cannot be honoured: {error}", "Simplify it, or leave it out.") from error
        with self._lock:
            self._compiled[spec] = grammar
            if len(self._compiled) > FORMS_KEPT:
                self._compiled.popitem(last=False)
        return grammar

    def _prepared(self) -> LLTokenizer:
        """llguidance's view of the tokenizer; building it takes a moment, so it waits until it is wanted."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._llg_tokenizer is None:
                eos_ids = sorted(self._tokenizer.eos_ids)
                if not eos_ids:
                    raise Refused("this model has no token that ends an answer")
                self._llg_tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=eos_ids)
            return self._llg_tokenizer


class Grammar:
    """A compiled form. Immutable; `begin` may be called from several threads."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._eos_ids = tokenizer.eos_ids
        self._vocab_size = tokenizer.vocab_size

    def begin(self) -> GrammarState:
        """The state before an answer's first token."""
        return GrammarState(self._matcher.deep_copy(), self._eos_ids, self._vocab_size)


class GrammarState:
    """Where one answer stands in its form. For one thread at a time."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32) * 4, dtype=np.uint8)

    @property
    def is_complete(self) -> bool:
        """Whether only the end may follow."""
        self._check()
        return self._matcher.is_stopped()

    def mask(self, logits: NDArray[np.float32]) -> None:
        """Write -inf into `logits` (V,), V at least the tokenizer's size, for every token that may not come next.

        The tokens that end an answer may come exactly where the text may end. Raises GrammarFailed.
        """
        assert logits.dtype == np.float32, logits.dtype
        assert logits.ndim == 1, logits.shape
        assert len(logits) >= self._vocab_size, (len(logits), self._vocab_size)
        penalties = _PENALTIES[self._allowed_bits()].reshape(-1)[: self._vocab_size]
        logits[: self._vocab_size] += penalties
        logits[self._vocab_size :] = -np.inf

    def accept(self, token_id: int) -> None:
        """Go on with a token that `mask` allowed; one that ends the answer changes nothing. Raises GrammarFailed."""
        if token_id in self._eos_ids:
            return
        if not self._matcher.consume_token(token_id):
            self._check()
            raise GrammarFailed(f"token {token_id} does not fit")

    def _allowed_bits(self) -> NDArray[np.uint8]:
        """A bit a token, lowest first, set if it may come next."""
        self._check()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()  # after an error the mask allows the end, which would cut the answer short
        if not self._bits.any():
            raise GrammarFailed("no token can follow")
        return self._bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))


class _Vocabulary:
    """A tokenizer as llguidance wants to see it: the tokens' bytes, and a function that encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        special = tokenizer.special_ids
        self._encode = tokenizer.encode_segments
        self._start_id = self.eos_token_id
        self._start = Segment(self.tokens[self._start_id].decode("utf-8", "replace"), control=True)
        self._starts = tokenizer.id_of(self._start.text) == self._start_id
        self._id_of = {data: i for i, data in reversed(list(enumerate(self.tokens))) if data and i not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str) -> list[int]:
        """Ids of a text in the middle of an answer, exactly its bytes: no bos, no space before it."""
        if not isinstance(text, str):
            raise TypeError(type(text).__name__)  # llguidance tries bytes first
        start = [self._start] if self._starts else []
        ids = self._encode([*start, Segment(text, control=False)], add_bos=False)[len(start) :]
        exact = b"".join(self.tokens[i] for i in ids) == text.encode("utf-8")
        return ids if exact else self._greedy(text.encode("utf-8"))

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first, for tokenizers that change a text."""
        ids, pos = [], 0
        while pos < len(data):
            lengths = range(min(self._longest, len(data) - pos), 0, -1)
            length = next((n for n in lengths if data[pos : pos + n] in self._id_of), 0)
            if not length:
                break
            ids.append(self._id_of[data[pos : pos + length]])
            pos += length
        return ids


def _source(spec: GrammarSpec) -> str:
    """`spec` in llguidance's own language. Raises Refused."""
    from llguidance import LLMatcher

    if spec.kind == "json_object":
        return _schema_source({"type": "object"})
    if spec.kind == "json_schema":
        return _schema_source(parsed_json(spec.text))
    checked_size(spec.text)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(checked_regex(spec.text))
    if spec.kind == "choice":
        return LLMatcher.grammar_from_lark(_choice_grammar(parsed_json(spec.text)))
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(_bounded_lark(spec.text))
    raise Refused(f"there is no kind {spec.kind!r}")


def _schema_source(schema: Any) -> str:
    from llguidance import LLMatcher

    text = json.dumps(bounded_schema(schema))
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=SEPARATORS)  # type: ignore[arg-type]
    except ValueError as error:
        raise Refused(_reason(str(error))) from error


def _choice_grammar(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise Refused("choices are a list of one or more texts that are not empty")
    if len(choices) > MAX_ENUM:
        raise Refused(f"there are {len(choices):,} choices; at most {MAX_ENUM:,} are allowed")
    for text in choices:
        checked_size(text)
    # A terminal: thousands of rules would be too many for the parser. Lark takes JSON's strings, but not a bare DEL.
    return "start: CHOICE\nCHOICE: " + " | ".join(
        json.dumps(text).replace("\x7f", "\\u007f") for text in dict.fromkeys(choices)
    )


def _bounded_lark(text: str) -> str:
    """A Lark grammar whose %json schemas are bounded and whose regexes are checked."""
    pieces, done, size = [], 0, 0
    while (found := _LARK_PIECE.search(text, done)) is not None:
        pieces.append(text[done : found.end()])
        done = found.end()
        if found[0].startswith("/") and not found[0].startswith("//"):
            checked_regex(found[0][1:-1])
        if found[0] == "%json":
            schema, done = _leading_json(text, done)
            pieces.append(" " + json.dumps({**bounded_schema(schema), "x-guidance": SEPARATORS}))
            size += len(pieces[-1])
            if size > MAX_BOUNDED_CHARS:
                raise Refused("it has too many schemas")
    return "".join(pieces) + text[done:]


def _leading_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, after white space, and the position behind it."""
    space = _SPACE.match(text, start)
    assert space is not None
    start = space.end()
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise Refused(f"a schema in the grammar is not valid JSON: {error}") from error
    return parsed_json(text[start:end]), end


def _check_usable(matcher: LLMatcher, grammar: Grammar) -> None:
    """Raises Refused for what llguidance refuses, only partly keeps, or cannot even begin."""
    if matcher.is_error():
        raise Refused(_reason(matcher.get_error()))
    warnings = matcher.get_grammar_warnings()
    if warnings:
        raise Refused(_reason(warnings[0]))
    try:
        grammar.begin()._allowed_bits()
    except GrammarFailed as error:
        raise Refused(error.message) from error


def _guarded(build: Callable[[], LLMatcher]) -> LLMatcher:
    """What `build` returns; a panic inside of llguidance, which is no Exception, becomes Refused."""
    try:
        return build()
    except Exception as error:
        raise Refused(_reason(str(error))) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Refused("llguidance failed on it") from error


def _reason(text: str) -> str:
    """One line of an error of llguidance: a regex's is at the end, behind a picture of the place."""
    lines = text.strip().splitlines() or ["unknown reason"]
    return next((line for line in lines if line.startswith("error: ")), lines[0])[:300]


def _llguidance(field: str) -> Any:
    try:
        import llguidance
    except ImportError:
        raise BadParameter(field, "needs llguidance", "pip install 'heedful[server]'") from None
    return llguidance
