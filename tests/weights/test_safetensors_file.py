"""The safetensors reader against the safetensors package, and against files and indexes that lie."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import FileFormatError, SafetensorsError
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_decoders"
ARRAYS = {
    "f64": np.array([[0.1, -2.0]]),
    "f32": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "f16": np.array([1.5, -0.25, 65504], np.float16),
    "i64": np.array([[2**40, -1, 7]]),
    "i32": np.array([-(2**31), 5], np.int32),
    "i16": np.array([-9], np.int16),
    "i8": np.array([[-128], [127]], np.int8),
    "u8": np.array([0, 255], np.uint8),
    "u16": np.array([65535], np.uint16),
    "u32": np.array([2**32 - 1], np.uint32),
    "u64": np.array([2**63], np.uint64),
    "bool": np.array([True, False, True]),
    "scalar": np.array(3.5, np.float32),
    "empty": np.empty((0, 4), np.float32),
    "hollow": np.empty((3, 0), np.float16),
}


# Files that others wrote.


def test_every_dtype_and_rank(tmp_path):
    path = tmp_path / "arrays.safetensors"
    safetensors.numpy.save_file(ARRAYS, path, metadata={"format": "np"})
    read = read_safetensors(str(path))
    assert set(read) == set(ARRAYS)
    for name, expected in ARRAYS.items():
        assert (read[name].name, read[name].shape) == (name, expected.shape)
        assert read[name].blocks.tobytes() == expected.tobytes()
        values = read[name].to_float32()
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected.astype(np.float32))
        assert not read[name].blocks.flags.writeable


@pytest.mark.parametrize("model", ["phi3_fused", "qwen2_bias", "qwen3_qknorm"])
def test_golden_models(model):
    path = GOLDEN / model / "model.safetensors"
    read = read_safetensors(path)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(theirs)
    for name, entry in theirs.items():
        tensor = read[name]
        assert (tensor.format_name, tensor.shape) == (entry["dtype"], tuple(entry["shape"]))
        assert tensor.blocks.tobytes() == bytes(entry["data"])
        assert np.isfinite(tensor.to_float32()).all()
    assert {t.format_name for t in read.values()} == {{"phi3_fused": "BF16", "qwen2_bias": "F16"}.get(model, "F32")}


def test_f16_values(tmp_path):
    path = GOLDEN / "qwen2_bias" / "model.safetensors"
    theirs = safetensors.numpy.load_file(path)
    for name, tensor in read_safetensors(path).items():
        np.testing.assert_array_equal(tensor.to_float32(), theirs[name].astype(np.float32))


# Folders.


def save(folder: Path, file: str, **values: float) -> None:
    safetensors.numpy.save_file({name: np.array([v], np.float32) for name, v in values.items()}, folder / file)


def index(folder: Path, weight_map: object) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def values_of(path: Path) -> dict[str, float]:
    return {name: float(tensor.to_float32()[0]) for name, tensor in read_safetensors(path).items()}


def test_a_folder_with_shards(tmp_path):
    save(tmp_path, "model-00001-of-00002.safetensors", a=1, b=2)
    save(tmp_path, "model-00002-of-00002.safetensors", c=3, unlisted=4)
    weight_map = {"c": "model-00002-of-00002.safetensors"} | dict.fromkeys("ab", "model-00001-of-00002.safetensors")
    assert values_of(index(tmp_path, weight_map)) == {"a": 1, "b": 2, "c": 3}


def test_shards_may_be_links(tmp_path):
    """The Hugging Face cache keeps files under their hash, and links to them from the folder of a model."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save(tmp_path / "blobs", "0f3a", a=1)
    (tmp_path / "model" / "one.safetensors").symlink_to("../blobs/0f3a")
    assert values_of(index(tmp_path / "model", {"a": "one.safetensors"})) == {"a": 1}


def test_a_folder_with_one_file(tmp_path):
    save(tmp_path, "adapter.safetensors", a=1)
    assert values_of(tmp_path) == {"a": 1}
    save(tmp_path, "model.safetensors", a=2)
    assert values_of(tmp_path) == {"a": 2}
    assert values_of(index(tmp_path, {"a": "adapter.safetensors"})) == {"a": 2}


def test_a_folder_with_none_or_several(tmp_path):
    with pytest.raises(SafetensorsError, match=r"0 other \*.safetensors files: none"):
        read_safetensors(tmp_path)
    save(tmp_path, "x.safetensors", a=1)
    save(tmp_path, "y.safetensors", a=1)
    with pytest.raises(SafetensorsError, match=r"2 other \*.safetensors files: x.safetensors, y.safetensors"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["missing.safetensors", "a\0b", "empty.safetensors"])
def test_files_that_are_not_there(tmp_path, name):
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(SafetensorsError, match=r"cannot be read|not a possible path|is empty"):
        read_safetensors(tmp_path / name)


OUTSIDE = [
    "../x.safetensors",
    "/etc/hostname",
    "sub/x.safetensors",
    "./x.safetensors",
    "..",
    ".",
    "",
    "..\\x",
    "C:x",
    "\\x",
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_that_points_outside_of_its_folder(tmp_path, file):
    """The files exist, so that only the rule on names stands before them."""
    (tmp_path / "model" / "sub").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "model", tmp_path / "model" / "sub"):
        save(folder, "x.safetensors", a=1)
    with pytest.raises(SafetensorsError, match="only plain names") as caught:
        read_safetensors(index(tmp_path / "model", {"a": file}))
    assert repr(file) in caught.value.message


INDEXES = {
    "not JSON": ("{", ["JSON cannot be read"]),
    "a list": ("[]", ["is a list"]),
    "no map": ("{}", ["weight_map is None"]),
    "a map of numbers": ('{"weight_map": {"a": 1}}', ["weight_map is {'a': 1}"]),
    "a list for a map": ('{"weight_map": ["a"]}', ["weight_map is ['a']"]),
    "a name twice": ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', ["the name 'a' occurs twice"]),
    "nested": ("[" * 100_000, ["nested too deeply"]),
    "a missing shard": ('{"weight_map": {"a": "z.safetensors"}}', ["'z.safetensors', which is not beside it"]),
    "a zero byte": ('{"weight_map": {"a": "z\\u0000"}}', ["which is not beside it"]),
    "a surrogate": ('{"weight_map": {"a": "z\\ud800"}}', ["which is not beside it"]),
    "a folder": ('{"weight_map": {"a": "folder"}}', ["folder: is a directory"]),
    "a pipe": ('{"weight_map": {"a": "pipe"}}', ["pipe: is not a regular file"]),
    "another tensor": ('{"weight_map": {"b": "x.safetensors"}}', ["tensor 'b': is not in 'x.safetensors'"]),
}


@pytest.mark.parametrize("case", INDEXES)
def test_hostile_indexes(tmp_path, case):
    content, facts = INDEXES[case]
    save(tmp_path, "x.safetensors", a=1)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SafetensorsError) as caught:
        read_safetensors(tmp_path)
    for fact in facts:
        assert fact in caught.value.message


def test_an_index_over_the_limit(tmp_path):
    """A file of holes: it takes no disk."""
    with open(tmp_path / "model.safetensors.index.json", "wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(SafetensorsError, match=r"has 100,000,001 bytes, the limit is 100,000,000"):
        read_safetensors(tmp_path)


# Files put together by hand, so that every claim in them can be wrong.


def build(header: object, data: bytes = b"", claimed: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if claimed is None else claimed).to_bytes(8, "little") + raw + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(data: int = 4, **claims: object) -> bytes:
    return build({"t": entry(**claims)}, bytes(data))


HUGE = 2**64 - 1
TOO_LONG = b'{"t":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
HOSTILE = {
    "7 bytes": (b"\0" * 7, ["has 7 bytes", "takes 8"]),
    "header of 2^64-1": (build(b"{}", claimed=HUGE), [f"{HUGE:,} bytes", "100,000,000"]),
    "header over the limit": (build(b"{}", claimed=100_000_001), ["100,000,001 bytes", "100,000,000"]),
    "header past the end": (build(b"{}", claimed=3), ["claims 3 bytes", "has 2 after"]),
    "header at the limit": (build(b"{}", claimed=100_000_000), ["claims 100,000,000 bytes", "has 2 after"]),
    "header of 0": (build(b""), ["JSON cannot be read"]),
    "a GGUF file": (b"GGUF\3\0\0\0" + bytes(99), ["the limit is 100,000,000"]),
    "not JSON": (build(b"{]"), ["JSON cannot be read"]),
    "not UTF-8": (build(b'{"\xff":1}'), ["JSON cannot be read", "0xff"]),
    "a list": (build([]), ["its JSON is a list"]),
    "a number": (build(b"7"), ["its JSON is a int"]),
    "lists 100,000 deep": (build(b"[" * 100_000), ["nested too deeply"]),
    "objects 100,000 deep": (build(b'{"a":' * 100_000), ["nested too deeply"]),
    "deep and closed": (build(b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), ["nested too deeply"]),
    "a number of 5,000 digits": (build(TOO_LONG, bytes(4)), ["JSON cannot be read"]),
    "tensor twice": (build(b'{"t":1,"u":2,"t":3}'), ["the name 't' occurs twice"]),
    "dtype twice": (build(b'{"t":{"dtype":"F32","dtype":"F16"}}'), ["the name 'dtype' occurs twice"]),
    "entry is a list": (build({"t": []}), ["tensor 't'", "is []"]),
    "entry is empty": (build({"t": {}}), ["tensor 't'", "dtype None"]),
    "unknown dtype": (one(dtype="F8_E4M3"), ["tensor 't'", "'F8_E4M3'", "F32", "BF16"]),
    "a ggml format is no dtype": (one(dtype="Q4_0"), ["'Q4_0' is not read"]),
    "dtype is a list": (one(dtype=[["F32"]]), ["dtype [[...]]"]),
    "shape is a number": (one(shape=4), ["shape 4"]),
    "shape is missing": (one(shape=None), ["shape None"]),
    "negative": (one(shape=[-1, -1]), ["shape [-1, -1]"]),
    "fraction": (one(shape=[1.0]), ["shape [1.0]"]),
    "bool": (one(shape=[True]), ["shape [True]"]),
    "text": (one(shape=["1"]), ["shape ['1']"]),
    "NaN": (one(shape=[float("nan")]), ["shape [nan]"]),
    "2^64": (one(shape=[2**64]), ["shape [18446744073709551616]"]),
    "a number of 4,000 digits": (one(shape=[10**4000]), ["shape [100000", "must be a list"]),
    "9 dimensions": (one(shape=[1] * 9), ["at most 8"]),
    "10^5 dimensions": (one(shape=[1] * 10**5), ["shape [1, 1, 1, 1, 1, 1, ...]"]),
    "beyond memory": (one(shape=[2**40, 2**40]), ["[1099511627776, 1099511627776]", "beyond any memory"]),
    "empty, but beyond memory": (one(0, shape=[0, 2**62], offsets=[0, 0]), [str(2**62), "beyond any memory"]),
    "one offset": (one(offsets=[0]), ["data_offsets [0]"]),
    "three offsets": (one(offsets=[0, 4, 8]), ["data_offsets [0, 4, 8]"]),
    "negative offset": (one(offsets=[-4, 0]), ["data_offsets [-4, 0]"]),
    "offset is a fraction": (one(offsets=[0, 4.0]), ["data_offsets [0, 4.0]"]),
    "offset is a bool": (one(offsets=[False, 4]), ["data_offsets [False, 4]"]),
    "offsets backwards": (one(offsets=[4, 0]), ["takes 4 bytes", "hold -4"]),
    "too small a span": (one(3, offsets=[0, 3]), ["F32 [1] takes 4 bytes", "[0, 3] hold 3"]),
    "too large a span": (one(8, offsets=[0, 8]), ["takes 4 bytes", "hold 8"]),
    "span of nothing": (one(4, shape=[0]), ["takes 0 bytes", "hold 4"]),
    "past the end": (one(3), ["take 4 bytes of data, the file has 3"]),
    "far past the end": (one(offsets=[0, 4 * 10**15], shape=[10**15]), [f"take {4 * 10**15:,} bytes", "has 4"]),
    "bytes left over": (one(5), ["take 4 bytes of data, the file has 5"]),
    "data without tensors": (build({}, bytes(1)), ["take 0 bytes of data, the file has 1"]),
    "begins late": (one(8, offsets=[4, 8]), ["tensor 't'", "byte 4 of the data", "ends at 0"]),
    "hole": (
        build({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)),
        ["tensor 'b'", "byte 8 of the data", "ends at 4"],
    ),
    "overlap": (
        build({"b": entry(offsets=[3, 7]), "a": entry()}, bytes(7)),
        ["tensor 'b'", "byte 3 of the data", "ends at 4"],
    ),
    "the same bytes": (build({"a": entry(), "b": entry()}, bytes(4)), ["tensor 'b'", "byte 0", "ends at 4"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_before_they_cost_anything(tmp_path, case):
    content, facts = HOSTILE[case]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(SafetensorsError) as caught:
            read_safetensors(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for fact in (str(path), *facts):
        assert fact in caught.value.message
    assert len(caught.value.message) < 1000
    assert peak < 200_000 + 30 * len(content)


def test_what_the_hostile_files_are_made_of_is_valid(tmp_path):
    """Judged by the safetensors package too, in both directions."""
    data = np.arange(3, dtype="<f4").tobytes()
    header = {"__metadata__": {"format": "pt"}, "b": entry(offsets=(4, 12), shape=(2, 1)), "a": entry()}
    content = build(json.dumps(header).encode() + b"   ", data)
    (tmp_path / "valid.safetensors").write_bytes(content)
    read = read_safetensors(tmp_path / "valid.safetensors")
    assert {name: t.to_float32().tolist() for name, t in read.items()} == {"b": [[1], [2]], "a": [0]}
    assert {name for name, _ in safetensors.deserialize(content)} == {"a", "b"}


OURS_ALONE = {"unknown dtype", "9 dimensions", "10^5 dimensions", "empty, but beyond memory", "deep and closed"}


@pytest.mark.parametrize("case", [case for case in HOSTILE if case not in OURS_ALONE])
def test_the_safetensors_package_refuses_the_same_files(case):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(HOSTILE[case][0])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = (GOLDEN / "phi3_fused" / "model.safetensors").read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for length in (*range(1, 64), header_end - 1, header_end, header_end + 1, len(whole) - 1):
        path = tmp_path / f"{length}.safetensors"
        path.write_bytes(whole[:length])
        with pytest.raises(SafetensorsError, match=f"{length}.safetensors: .*bytes"):
            read_safetensors(path)


# Fuzzing. The property: a file is read, and all of its tensors lie inside it; or FileFormatError says why not.

SMALL = build(
    {"__metadata__": {"format": "pt"}, "a.weight": entry("BF16", [2, 3], [0, 12]), "b": entry("I64", [2], [12, 28]),
     "c": entry("F16", [], [28, 30]), "d": entry("F32", [0, 7], [30, 30]), "e": entry("F64", [1, 2, 1], [30, 46])},
    bytes(range(46)),
)  # fmt: skip
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"-", b"0", b"1e9", b"true", b"null", b"NaN", str(HUGE).encode(),
          b"9" * 30, b'"F64"', b'"dtype"', b'"shape":[', b'"data_offsets"', b"\\ud800", b"\\u0", b"\xff"]  # fmt: skip


def assert_read_or_refused(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # never write into a file that may still be mapped
    path.write_bytes(content)
    try:
        read = read_safetensors(path)
    except FileFormatError:
        return
    assert sum(t.num_bytes for t in read.values()) <= len(content)
    for tensor in read.values():
        values = tensor.to_float32()
        assert values.shape == tensor.shape
        assert values.size <= len(content)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The header is damaged as text, and its length is set right again in most cases, so that the damage is reached."""
    length = int.from_bytes(SMALL[:8], "little")
    header, data = bytearray(SMALL[8 : 8 + length]), SMALL[8 + length :]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(header)))
        width = draw(st.integers(0, 8))
        match draw(st.sampled_from(["token", "digit", "bytes", "splice", "flip"])):
            case "token":
                header[at : at + width] = draw(st.sampled_from(TOKENS))
            case "digit":  # the next digit at or after `at` becomes another number
                digits = [i for i in range(at, len(header)) if header[i : i + 1].isdigit()]
                if digits:
                    header[digits[0] : digits[0] + 1] = str(draw(st.integers(-1, 2**65))).encode()
            case "bytes":
                header[at : at + width] = draw(st.binary(max_size=8))
            case "splice":
                start = draw(st.integers(0, length))
                header[at : at + width] = SMALL[8 + start : 8 + start + draw(st.integers(0, 40))]
            case "flip" if at < len(header):
                header[at] ^= 1 << draw(st.integers(0, 7))
    claimed = draw(st.sampled_from([len(header)] * 9 + [0, 1, len(header) + 1, 10**8, 2**63, HUGE]))
    return build(bytes(header), data[: draw(st.sampled_from([46] * 9 + [0, 45]))], claimed)


@settings(max_examples=500, deadline=None)
@given(content=damaged())
def test_damaged_files(tmp_path_factory, content):
    assert_read_or_refused(tmp_path_factory.getbasetemp() / "damaged.safetensors", content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 2**31, 2**62, HUGE]), max_size=4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "U8", "Q4_0", "X"]) | JSON,
        "shape": SIZES | JSON,
        "data_offsets": SIZES | JSON,
    }
)


@settings(max_examples=300, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3), num_bytes=st.sampled_from([0, 4, 8, 16])
)
def test_headers_of_the_right_form_with_any_values(tmp_path_factory, header, num_bytes):
    assert_read_or_refused(tmp_path_factory.getbasetemp() / "form.safetensors", build(header, bytes(num_bytes)))


@settings(max_examples=200, deadline=None)
@given(
    start=st.sampled_from([b"", b"\2\0\0\0\0\0\0\0", b"\2\0\0\0\0\0\0\0{}", SMALL[:60]]), rest=st.binary(max_size=200)
)
def test_random_bytes(tmp_path_factory, start, rest):
    assert_read_or_refused(tmp_path_factory.getbasetemp() / "random.safetensors", start + rest)


def test_the_valid_file_of_the_fuzzing_is_read(tmp_path):
    (tmp_path / "small.safetensors").write_bytes(SMALL)
    read = read_safetensors(tmp_path / "small.safetensors")
    assert {name: t.shape for name, t in read.items()} == {
        "a.weight": (2, 3),
        "b": (2,),
        "c": (),
        "d": (0, 7),
        "e": (1, 2, 1),
    }
