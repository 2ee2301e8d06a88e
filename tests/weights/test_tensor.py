"""StoredTensor: shapes, rows taken while quantized, conversion; and the faults of a path, named."""

import os

import gguf
import numpy as np
import pytest

from heedful.errors import GGUFError, SafetensorsError
from heedful.weights.tensor import StoredTensor, brief, fold, map_file


def q8_0(shape: tuple[int, ...]) -> StoredTensor:
    values = np.random.default_rng(0).normal(size=fold(shape)).astype(np.float32)
    return StoredTensor("w", "Q8_0", shape, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0))


def f32(values: np.ndarray) -> StoredTensor:
    rows, columns = fold(values.shape)
    return StoredTensor("v", "F32", values.shape, values.astype("<f4").reshape(rows, columns).view(np.uint8))


def test_sizes_and_values():
    tensor = q8_0((6, 64))
    assert (tensor.num_weights, tensor.num_bytes, tensor.format.block_len) == (384, 6 * 68, 32)
    expected = gguf.quants.dequantize(tensor.blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(tensor.to_float32(), expected)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (2, 1, 3, 4), (0,), (0, 4), (4, 0), (2, 0, 3)])
def test_every_rank_comes_back_in_its_shape(shape):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    converted = f32(values).to_float32()
    assert converted.shape == shape
    np.testing.assert_array_equal(converted, values)


def test_to_float32_into_out():
    tensor = q8_0((2, 3, 32))
    whole = np.zeros((4, 3, 32), np.float32)
    assert np.shares_memory(tensor.to_float32(whole[1:3]), whole)
    np.testing.assert_array_equal(whole[1:3], tensor.to_float32())
    assert not whole[[0, 3]].any()
    transposed = np.empty((3, 2, 32), np.float32).transpose(1, 0, 2)  # cannot be folded into rows without a copy
    for wrong in (np.empty((6, 32), np.float32), np.empty((2, 3, 64), np.float32)[..., ::2], transposed):
        with pytest.raises(AssertionError):
            tensor.to_float32(wrong)


@pytest.mark.parametrize("index", [slice(1, 4), slice(0, 0), np.array([5, 0, 0, 3]), np.array([], int)])
@pytest.mark.parametrize("shape", [(6, 64), (6, 2, 32)])
def test_rows_are_taken_without_being_converted(shape, index):
    tensor = q8_0(shape)
    taken = tensor.take_rows(index)
    assert (taken.name, taken.format_name) == ("w", "Q8_0")
    np.testing.assert_array_equal(taken.to_float32(), tensor.to_float32()[index])
    assert np.shares_memory(taken.blocks, tensor.blocks) == (isinstance(index, slice) and taken.num_weights > 0)


def test_rows_of_rows_and_steps():
    tensor = q8_0((8, 32))
    taken = tensor.take_rows(slice(2, None, 2)).take_rows(np.array([2, 0]))
    np.testing.assert_array_equal(taken.to_float32(), tensor.to_float32()[[6, 2]])


def test_elements_of_a_vector():
    """A fused bias is split like its matrix; a quantized vector has no place to be cut."""
    values = np.arange(7, dtype=np.float32)
    assert f32(values).take_rows(slice(2, 5)).to_float32().tolist() == [2, 3, 4]
    assert f32(values).take_rows(np.array([6, 1])).to_float32().tolist() == [6, 1]
    assert f32(values).take_rows(slice(2, 5)).blocks.shape == (1, 12)
    for tensor in (q8_0((64,)), f32(np.float32(1).reshape(()))):
        with pytest.raises(AssertionError):
            tensor.take_rows(slice(0, 1))


def test_blocks_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(AssertionError, match="68"):
        StoredTensor("w", "Q8_0", (6, 32), q8_0((6, 64)).blocks)


def test_brief_keeps_any_value_on_one_line():
    assert brief("a\nb\x1b[2J\udc80") == r"'a\nb\x1b[2J\udc80'"
    for huge in ("x" * 10**6, list(range(10**6)), dict.fromkeys(range(1000), "y" * 10**6), [["z" * 1000] * 99] * 99):
        assert len(brief(huge)) < 2000


@pytest.mark.parametrize("error", [GGUFError, SafetensorsError])
def test_paths_that_hold_no_file(tmp_path, error):
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    cases = {
        "missing": "No such file",
        ".": "is a directory",
        "empty": "is empty",
        "pipe": "not a regular file",
        "loop": "cannot be read",
        "empty/below": "cannot be read",
        "a\0b": "is not a possible path",
        "x" * 300: "cannot be read",
    }
    for name, fact in cases.items():
        with pytest.raises(error, match=fact) as caught:
            map_file(tmp_path / name, error)
        assert caught.value.remedy


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(tmp_path):
    (tmp_path / "closed").write_bytes(b"x")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(GGUFError, match="Permission denied"):
        map_file(tmp_path / "closed", GGUFError)


def test_the_mapping_is_read_only_and_outlives_the_name(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    data = map_file(tmp_path / "file", GGUFError)
    (tmp_path / "file").unlink()
    assert data.tobytes() == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
