"""`heedful cost` as a user meets it: numbers, table, refusals. Expected numbers are worked out by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from heedful.cli.cost import cost
from heedful.errors import BadParameter, HeedfulError, SourceError, UnknownModel, UnsupportedModel

app = typer.Typer()
app.command()(cost)

LARGE = "--context 1000000 --heads 64 --layers 80"
KNOWN_HEADS = LARGE + " --kv-heads 8 --head-dim 128"


def run(arguments: str, *more: str) -> str:
    result = CliRunner().invoke(app, [*arguments.split(), *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(arguments: str, *more: str) -> Any:
    return json.loads(run(arguments + " --json", *more))


def refusal(arguments: str, *more: str) -> HeedfulError:
    error = CliRunner().invoke(app, [*arguments.split(), *more]).exception
    assert isinstance(error, HeedfulError), error
    return error


# ---- JSON ---------------------------------------------------------------------------------------------------------


def test_one_token_over_a_million() -> None:
    found = as_json(LARGE)
    assert found["visits"] == found["dense_visits"] == found["decode"]["visits"] == 5_120_000_000
    assert found["prefill"]["visits"] == 64 * 80 * 1_000_000 * 1_000_001 // 2
    unknown = ("kv_rows_read", "kv_bytes_read", "kv_bytes_held", "weight_bytes_read", "seconds", "energy", "price")
    assert [found[name] for name in unknown] == [None] * len(unknown)
    assert found["flops"] == {"linear": None, "attention": None, "selection": None}


def test_kv_of_one_token_over_a_million() -> None:
    found = as_json(KNOWN_HEADS + " --precise 0")
    assert found["visits"] == 5_120_000_000
    assert found["kv_rows_read"] == 1_280_000_000
    read = {"f32": 655_360_000_000, "f16": 327_680_000_000, "q8": 168_960_000_000, "q4": 92_160_000_000}
    assert found["kv_bytes_read"] == found["kv_bytes_held"] == read
    assert found["flops"] == {"linear": None, "attention": 5_120_000_000 * 512, "selection": 0}
    assert found["estimate_covers"] == "attention"


def test_a_window_and_sinks_are_counted_against_dense() -> None:
    found = as_json(KNOWN_HEADS + " --window 4096 --sinks 4")
    assert found["visits"] == 64 * 80 * 4100
    assert found["dense_visits"] == 5_120_000_000
    assert found["saved"]["window"] == 64 * 80 * (1_000_000 - 4100)
    assert found["saved_share"]["window"] == pytest.approx(0.9959)
    assert found["policy"] == {"window": 4096, "sinks": 4, "kv": "q8", "budget": None, "prefill": "dense"}
    prefill = found["prefill"]
    assert prefill["dense_visits"] == prefill["visits"] + sum(prefill["saved"].values())


def test_keys_and_values_apart_and_precise_tokens() -> None:
    found = as_json(KNOWN_HEADS + " --kv v=q4,k=q8 --precise 100")
    assert found["policy"]["kv"] == "k=q8,v=q4"
    assert found["policy"]["precise"] == 128
    # 63 tokens after the last multiple of 512; 128 before it; the first page: these have 8-bit values
    precise = 64 + 128 + 64
    assert found["kv_bytes_read"]["k=q8,v=q4"] == 8 * 80 * ((1_000_000 - precise) * 204 + precise * 264)
    assert found["kv_bytes_read"]["q8"] == 168_960_000_000


def test_a_budget_and_a_sparse_prefill() -> None:
    found = as_json(KNOWN_HEADS + " --budget 500 --prefill sparse")
    assert found["policy"] == {"window": None, "sinks": 0, "kv": "q8", "budget": 512, "prefill": "sparse"}
    seen = 7 * 64 + 64  # the millionth token is the last of its page
    assert found["visits"] == 64 * (1_000_000 + 79 * seen)
    assert found["saved"] == {"window": 0, "pages": 64 * 79 * (1_000_000 - seen), "prefix": 0}
    bounds = 8 * 79 * (15_625 - 3)
    assert found["bounds_read"] == bounds
    assert found["keys_listed"] == 8 * 79 * 64 * 64
    to_choose = bounds * 264 + found["keys_listed"] * 132
    assert found["kv_bytes_read"]["q8"] == 8 * (1_000_000 + 79 * seen) * 264 + to_choose
    full = sum(range(999_901, 1_000_001))
    assert found["prefill"]["visits"] == 64 * 80 * (2048 * 2049 // 2 + (1_000_000 - 100 - 2048) * 2048 + full)


def test_time_energy_and_price() -> None:
    found = as_json(KNOWN_HEADS + " --kv f16 --bandwidth 32.768 --gflops 1000 --watts 36 --price-per-kwh 0.4")
    assert found["seconds"] == pytest.approx(10, rel=1e-5)
    assert found["energy"]["joules"] == pytest.approx(360, rel=1e-5)  # 1e-4 kWh
    assert found["energy"]["low"] <= found["energy"]["joules"] < found["energy"]["high"]
    assert found["energy"]["source"] == "estimated"
    assert found["price"]["per_token"] == pytest.approx(4e-5, rel=1e-5)
    assert found["price"]["per_million_tokens"] == pytest.approx(40, rel=1e-5)


def test_gflops_bound_the_prefill() -> None:
    slow, fast = as_json("smollm2 --prompt 512 --gflops 10"), as_json("smollm2 --prompt 512 --gflops 20")
    assert slow["prefill"]["seconds"] == pytest.approx(2 * fast["prefill"]["seconds"])
    flops = 2 * (512 * 106_168_320 + 28_311_552) + 4 * 64 * 30 * 9 * 512 * 513 // 2
    assert slow["prefill"]["seconds"] == pytest.approx(flops / 10e9)


def test_a_request() -> None:
    found = as_json("smollm2 --prompt 100 --output 3")
    assert found["visits"] == 30 * 9 * (5050 + 101 + 102)
    assert found["decode"]["tokens"] == 2
    assert found["flops"]["linear"] == 2 * (102 * 106_168_320 + 3 * 28_311_552)
    assert found["weight_bytes_read"]["f32"] == 3 * 4 * (106_168_320 + 28_311_552)
    assert found["counted"]["kind"] == "request"
    longer = as_json("smollm2 --prompt 600 --output 1")  # two steps, and the logits of one token
    assert longer["weight_bytes_read"]["f32"] == 4 * (2 * 106_168_320 + 28_311_552)


def test_a_model_with_windows_of_its_own() -> None:
    found = as_json("gemma3-270m --context 4096")
    assert found["visits"] == 4 * (3 * 4096 + 15 * 512)
    assert found["kv_bytes_held"]["f16"] == 2 * 2 * 256 * (3 * 4096 + 15 * 512)
    narrowed = as_json("gemma3-270m --context 4096 --window 1024")
    assert narrowed["visits"] == 4 * (3 * 1024 + 15 * 512)
    with_sinks = as_json("gemma3-270m --context 4096 --window 1024 --sinks 4")
    assert with_sinks["visits"] == 4 * (3 * 1028 + 15 * 512)  # layers that keep their own window have no sinks


def test_the_model_says_its_context() -> None:
    assert as_json("smollm2")["visits"] == 30 * 9 * 8192


def test_numbers_override_the_model() -> None:
    found = as_json("smollm2 --layers 10 --heads 12 --context 100")
    assert found["visits"] == 10 * 12 * 100
    assert found["kv_rows_read"] == 2 * 3 * 10 * 100
    mixed = as_json("gemma3-270m --layers 7 --context 4096")
    assert mixed["visits"] == 4 * (4096 + 6 * 512)


def test_local_and_global_layers() -> None:
    numbers = "--layers 12 --heads 2 --context 1000"
    assert as_json(numbers + " --window 100 --local-global 5")["visits"] == 2 * (10 * 100 + 2 * 1000)
    assert as_json(numbers + " --window 100")["visits"] == 2 * 12 * 100
    encoder = as_json("--layers 3 --heads 1 --context 10 --encoder --window 4 --local-global 2")
    # the first layer is global; in a local one 10 diagonal entries and, to each side, 9 + 8
    assert encoder["visits"] == 100 + 2 * (10 + 2 * 17)


def test_a_head_is_as_wide_as_its_share_of_hidden() -> None:
    assert as_json("--layers 2 --heads 4 --hidden 64 --context 10")["shape"]["head_dim"] == 16
    assert as_json("--layers 2 --heads 4 --hidden 64 --head-dim 32 --context 10")["shape"]["head_dim"] == 32
    assert as_json("--layers 2 --heads 4 --hidden 65 --context 10")["shape"]["head_dim"] is None


def test_all_numbers_give_all_weights() -> None:
    found = as_json("--layers 2 --heads 4 --kv-heads 2 --hidden 64 --intermediate 100 --vocab 50 --context 10")
    linear = 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 100)
    assert found["flops"]["linear"] == 2 * (linear + 50 * 64)
    assert found["weight_bytes_read"]["f16"] == 2 * (linear + 50 * 64)
    assert found["estimate_covers"] == "attention and weights"


def test_an_encoder() -> None:
    found = as_json("minilm --context 256")
    assert found["visits"] == 6 * 12 * 256 * 256
    assert found["flops"]["linear"] == 2 * 256 * 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert found["kv_bytes_held"]["f32"] == 0
    assert "decode" not in found
    numbers = "--layers 6 --heads 12 --kv-heads 12 --hidden 384 --intermediate 1536 --encoder --context 256"
    by_numbers = as_json(numbers)
    assert (by_numbers["visits"], by_numbers["flops"]) == (found["visits"], found["flops"])


def test_training() -> None:
    found = as_json("smollm2 --train-length 100 --documents 8")
    assert found["visits"] == 30 * 9 * 8 * 5050
    assert found["flops"]["attention"] == 3 * found["visits"] * 4 * 64
    assert found["tokens"] == 800


def test_a_context_of_a_quadrillion() -> None:
    assert as_json("--layers 80 --heads 64 --context 1000000000000000")["visits"] == 80 * 64 * 10**15


def test_the_largest_numbers_still_print() -> None:
    model = ["--layers", "--heads", "--kv-heads", "--head-dim", "--hidden", "--intermediate", "--vocab"]
    arguments = " ".join(f"{option} {10**18}" for option in [*model, "--train-length", "--documents"])
    arguments += " --price-per-kwh 1e12 --bandwidth 1e-6 --gflops 1e-6"
    assert as_json(arguments)["visits"] == 10**18 * 10**18 * 10**18 * (10**18 * (10**18 + 1) // 2)
    assert "token visits" in run(arguments)


# ---- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tiny_decoders/mistral_swa16", "tiny_decoders/mistral_swa16/config.json"])
def test_a_local_model(golden: Path, path: str) -> None:
    found = as_json("", str(golden / path))
    assert found["visits"] == 3 * 4 * 16  # windows of 16 in a context of 256
    assert found["dense_visits"] == 3 * 4 * 256
    assert found["kv_bytes_read"]["q4"] == 2 * 2 * 3 * 16 * 36  # the newest tokens are 8-bit


def test_a_gguf_file(smollm2_path: Path) -> None:
    by_path, by_alias = as_json("--weights f16", str(smollm2_path)), as_json("smollm2 --weights f16")
    assert {**by_path, "model": None} == {**by_alias, "model": None}


def test_a_config_that_is_no_model(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "rwkv"}')
    assert isinstance(refusal("", str(broken)), UnsupportedModel)
    broken.write_text("{")
    assert isinstance(refusal("", str(broken)), SourceError)


# ---- the table ----------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    text = run(KNOWN_HEADS + " --window 4096 --kv q8 --price-per-kwh 0.3")
    lines = text.splitlines()
    assert "\x1b" not in text
    assert lines[0].startswith(
        "80 layers of 64 heads: one token decoded at context 1,000,000 makes 20,971,520 token visits"
    )
    assert "99.6 % less than dense (5,120,000,000)" in lines[0]
    cells = {tuple(line.split()) for line in lines}
    assert ("prefill", "decode") in cells
    assert ("dense", "visits", "2,560,002,560,000,000", "5,120,000,000") in cells
    assert ("KV", "held,", "q8", "692", "MB", "692", "MB") in cells
    assert lines[-1].startswith("Cheaper: ")
    assert "energy, estimated" in text
    assert "price of a million" in text


def test_unknown_numbers_are_left_out_of_the_table() -> None:
    text = run(LARGE)
    assert not any(word in text for word in ("KV read", "FLOP", "energy,", "None", "null"))
    assert "give --kv-heads and --head-dim" in text


def test_a_narrow_terminal_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "--context 1000000000000000 --layers 80 --heads 64"
    monkeypatch.setenv("COLUMNS", "200")
    wide = run(arguments)
    monkeypatch.setenv("COLUMNS", "30")
    narrow = run(arguments)
    assert len(narrow.splitlines()) > len(wide.splitlines())
    assert Counter("".join(narrow.split())) == Counter("".join(wide.split()))


def test_notes() -> None:
    assert "smollm2 was made for 8,192 tokens" in run("smollm2 --context 9000")
    assert "a window of 500 saves nothing over 400 tokens" in run("smollm2 --context 400 --window 500")
    assert "a budget of 512 saves nothing over 400 tokens" in run("smollm2 --context 400 --budget 512")
    assert "a sparse prefill saves nothing over 400 tokens" in run("smollm2 --context 400 --prefill sparse")
    assert "Note:" not in run("smollm2 --context 400 --window 300")
    assert "Note:" not in run("smollm2 --context 4000 --budget 512 --prefill sparse")


def test_a_request_of_one_token_has_no_decode_column() -> None:
    assert run("smollm2 --prompt 10").splitlines()[2].split() == ["prefill", "total"]


@pytest.mark.parametrize("page", ["README.md", "docs/cost.md"])
def test_tables_in_the_docs_are_what_is_printed(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    commands = re.findall(r"^(?:\$ )?heedful cost (.*)$", text, flags=re.MULTILINE)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    tables = [block for block in blocks if "token visits" in block.splitlines()[0]]
    assert tables
    printed = [[line.rstrip() for line in run(arguments).splitlines()] for arguments in commands]
    for table in tables:
        assert table.splitlines() in printed


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("--layers 0 --heads 4 --context 5", "--layers"),
        ("--layers -3 --heads 4 --context 5", "--layers"),
        ("--layers 3 --heads 0 --context 5", "--heads"),
        ("--layers 3 --heads 4 --context 0", "--context"),
        ("--layers 3 --heads 4 --context -1", "--context"),
        (f"--layers 3 --heads 4 --context {10**18 + 1}", "--context"),
        ("--layers 3 --heads 4 --kv-heads 3 --context 5", "--kv-heads"),
        ("smollm2 --heads 10", "--kv-heads"),
        ("--layers 3 --heads 4 --head-dim 0 --context 5", "--head-dim"),
        ("--heads 4 --context 5", "--layers"),
        ("--layers 3 --context 5", "--heads"),
        ("--layers 3 --heads 4", "--context"),
        ("smollm2 --window 0", "--window"),
        ("smollm2 --window 9 --sinks -1", "--sinks"),
        ("smollm2 --sinks 4", "sinks"),
        ("smollm2 --window 9 --sinks 4 --local-global 2", "sinks"),
        ("smollm2 --budget 255", "budget"),
        ("smollm2 --budget 0", "--budget"),
        ("smollm2 --budget 512 --window 300", "budget"),
        ("smollm2 --window 300 --prefill sparse", "prefill"),
        ("smollm2 --prefill slow", "prefill"),
        ("smollm2 --precise -1", "--precise"),
        ("smollm2 --kv k=q8", "kv"),
        ("minilm --budget 512", "--budget"),
        ("minilm --prefill sparse", "--prefill"),
        ("smollm2 --train-length 3 --kv q8", "--kv"),
        ("smollm2 --train-length 3 --budget 512", "--budget"),
        ("minilm --window 5 --sinks 4", "--sinks"),
        ("smollm2 --kv q9", "kv"),
        ("smollm2 --weights q9", "--weights"),
        ("smollm2 --bandwidth 0", "--bandwidth"),
        ("smollm2 --gflops -1", "--gflops"),
        ("smollm2 --watts nan", "--watts"),
        ("smollm2 --price-per-kwh inf", "--price-per-kwh"),
        ("smollm2 --output 3", "--output"),
        ("smollm2 --prompt 0", "--prompt"),
        ("smollm2 --prompt 3 --output 0", "--output"),
        ("smollm2 --prompt 3 --context 4", "--context"),
        ("smollm2 --documents 3", "--documents"),
        ("smollm2 --train-length 3 --output 4", "--output"),
        ("minilm --prompt 4", "--prompt"),
        ("minilm --kv q8", "--kv"),
        ("smollm2 --local-global 4", "--local-global"),
        ("smollm2 --local-global 30 --window 4", "--local-global"),
    ],
)
def test_a_bad_value_names_its_option(arguments: str, option: str) -> None:
    error = refusal(arguments)
    assert isinstance(error, BadParameter)
    assert error.field == option
    assert error.exit_code == 2


def test_models_that_are_not_here() -> None:
    typo = refusal("smolm2")
    assert isinstance(typo, UnknownModel)
    assert typo.nearest == ["smollm2"]
    assert "fetches nothing" in refusal("hf:org/name").message
    assert isinstance(refusal("./nowhere/config.json"), SourceError)
