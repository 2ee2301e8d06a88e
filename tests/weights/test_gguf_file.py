"""The GGUF reader against the `gguf` package's reader and writer, and against files that lie."""

import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import FileFormatError, GGUFError
from heedful.weights.gguf_file import GGUFFile, read_gguf

F32, Q4_0 = 0, 2
UINT8, UINT32, INT32, BOOL, STRING, ARRAY, INT64 = 0, 4, 5, 7, 8, 9, 11


# Files of the gguf package's writer.


def scalars(writer: gguf.GGUFWriter) -> dict[str, object]:
    values = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.15625, "float64": 0.1, "bool": True,
        "string": "Wörter 🙂\n\0 end",
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_bool("a.no", False)
    return {f"a.{kind}": value for kind, value in values.items()} | {"a.no": False}


def arrays(writer: gguf.GGUFWriter) -> dict[str, list[object]]:
    kinds = gguf.GGUFValueType
    values = {
        "b.text": (kinds.STRING, ["", "a", "é", "▁the", "x" * 1000]),
        "b.flags": (kinds.BOOL, [True, False, True]),
        "b.bytes": (kinds.UINT8, [0, 255]),
        "b.int32": (kinds.INT32, [-(2**31), 0, 2**31 - 1]),
        "b.uint64": (kinds.UINT64, [2**64 - 1]),
        "b.float32": (kinds.FLOAT32, [0.5, -(2.0**100)]),
        "b.float64": (kinds.FLOAT64, [0.1]),
    }
    for key, (kind, items) in values.items():
        writer.add_key_value(key, items, kinds.ARRAY, kind)
    return {key: items for key, (_, items) in values.items()}


def tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    writer.add_tensor("vector", rng.normal(size=7).astype(np.float32))
    writer.add_tensor("matrix", rng.normal(size=(3, 5)).astype(np.float16))
    writer.add_tensor("cube", rng.normal(size=(2, 3, 4)).astype(np.float64))
    writer.add_tensor("four", rng.integers(-9, 9, (2, 1, 3, 2), dtype=np.int32))
    writer.add_tensor("bytes", rng.integers(-9, 9, 3, dtype=np.int8))
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16):
        blocks = gguf.quants.quantize(rng.normal(size=(4, 64)).astype(np.float32), kind)
        writer.add_tensor(f"layer.{kind.name}", blocks, raw_dtype=kind)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_valid(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    scalars(writer)
    arrays(writer)
    tensors(writer)
    write(writer)
    return path.read_bytes()


def assert_same_tensors(ours: GGUFFile, theirs: gguf.GGUFReader) -> None:
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.name, mine.format_name) == (tensor.name, tensor.tensor_type.name)
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert mine.blocks.tobytes() == tensor.data.tobytes()


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_metadata_of_every_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    expected = {"general.architecture": "llama", **scalars(writer), **arrays(writer)}
    write(writer)
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    assert {key: plain(value) for key, value in metadata.items()} == expected
    assert list(metadata) == list(expected)
    assert [type(metadata[f"a.{kind}"]) for kind in ("bool", "uint8", "float32", "string")] == [bool, int, float, str]
    assert isinstance(metadata["b.text"], list)
    dtypes = {"b.flags": "?", "b.bytes": "u1", "b.int32": "i4", "b.uint64": "u8", "b.float32": "f4", "b.float64": "f8"}
    assert {key: metadata[key].dtype for key in dtypes} == {key: np.dtype(name) for key, name in dtypes.items()}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_of_every_rank(tmp_path, alignment):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_string("odd", "x" * 13)
    tensors(writer)
    write(writer)
    ours = read_gguf(path)
    assert_same_tensors(ours, gguf.GGUFReader(path))
    assert (ours.path, ours.file_bytes) == (path, path.stat().st_size)
    assert ours.tensors["four"].blocks.shape == (6, 8)
    assert ours.tensors["vector"].blocks.shape == (1, 28)
    assert not ours.tensors["cube"].blocks.flags.writeable


def test_version_2_has_the_same_layout(tmp_path):
    valid = make_valid(tmp_path / "v3.gguf")
    (tmp_path / "v2.gguf").write_bytes(valid[:4] + struct.pack("<I", 2) + valid[8:])
    assert_same_tensors(read_gguf(tmp_path / "v2.gguf"), gguf.GGUFReader(tmp_path / "v2.gguf"))


def test_a_file_without_tensors(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    arrays(writer)
    write(writer)
    read = read_gguf(str(tmp_path / "vocabulary.gguf"))
    assert read.tensors == {}
    assert read.metadata["b.text"][3] == "▁the"


def test_smollm2_as_the_gguf_package_reads_it(smollm2_path):
    ours, theirs = read_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)
    assert_same_tensors(ours, theirs)
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for name, value in ours.metadata.items():
        assert plain(value) == theirs.fields[name].contents(), name


def test_gemma(gemma_path):
    """Facts of this file as gguf-dump prints them; the package's reader takes 20 seconds for its vocabulary."""
    read = read_gguf(gemma_path)
    tokens, scores = read.metadata["tokenizer.ggml.tokens"], read.metadata["tokenizer.ggml.scores"]
    assert (len(tokens), scores.shape, scores.dtype) == (262144, (262144,), np.float32)
    assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert len(set(tokens)) == len(tokens)
    assert read.metadata["gemma3.attention.sliding_window"] == 512
    assert (len(read.tensors), read.tensors["token_embd.weight"].shape) == (236, (262144, 640))
    num_weights = Counter()
    for tensor in read.tensors.values():
        num_weights[tensor.format_name] += tensor.num_weights
    expected = {"Q8_0": 169246720, "Q5_0": 63406080, "Q4_K": 23592960, "Q6_K": 11796480, "F32": 55936}
    assert num_weights == expected


def test_bytes_that_are_not_utf8_can_be_got_back(tmp_path):
    raw = b"\xff\xfe \xe2\x96"
    text = struct.pack("<Q", len(raw)) + raw
    path = store(tmp_path, keys=[key("one", STRING, text), key("many", ARRAY, struct.pack("<IQ", STRING, 1) + text)])
    metadata = read_gguf(path).metadata
    for value in (metadata["one"], metadata["many"][0]):
        assert value.encode("utf-8", "surrogateescape") == raw


# Models in several files.


def make_parts(folder: Path) -> list[Path]:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=3)
    scalars(writer)
    tensors(writer)
    write(writer)
    return sorted(folder.glob("model-*.gguf"))


def test_parts_are_joined(tmp_path):
    parts = make_parts(tmp_path)
    assert [p.name for p in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    joined, whole = read_gguf(parts[0]), tmp_path / "whole.gguf"
    make_valid(whole)
    assert_same_tensors(joined, gguf.GGUFReader(whole))
    assert joined.metadata["a.string"] == "Wörter 🙂\n\0 end"
    assert joined.file_bytes == sum(p.stat().st_size for p in parts)


def test_parts_that_cannot_be_joined(tmp_path):
    first, second, third = make_parts(tmp_path)
    with pytest.raises(GGUFError, match=r"'split.count': is 3, so the name .* must end in -00001-of-00003.gguf"):
        read_gguf(second)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(GGUFError, match=r"of-00003.gguf: tensor 'bytes': is in an earlier part"):
        read_gguf(first)
    third.write_bytes(make_valid(tmp_path / "other.gguf")[:24] + kept[24:])  # other counts
    with pytest.raises(GGUFError, match="00003-of-00003"):
        read_gguf(first)
    third.unlink()
    with pytest.raises(GGUFError, match=r"00003-of-00003.gguf: cannot be read: No such file"):
        read_gguf(first)


def test_a_part_with_too_few_tensors(tmp_path):
    first, _, third = make_parts(tmp_path)
    store(tmp_path, name=third.name)
    with pytest.raises(GGUFError, match=r"'split.tensors.count': is 8, the 3 parts have 6 tensors"):
        read_gguf(first)


# Files put together by hand, so that every number in them can be wrong.


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes | str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def info(
    name: bytes | str, dims: tuple[int, ...], kind: int = F32, offset: int = 0, num_dims: int | None = None
) -> bytes:
    num_dims = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", num_dims, *dims, kind, offset)


def build(keys=(), infos=(), data=b"", version=3, magic=b"GGUF", num_keys=None, num_infos=None, alignment=32) -> bytes:
    num_infos = len(infos) if num_infos is None else num_infos
    num_keys = len(keys) if num_keys is None else num_keys
    head = magic + struct.pack("<IQQ", version, num_infos, num_keys) + b"".join((*keys, *infos))
    return head + bytes(-len(head) % alignment) + data if infos else head


def store(folder: Path, name: str = "made.gguf", **parts) -> Path:
    (folder / name).write_bytes(build(**parts))
    return folder / name


def meta(kind: int, value: bytes, name: str = "a") -> bytes:
    return build([key(name, kind, value)])


def aligned(kind: int, value: bytes) -> bytes:
    return meta(kind, value, "general.alignment")


def one(dims: tuple[int, ...], kind: int = F32, data: int = 0, **claims) -> bytes:
    return build(infos=[info("t", dims, kind, **claims)], data=bytes(data))


BILLION, HUGE = 10**9, 2**64 - 1
ONE = struct.pack("<I", 1)
HOSTILE = {
    "magic": (build(magic=b"GGML"), ["header", "b'GGML'"]),
    "html": (b"<!DOCTYPE html>", ["b'<!DO'"]),
    "short magic": (b"GG", ["4 bytes at offset 0", "has 2 left"]),
    "version 1": (build(version=1), ["GGUF version 1 is not read", "2 and 3"]),
    "version 4": (build(version=4), ["GGUF version 4"]),
    "version 0": (build(version=0), ["GGUF version 0"]),
    "big-endian": (build(version=3 << 24), ["version 3 in big-endian"]),
    "10^9 keys": (build(num_keys=BILLION), ["1,000,000,000 keys and 0 tensors", "13,000,000,000 bytes", "has 0 left"]),
    "10^9 tensors": (build(num_infos=BILLION), ["1,000,000,000 tensors", "32,000,000,000 bytes", "has 0 left"]),
    "2^64-1 of both": (build(num_keys=HUGE, num_infos=HUGE), [f"{HUGE:,} keys", f"{45 * HUGE:,} bytes"]),
    "one key too many": (build([key("a", UINT32, ONE)], num_keys=2), ["2 keys", "26 bytes", "has 17 left"]),
    "key length 2^64-1": (build([struct.pack("<Q", HUGE) + bytes(99)]), ["key 0", f"{HUGE:,} bytes", "65,535"]),
    "key over 64 KiB": (build([key("k" * 65536, UINT32, ONE)]), ["metadata key 0", "65,536 bytes", "65,535"]),
    "key past the end": (build([struct.pack("<Q", 999) + bytes(9)]), ["metadata key 0", "999 bytes", "has 9 left"]),
    "key not UTF-8": (build([key(b"a\xff", UINT32, ONE)]), ["metadata key 0", "not UTF-8", "0xff at 1"]),
    "key twice": (build([key("a", UINT32, ONE)] * 2), ["metadata key 'a'", "twice"]),
    "value type 13": (meta(13, bytes(9)), ["metadata key 'a'", "value type 13"]),
    "value type 2^32-1": (meta(2**32 - 1, bytes(9)), ["value type 4,294,967,295"]),
    "value past the end": (meta(INT64, b"1234"), ["'a'", "8 bytes", "has 4 left"]),
    "bool of 2": (meta(BOOL, b"\2"), ["'a'", "a bool is stored as 2"]),
    "text past the end": (meta(STRING, struct.pack("<Q", 2**63)), ["'a'", f"{2**63:,} bytes", "has 0 left"]),
    "array of 10^9 numbers": (meta(ARRAY, array(UINT32, BILLION)), ["1,000,000,000 numbers", "4,000,000,000 bytes"]),
    "array of 10^9 texts": (meta(ARRAY, array(STRING, BILLION)), ["1,000,000,000 texts", "8,000,000,000 bytes"]),
    "array of 2^64-1 numbers": (meta(ARRAY, array(INT64, HUGE)), [f"{HUGE:,} numbers", "has 0 left"]),
    "array whose size overflows": (meta(ARRAY, array(INT64, 2**61)), [f"{2**64:,} bytes", "has 0 left"]),
    "array of bools with a 3": (meta(ARRAY, array(BOOL, 2, b"\1\3")), ["a bool is stored as 3"]),
    "array of type 77": (meta(ARRAY, array(77, 1, bytes(9))), ["array element type 77"]),
    "array in array": (meta(ARRAY, array(ARRAY, 1, array(UINT32, 1, ONE))), ["'a'", "an array of 1 arrays"]),
    "deep arrays": (meta(ARRAY, array(ARRAY, 1) * 50_000), ["an array of 1 arrays"]),
    "text in array past the end": (
        meta(ARRAY, array(STRING, 2, text("ok") + struct.pack("<Q", HUGE))),
        ["text 1 of 2", f"up to {HUGE + 67:,}", "has 67"],
    ),
    "texts that end early": (meta(ARRAY, array(STRING, 3, text("0123456789abcdef"))), ["text 1 of 3"]),
    "alignment 0": (aligned(UINT32, bytes(4)), ["'general.alignment'", "is 0"]),
    "alignment 48": (aligned(UINT32, struct.pack("<I", 48)), ["is 48", "power of two"]),
    "alignment 2^31": (aligned(UINT32, struct.pack("<I", 2**31)), ["is 2,147,483,648", "16,777,216"]),
    "alignment -32": (aligned(INT32, struct.pack("<i", -32)), ["is -32"]),
    "alignment of text": (aligned(STRING, text("32")), ["'general.alignment'", "'32'"]),
    "alignment of an array": (aligned(ARRAY, array(INT32, 1, ONE)), ["'general.alignment'"]),
    "alignment of a bool": (aligned(BOOL, b"\1"), ["'general.alignment'", "True"]),
    "split count of an array": (meta(ARRAY, array(INT32, 2, ONE * 2), "split.count"), ["'split.count'"]),
    "split count 10^9": (meta(UINT32, struct.pack("<I", BILLION), "split.count"), ["-00001-of-1000000000.gguf"]),
    "tensor name over 64 KiB": (build(infos=[info("n" * 65536, (1,))]), ["tensor 0", "65,536", "65,535"]),
    "tensor name not UTF-8": (build(infos=[info(b"\xc3", (1,))]), ["tensor 0", "not UTF-8"]),
    "no dimensions": (one((), num_dims=0, data=4), ["tensor 't'", "0 dimensions"]),
    "5 dimensions": (one((1,) * 5, data=4), ["tensor 't'", "5 dimensions, 1 to 4"]),
    "2^32-1 dimensions": (one((1,), num_dims=2**32 - 1), ["4,294,967,295 dimensions"]),
    "a dimension of 0": (one((4, 0)), ["tensor 't'", "dimension of 0", "(4, 0)"]),
    "dimensions that overflow": (one((2**32,) * 4, data=64), ["tensor 't'", f"{2**130:,} bytes", "has 160"]),
    "one dimension of 2^64-1": (one((HUGE,), data=64), [f"{4 * HUGE:,} bytes", "has 128"]),
    "unknown type 16": (one((256,), 16), ["tensor 't'", "type 16", "0 F32", "12 Q4_K", "30 BF16"]),
    "type 4, long gone": (one((32,), 4), ["type 4,"]),
    "33 columns of Q4_0": (one((33, 2), Q4_0, data=99), ["'t'", "33 weights", "Q4_0 blocks of 32"]),
    "offset not aligned": (one((1,), offset=4, data=64), ["offset 4", "alignment 32"]),
    "offset past the end": (one((1,), offset=960, data=64), ["'t'", "byte 1,028", "has 128"]),
    "offset near 2^64": (one((1,), offset=2**64 - 32, data=64), [f"byte {2**64 + 36:,}", "has 128"]),
    "data one byte short": (one((16,), data=63), ["takes 64 bytes, up to byte 128", "has 127"]),
    "no data at all": (one((16,)), ["takes 64 bytes", "has 64"]),
    "tensor twice": (build(infos=[info("t", (1,)), info("t", (1,), offset=32)], data=bytes(64)), ["'t'", "twice"]),
    "tensors share bytes": (
        build(infos=[info("b", (8,), offset=32), info("a", (9,))], data=bytes(64)),
        ["tensor 'b'", "offset 32", "inside tensor 'a'", "ends at 36"],
    ),
    "two tensors in a place": (
        build(infos=[info("a", (1,)), info("b", (1,))], data=bytes(4)),
        ["tensor 'b'", "offset 0", "inside tensor 'a'"],
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_before_they_cost_anything(tmp_path, case):
    content, facts = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for fact in (str(path), *facts):
        assert fact in caught.value.message
    assert caught.value.remedy
    assert peak < 200_000 + 4 * len(content)


def test_what_the_hostile_files_are_made_of_is_valid(tmp_path):
    """The same parts with honest numbers, so that the refusals above are for the one thing that each case breaks."""
    data = np.arange(16, dtype="<f4").tobytes()
    path = store(
        tmp_path,
        keys=[key("k" * 65535, UINT32, ONE), key("general.alignment", UINT32, struct.pack("<I", 32)),
              key("a", ARRAY, array(STRING, 2, text("ok") + text(""))), key("b", ARRAY, array(BOOL, 2, b"\1\0"))],
        infos=[info("x", (4, 1, 1, 2)), info("y", (8,), offset=32)], data=data,
    )  # fmt: skip
    read = read_gguf(path)
    assert read.tensors["x"].to_float32().tolist() == [[[[0, 1, 2, 3]]], [[[4, 5, 6, 7]]]]
    assert read.tensors["y"].to_float32().tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert read.metadata["a"] == ["ok", ""]


def test_a_file_cut_anywhere_is_refused(tmp_path):
    valid = make_valid(tmp_path / "whole.gguf")
    last = gguf.GGUFReader(tmp_path / "whole.gguf").tensors[-1]
    for length in range(1, last.data_offset + last.n_bytes):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(valid[:length])
        with pytest.raises(GGUFError, match=rf"{length}.gguf: .*(bytes|byte)"):
            read_gguf(path)
        path.unlink()


def test_many_short_entries_cost_no_more_than_some_times_the_file(tmp_path):
    """What a file can hold may be kept; the factor is Python's, for entries of a few bytes."""
    keys = [key(f"{i:x}", UINT8, b"\1") for i in range(5000)]
    keys += [
        key("texts", ARRAY, array(STRING, 20000, text("") * 20000)),
        key("n", ARRAY, array(UINT8, 10**5, bytes(10**5))),
    ]
    path = store(tmp_path, keys=keys)
    tracemalloc.start()
    read = read_gguf(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(read.metadata) == 5002
    assert peak < 8 * path.stat().st_size


# Fuzzing. The property: a file is read, and all of its tensors lie inside it; or FileFormatError says why not.

SMALL = build(
    keys=[key("general.alignment", UINT32, struct.pack("<I", 32)), key("s", STRING, text("llama")),
          key("t", ARRAY, array(STRING, 3, text("a") + text("") + text("bc"))), key("f", BOOL, b"\1"),
          key("i", ARRAY, array(INT32, 4, bytes(16))), key("d", 12, bytes(8))],
    infos=[info("m", (32, 2), Q4_0), info("v", (5,), F32, 64),
           info("k", (256,), 14, 96), info("c", (2, 2, 1, 2), 28, 320)],
    data=bytes(range(256)) * 2,
)  # fmt: skip
EXTREMES = [
    0,
    1,
    2,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]


def assert_read_or_refused(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # never write into a file that may still be mapped
    path.write_bytes(content)
    try:
        read = read_gguf(path)
    except FileFormatError:
        return
    assert sum(t.num_bytes for t in read.tensors.values()) <= len(content)
    for tensor in read.tensors.values():
        values = tensor.to_float32()
        assert values.shape == tensor.shape
        assert values.size <= 8 * len(content)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(["flip", "number", "cut", "splice", "insert", "remove"])):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                width = draw(st.sampled_from([4, 8]))
                content[at : at + width] = (draw(st.sampled_from(EXTREMES)) % 256**width).to_bytes(width, "little")
            case "cut":
                del content[at:]
            case "splice":
                start, length = draw(st.integers(0, len(valid))), draw(st.integers(0, 64))
                content[at : at + length] = valid[start : start + length]
            case "insert":
                content[at:at] = draw(st.binary(max_size=16))
            case "remove":
                del content[at : at + draw(st.integers(1, 16))]
    return bytes(content)


@settings(max_examples=500, deadline=None)
@given(content=damaged(SMALL))
def test_damaged_files(tmp_path_factory, content):
    assert_read_or_refused(tmp_path_factory.getbasetemp() / "damaged.gguf", content)


@settings(max_examples=200, deadline=None)
@given(start=st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", SMALL[:24]]), rest=st.binary(max_size=300))
def test_random_bytes(tmp_path_factory, start, rest):
    assert_read_or_refused(tmp_path_factory.getbasetemp() / "random.gguf", start + rest)


def test_each_number_of_a_file_set_to_each_extreme(tmp_path):
    """Exhaustive where hypothesis samples: all offsets of the header, as 4 and as 8 bytes."""
    assert_read_or_refused(tmp_path / "valid.gguf", SMALL)
    assert len(read_gguf(tmp_path / "valid.gguf").tensors) == 4
    header_len = SMALL.index(bytes(range(256)))
    for width in (4, 8):
        for at in range(header_len):
            for extreme in EXTREMES[:: 2 if width == 4 else 1]:
                number = (extreme % 256**width).to_bytes(width, "little")
                assert_read_or_refused(tmp_path / "number.gguf", SMALL[:at] + number + SMALL[at + width :])
