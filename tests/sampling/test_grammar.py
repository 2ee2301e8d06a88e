"""Constrained answers, judged by jsonschema, re and json, whatever the logits: random ones know nothing of JSON."""

from __future__ import annotations

import builtins
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from heedful.errors import BadParameter
from heedful.request import GrammarSpec, SamplingParams
from heedful.sampling.grammar import Grammar, GrammarCompiler, GrammarFailed
from heedful.sampling.json_schema import KEY_CHARS, MAX_BYTES, STRING_CHARS
from heedful.sampling.sampler import Sampler
from heedful.testing import make_tiny_model
from heedful.text.tokenizer import Tokenizer
from heedful.text.vocabulary import byte_level_bytes

VOCAB_SIZE = 259
NEVER = -np.inf
BYTES = [byte_level_bytes(letter)[0] for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]
"""The tiny model's tokens are bytes, in this order."""
IDS = {byte: token_id for token_id, byte in enumerate(BYTES)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(make_tiny_model(tmp_path_factory.mktemp("tiny")) / "tokenizer.json")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def ids(text: str) -> list[int]:
    return [IDS[byte] for byte in text.encode()]


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def answer(grammar: Grammar, eos_ids: frozenset[int], seed: int, temperature: float, patience: int = 80) -> str:
    """An answer of random logits. After `patience` tokens they favour what closes strings, arrays and objects."""
    rng = np.random.default_rng(seed)
    state = grammar.begin()
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [], VOCAB_SIZE, grammar=state)
    closing = [*ids('"]}'), *eos_ids]
    out: list[int] = []
    for step in range(40_000):
        logits = rng.normal(0, 3, VOCAB_SIZE).astype(np.float32)
        if step > patience:
            logits[closing] += 60
        token_id = sampler.sample(logits).token_id
        if token_id in eos_ids:
            return bytes(BYTES[i] for i in out).decode("utf-8")  # strict: whole characters only
        out.append(token_id)
    raise AssertionError(f"no end: {bytes(BYTES[i] for i in out[:200])!r}")


def allowed(grammar: Grammar, text: str) -> set[int]:
    """Ids that may follow `text`, whose bytes are tokens."""
    state = grammar.begin()
    for token_id in ids(text):
        state.accept(token_id)
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    state.mask(logits)
    return set(np.flatnonzero(logits == 0).tolist())


def accepts(grammar: Grammar, text: str, eos_ids: frozenset[int]) -> bool:
    try:
        return eos_ids <= allowed(grammar, text)
    except GrammarFailed:
        return False


names = st.sampled_from(["a", "b", "key", "ü", "with space", 'q"', "\\"])
leaves = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m}, st.integers(0, 3), st.integers(0, 9)
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-c]+$", "x", "^[0-9]{3}-é?$", "^(yes|no)")]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "uuid", "ipv4")]),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda n, m: {"type": "integer", "minimum": n, "maximum": n + m}, st.integers(-99, 99), st.integers(0, 999)
    ),
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]),
    st.builds(lambda n: {"type": "integer", "multipleOf": n}, st.integers(1, 12)),
    st.builds(lambda v: {"enum": v}, st.lists(st.one_of(st.text(max_size=4), st.integers(), st.none()), min_size=1)),
    st.builds(lambda v: {"const": v}, st.one_of(st.text(max_size=5), st.booleans(), st.lists(st.integers(0, 9)))),
    st.just({}),
    st.just({"type": ["string", "null", "integer"]}),
)


def holders(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(names, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda item, n: {"type": "array", "items": item, "minItems": n, "maxItems": n + 2}, inner, st.integers(0, 2)
        ),
        st.builds(lambda one, two: {"type": "array", "prefixItems": [one, two], "maxItems": 4}, inner, inner),
        st.builds(lambda p: {"type": "object", "properties": p, "required": sorted(p)}, properties),
        st.builds(lambda p: {"type": "object", "properties": p, "additionalProperties": False}, properties),
        st.builds(lambda p, rest: {"type": "object", "properties": p, "additionalProperties": rest}, properties, inner),
        st.builds(lambda p: {"properties": p}, properties),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
    )


schemas = st.recursive(leaves, holders, max_leaves=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schemas, st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_any_logits_give_what_the_schema_wants(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, seed: int, temperature: float
) -> None:
    text = answer(compiler.compile(schema_spec(schema)), tokenizer.eos_ids, seed, temperature)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


SPECIAL_CASES: list[Any] = [
    {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#/kept"}, "kept": {"type": "string"}, "minItems": 1, "maxItems": 2},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}, k: {"type": "integer"}}, "required": ["kind", k]}
            for k in ("cat", "dog")
        ]
    },
    {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {}}, "required": ["b"]},
        ]
    },
    {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"a": {"type": "array"}, "b": {"type": "null"}},
        "required": ["b", "c"],
        "additionalProperties": {"type": "array", "prefixItems": [{"type": "string"}, {}]},
    },
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
    {"type": "object", "properties": {"p": {"type": "number", "minimum": 0, "maximum": 1e-5}}, "required": ["p"]},
    {"type": "integer", "minimum": 10**15 + 5},
    {"type": "integer", "maximum": -(10**15) - 5},
    {"minimum": 3},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"const": 1}], "minItems": 1},
    {"$id": "https://example.com/a", "type": "object", "properties": {"a": {}}, "required": ["a"]},
    {"const": 'a\n"\\é😀 '},
    {},
    True,
]


@pytest.mark.parametrize("schema", SPECIAL_CASES, ids=lambda schema: json.dumps(schema)[:40])
def test_special_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any) -> None:
    grammar = compiler.compile(schema_spec(schema))
    for seed in range(5):
        text = answer(grammar, tokenizer.eos_ids, seed, temperature=float(seed % 2))
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))


def test_json_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec("json_object", ""))
    for seed in range(8):
        assert isinstance(json.loads(answer(grammar, tokenizer.eos_ids, seed, 1.0)), dict)
    assert accepts(grammar, '{"a": [1, {"b":null}], "ü":"é"}', tokenizer.eos_ids)


REFUSED: list[tuple[str, str]] = [
    ('{"type": "string"', "not valid JSON"),
    ("", "not valid JSON"),
    ("[1]", "a schema is a JSON object"),
    ("false", "a schema is a JSON object"),
    ('{"const": NaN}', "no JSON number"),
    ('{"const": "\ud800"}', "surrogate"),
    ('{"const": "\\ud800"}', "cannot be honoured"),
    ('{"not": {"type": "string"}}', "not"),
    ('{"if": {}, "then": {}}', "if"),
    ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ('{"type": "array", "contains": {}}', "contains"),
    ('{"type": "object", "propertyNames": {}}', "propertyNames"),
    ('{"type": "object", "dependentRequired": {"a": ["b"]}}', "dependentRequired"),
    ('{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
    ('{"type": "object", "minProperties": 2}', "minProperties"),
    ('{"type": "string", "format": "colour"}', "colour"),
    ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
    ('{"type": "string", "pattern": "(a"}', "unclosed"),
    ('{"type": "string", "pattern": "(a{0,2000}){0,2000}"}', "multiply"),
    ('{"type": "string", "minLength": 5000}', "minLength"),
    ('{"type": "string", "minLength": 5, "maxLength": 3}', "minLength"),
    ('{"type": "strnig"}', "strnig"),
    ('{"type": "integer", "minimum": 1e300}', "exact"),
    ('{"type": "integer", "exclusiveMinimum": true, "minimum": 1}', "must be a number"),
    ('{"type": "integer", "multipleOf": 0}', "multiple"),
    ('{"type": "integer", "minimum": 5, "maximum": 5, "multipleOf": 3}', "multiple"),
    ('{"enum": []}', "cannot be honoured"),
    ('{"$ref": "#/nowhere"}', "nowhere"),
    ('{"$ref": "http://example.com/s"}', "does not point into"),
    ('{"$ref": "#"}', "cannot be honoured"),
    ('{"allOf": [{"$ref": "#"}, {"type": "null"}]}', "circular"),
    ('{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "oneOf"),
    ('{"oneOf": [{"type": "string"}, {"properties": {"a": {}}}]}', "oneOf"),
    (
        '{"oneOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, '
        '{"type": "object", "properties": {"b": {}}}]}',
        "oneOf",
    ),
    ('{"type": "object", "x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
    ('{"type": "string", "disallow": "a"}', "disallow"),
    ('{"properties": {"a": {"$id": "https://example.com/b"}}}', "\\$id"),
    (json.dumps({"enum": list(range(10_001))}), "10,001"),
    (json.dumps({"const": "a" * MAX_BYTES}), "bytes"),
    ("[" * 100_000, "deep"),
    (json.dumps({"properties": {f"p{n}": {} for n in range(1001)}}), "1,000 schemas"),
    (json.dumps({"type": "object", "required": [f"p{n}" for n in range(1001)]}), "requires 1,001"),
    (json.dumps({"type": "object", "patternProperties": {f"^p{n}x+": {} for n in range(17)}}), "patternProperties"),
    (json.dumps({"allOf": [{"type": "string", "pattern": f"a{{0,{n}}}b"} for n in range(200)]}), "patterns"),
    (
        json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}", "pattern": f"a{{0,{n}}}b"} for n in range(20)},
            }
        ),
        "patterns",
    ),
    ('{"items":' * 65 + "{}" + "}" * 65, "deep"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda value: ascii(value)[:40])
def test_schemas_that_are_refused(compiler: GrammarCompiler, schema: str, reason: str) -> None:
    with pytest.raises(BadParameter, match=reason) as caught:
        compiler.compile(schema_spec(schema))
    assert caught.value.field == "response_format"
    assert compiler.compile(schema_spec({"type": "null"}))  # and go on


def test_the_field_to_blame_can_be_named(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadParameter) as caught:
        compiler.compile(schema_spec("{"), field="tools")
    assert caught.value.field == "tools"


def longest_run(grammar: Grammar, start: str, char: str, at_most: int) -> int:
    """How often `char` may be repeated after `start`."""
    state = grammar.begin()
    for token_id in ids(start):
        state.accept(token_id)
    for count in range(at_most):
        logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
        state.mask(logits)
        if logits[IDS[ord(char)]] == NEVER:
            return count
        state.accept(IDS[ord(char)])
    return at_most


@pytest.mark.parametrize(
    ("schema", "start", "char", "most"),
    [
        ({}, "", "7", 12),
        ({}, "0.", "7", 6),
        ({}, "-", "7", 12),
        ({}, "1", "e", 0),
        ({}, '"', "a", STRING_CHARS),
        ({}, "", " ", 0),
        ({}, "{", " ", 0),
        ({}, "{", "\n", 0),
        ({}, '{"', "k", KEY_CHARS),
        ({}, '{"a":', " ", 1),
        ({}, '{"a":1,', " ", 1),
        ({}, '{"a":1', " ", 0),
        ({}, '{"a":[1,', "\n", 0),
        ({}, "", "[", 12),
        ({"type": "integer"}, "", "7", 15),
        ({"type": "integer", "minimum": 0}, "", "7", 15),
        ({"type": "number"}, "0.", "0", 6),
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.", "5", 6),
        ({"type": "string", "pattern": "^a+$"}, '"', "a", STRING_CHARS),
        ({"type": "string", "maxLength": 10**9}, '"', "a", STRING_CHARS),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, '{"a":"', "x", STRING_CHARS),
        ({"type": "object", "properties": {}, "additionalProperties": True}, '{"', "x", KEY_CHARS),
        ({"type": "array"}, "[", "7", 12),
        ({"type": "array", "items": True}, "[", "7", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "", "7", 15),
    ],
)
def test_nothing_goes_on_for_ever(compiler: GrammarCompiler, schema: Any, start: str, char: str, most: int) -> None:
    assert longest_run(compiler.compile(schema_spec(schema)), start, char, 6000) == most


REGEXES = [
    "abc",
    "^abc$",
    "a|^bb$",
    "[a-f]{2,5}x?",
    r"\d{3}",
    "(?:ja|né)+",
    "(a|ab)(c|bcd)",
    "é{1,3}😀",
    ".",
    "[^a]",
    'a/b"',
    "x*",
    "[]a]",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes_match_as_a_whole(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = compiler.compile(GrammarSpec("regex", pattern))
    for seed in range(10):
        text = answer(grammar, tokenizer.eos_ids, seed, temperature=float(seed % 2), patience=6)
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    "pattern", ["(", "[", "(?=a)", r"(a)\1", r"\bfoo", "a{2,1}", "((a{0,200}){0,200}){0,200}", "a{99999999}", "*"]
)
def test_regexes_that_are_refused(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(BadParameter, match="response_format"):
        compiler.compile(GrammarSpec("regex", pattern))


def test_a_regex_cannot_bring_rules_of_its_own(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec("regex", "a/\nstart: /b"))
    assert accepts(grammar, "a/\nstart: /b", tokenizer.eos_ids)
    assert not accepts(grammar, "b", tokenizer.eos_ids)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 9), st.sampled_from([0.0, 1.0])
)
def test_choices_come_exactly(
    compiler: GrammarCompiler, tokenizer: Tokenizer, choices: list[str], seed: int, temperature: float
) -> None:
    grammar = compiler.compile(GrammarSpec("choice", json.dumps(choices)))
    assert answer(grammar, tokenizer.eos_ids, seed, temperature) in choices
    assert all(accepts(grammar, choice, tokenizer.eos_ids) for choice in choices)


@pytest.mark.parametrize("text", ["[]", '[""]', "[1]", '"a"', "x", json.dumps([str(n) for n in range(10_001)])])
def test_choices_that_are_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(BadParameter):
        compiler.compile(GrammarSpec("choice", text))


def test_the_end_is_allowed_exactly_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {256, 258}
    grammar = compiler.compile(GrammarSpec("choice", '["ab", "abc"]'))
    assert allowed(grammar, "a") == {IDS[ord("b")]}
    assert allowed(grammar, "ab") == {IDS[ord("c")], 256, 258}
    assert allowed(grammar, "abc") == {256, 258}
    states = {text: grammar.begin() for text in ("a", "ab", "abc")}
    for text, state in states.items():
        for token_id in ids(text):
            state.accept(token_id)
    assert [state.is_complete for state in states.values()] == [False, False, True]
    states["abc"].accept(258)
    assert states["abc"].is_complete


def test_states_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(GrammarSpec("choice", '["ab", "cd"]'))
    one, two = grammar.begin(), grammar.begin()
    one.accept(IDS[ord("a")])
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    two.mask(logits)
    assert set(np.flatnonzero(logits == 0).tolist()) == {IDS[ord("a")], IDS[ord("c")]}


def test_a_token_that_does_not_fit_is_an_error_for_good(compiler: GrammarCompiler) -> None:
    state = compiler.compile(GrammarSpec("regex", "a+")).begin()
    with pytest.raises(GrammarFailed):
        state.accept(IDS[ord("b")])
    for use in (lambda: state.mask(np.zeros(VOCAB_SIZE, dtype=np.float32)), lambda: state.is_complete):
        with pytest.raises(GrammarFailed):
            use()


def test_a_failure_on_the_way_is_an_error(compiler: GrammarCompiler) -> None:
    """This regex passes every check, and is too much for llguidance after some characters."""
    state = compiler.compile(GrammarSpec("regex", "(a|aa|[ab]{1,50}b){0,350}")).begin()
    with pytest.raises(GrammarFailed):  # noqa: PT012
        for _ in range(3000):
            state.mask(np.zeros(VOCAB_SIZE, dtype=np.float32))
            state.accept(IDS[ord("a")])


def test_logits_beyond_the_vocabulary_are_never_chosen(compiler: GrammarCompiler) -> None:
    logits = np.zeros(VOCAB_SIZE + 9, dtype=np.float32)
    compiler.compile(GrammarSpec("regex", "a")).begin().mask(logits)
    assert np.flatnonzero(logits == 0).tolist() == [IDS[ord("a")]]


def test_lark_with_schemas_and_control_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(GrammarSpec("lark", 'start: <[257]> "%json {" %json {"type": "integer"} /x|y/ // "'))
    state = grammar.begin()
    out = [257, *ids("%json {777777777777777")]
    for token_id in out:
        state.accept(token_id)
    logits = np.zeros(VOCAB_SIZE, dtype=np.float32)
    state.mask(logits)
    assert set(np.flatnonzero(logits == 0).tolist()) == {
        IDS[ord("x")],
        IDS[ord("y")],
    }  # the schema in it is bounded too


@pytest.mark.parametrize(
    "text",
    [
        "",
        "start: nowhere",
        "start: %json {",
        'start: %json {"not": {}}',
        "start: /(a{999}){999}/",
        "start: <[999]>",
        "start: " + "%json {} " * 20_000,
    ],
)
def test_lark_that_is_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(BadParameter):
        compiler.compile(GrammarSpec("lark", text))


def test_an_unknown_kind_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadParameter, match="kind"):
        compiler.compile(GrammarSpec("yaml", "a"))


def test_threads_share_a_compiler_and_a_grammar(tokenizer: Tokenizer) -> None:
    shared = GrammarCompiler(tokenizer)
    schema = {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "minItems": 3, "maxItems": 6}
    texts: dict[int, str] = {}

    def work(seed: int) -> None:
        texts[seed] = answer(shared.compile(schema_spec(schema)), tokenizer.eos_ids, seed, 1.0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == list(range(8))
    for text in texts.values():
        jsonschema.validate(json.loads(text), schema)


@pytest.fixture
def without_llguidance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "llguidance":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    return


@pytest.mark.usefixtures("without_llguidance")
def test_without_llguidance_the_remedy_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadParameter, match="needs llguidance") as caught:
        GrammarCompiler(tokenizer).compile(GrammarSpec("json_object", ""))
    assert caught.value.remedy == "pip install 'heedful[server]'"


def test_a_tokenizer_with_longer_tokens(tmp_path: Path) -> None:
    """Merged tokens, a metaspace before each text, several characters a token: forced text is tokenised as it wants."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as HFTokenizer

    pieces = [
        "<s>",
        "</s>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *'{}":, abnme1',
        "na",
        "me",
        "name",
    ]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("n", "a"), ("m", "e"), ("na", "me")]
    made = HFTokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<unk>")])
    made.save(str(tmp_path / "tokenizer.json"))
    settings_text = json.dumps({"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False})
    (tmp_path / "tokenizer_config.json").write_text(settings_text, encoding="utf-8")
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json")

    schema = {"type": "object", "properties": {"name": {"enum": ["a", "é"]}}, "required": ["name"]}
    grammar = GrammarCompiler(tokenizer).compile(schema_spec(schema))
    rng = np.random.default_rng(1)
    for seed in range(6):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [], tokenizer.vocab_size, grammar=grammar.begin())
        out: list[int] = []
        while not out or out[-1] not in tokenizer.eos_ids:
            out.append(sampler.sample(rng.normal(0, 1, tokenizer.vocab_size).astype(np.float32)).token_id)
        jsonschema.validate(json.loads(tokenizer.decode(out, continues=True)), schema)


def test_a_form_is_compiled_once_and_each_answer_begins_anew(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("choice", '["ab", "ac"]')
    first = compiler.compile(spec)
    assert compiler.compile(GrammarSpec("choice", '["ab", "ac"]')) is first
    begun = first.begin()
    begun.accept(ids("a")[0])
    assert allowed(first, "") == {ids("a")[0]}
    for i in range(40):
        compiler.compile(GrammarSpec("regex", f"x{{{i + 1}}}"))
    assert compiler.compile(spec) is not first, "only the latest are kept"


@pytest.mark.parametrize(
    ("form", "start", "char", "most"),
    [("date-time", '"1000-10-10T10:00:00.', "0", 14), ("time", '"10:00:00.', "0", 14), ("email", '"', "a", 254)],
)
def test_formats_come_to_an_end(compiler: GrammarCompiler, form: str, start: str, char: str, most: int) -> None:
    """What pydantic sends for a datetime went on with zeros until max_tokens."""
    grammar = compiler.compile(schema_spec({"type": "string", "format": form}))
    assert 3 <= longest_run(grammar, start, char, most + 1) <= most


def test_thousands_of_choices_are_one_terminal(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = [f"ab{i:05d}" for i in range(9000)]
    grammar = compiler.compile(GrammarSpec("choice", json.dumps(choices)))
    for seed in range(3):
        assert answer(grammar, tokenizer.eos_ids, seed, temperature=1.0) in choices
