"""Exported files against what transformers recorded, against the gguf package, and against llama.cpp and transformers
themselves where they are installed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heedful import LLM
from heedful.engine.torch_runner import build_decoder
from heedful.errors import CannotExport, UsageError
from heedful.kernels.attention import DenseAttend
from heedful.testing import make_tiny_model
from heedful.train.loop import begin
from heedful.train.settings import TrainSettings, changed
from heedful.weights.export import export_gguf, export_hf
from heedful.weights.gguf_file import read_gguf
from heedful.weights.load import LoadedModel, load

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_decoders"
WRITTEN_AS_GGUF = ("llama3_rope", "llama_gqa", "llama_yarn", "phi3_fused", "qwen2_bias", "qwen3_qknorm")
WRITTEN_AS_HF = (*WRITTEN_AS_GGUF, "gemma3_text", "mistral_swa16")
TEXT = (Path(__file__).parents[2] / "examples" / "moby_dick.txt").read_text(encoding="utf-8")[:6000]


def small_tokenizer(folder: Path) -> None:
    """Of at most 96 tokens, as the golden models have."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, special=True) for text in ("<s>", "</s>")]
    engine.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=90, special_tokens=marks, show_progress=False))
    engine.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def golden_model(family: str, folder: Path, **changes: Any) -> LoadedModel:
    shutil.copytree(GOLDEN / family, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    small_tokenizer(folder)
    return load(str(folder))


def logits_of(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    """(B, T) → (B, T, V)."""
    batch, length = ids.shape
    decoder = build_decoder(loaded.config, loaded.weights)
    with torch.no_grad():
        hidden = decoder(ids.reshape(-1).long(), torch.arange(length).repeat(batch), DenseAttend([length] * batch))
        return decoder.logits(hidden).view(batch, length, -1)


@pytest.mark.parametrize("family", WRITTEN_AS_HF)
def test_a_folder_computes_what_transformers_recorded(family: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / family / "golden.safetensors")
    export_hf(golden_model(family, tmp_path / "in"), tmp_path / "out", "f32")
    logits = logits_of(load(str(tmp_path / "out")), expected["input_ids"])
    assert (logits - expected["logits"]).abs().max() < 5e-4


@pytest.mark.parametrize("family", WRITTEN_AS_HF)
def test_transformers_loads_a_folder_with_equal_logits(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = load_file(GOLDEN / family / "golden.safetensors")
    loaded = golden_model(family, tmp_path / "in")
    export_hf(loaded, tmp_path / "out", "f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(expected["input_ids"].long()).logits
    assert (logits - expected["logits"]).abs().max() < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a whale")["input_ids"] == loaded.tokenizer.encode("a whale")


@pytest.mark.parametrize("family", WRITTEN_AS_GGUF)
def test_a_gguf_file_computes_what_transformers_recorded(family: str, tmp_path: Path) -> None:
    expected = load_file(GOLDEN / family / "golden.safetensors")
    export_gguf(golden_model(family, tmp_path / "in"), tmp_path / "out.gguf", "f32")
    logits = logits_of(load(str(tmp_path / "out.gguf")), expected["input_ids"])
    assert (logits - expected["logits"]).abs().max() < 5e-4


def test_gemma_goes_through_a_gguf_file_and_back(tmp_path: Path) -> None:
    """With a query scale that llama.cpp has; a pattern of windows of its own."""
    loaded = golden_model("gemma3_text", tmp_path / "in", query_pre_attn_scalar=16)
    ids = load_file(GOLDEN / "gemma3_text" / "golden.safetensors")["input_ids"]
    expected = logits_of(loaded, ids)
    export_gguf(loaded, tmp_path / "out.gguf", "f32")
    file = read_gguf(tmp_path / "out.gguf")
    assert file.metadata["gemma3.attention.sliding_window_pattern"].tolist() == [True, True, False, True]  # type: ignore[union-attr]
    export_hf(load(str(tmp_path / "out.gguf")), tmp_path / "back", "f32")
    assert (logits_of(load(str(tmp_path / "back")), ids) - expected).abs().max() < 1e-4
    assert loaded.config == load(str(tmp_path / "back")).config


@pytest.mark.parametrize(
    ("family", "what"),
    [("gemma3_text", "query scale"), ("mistral_swa16", r"windows \(\(16, 16, 16\)\)"), ("gpt2_mha", "family gpt2")],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(family: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=what):
        export_gguf(golden_model(family, tmp_path / "in"), tmp_path / "out.gguf")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def test_gpt2_is_refused_as_a_folder_too(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="family gpt2"):
        export_hf(golden_model("gpt2_mha", tmp_path / "in"), tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


def permuted(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter stores Llama's q and k (convert_hf_to_gguf, LlamaModel.permute)."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def test_the_gguf_package_reads_what_llama_cpp_expects(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import quantize

    export_gguf(golden_model("llama_gqa", tmp_path / "in"), tmp_path / "out.gguf", "q8_0")
    reader = GGUFReader(tmp_path / "out.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = json.loads((GOLDEN / "llama_gqa" / "config.json").read_text())
    assert fields["general.architecture"] == "llama"
    assert fields["general.file_type"] == 7
    assert fields["llama.attention.head_count_kv"] == config["num_key_value_heads"]
    assert fields["llama.rope.dimension_count"] == config["head_dim"]
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    assert fields["tokenizer.ggml.model"] == "gpt2"
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert fields["tokenizer.ggml.tokens"][:2] == ["<s>", "</s>"]
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert fields["tokenizer.ggml.token_type"][-1] == 5, "an embedding row without a token"
    source = {name: value.float().numpy() for name, value in load_file(GOLDEN / "llama_gqa/model.safetensors").items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    wanted = {
        "token_embd.weight": source["model.embed_tokens.weight"],
        "blk.1.attn_q.weight": permuted(source["model.layers.1.self_attn.q_proj.weight"], heads),
        "blk.1.attn_k.weight": permuted(source["model.layers.1.self_attn.k_proj.weight"], kv_heads),
        "blk.0.ffn_gate.weight": source["model.layers.0.mlp.gate_proj.weight"],
    }
    for name, values in wanted.items():
        assert tensors[name].tensor_type == GGMLQuantizationType.Q8_0
        assert np.array_equal(tensors[name].data, quantize(values, GGMLQuantizationType.Q8_0)), name
    assert tensors["blk.0.attn_norm.weight"].tensor_type == GGMLQuantizationType.F32
    assert np.array_equal(tensors["output_norm.weight"].data, source["model.norm.weight"])


def test_rows_that_are_no_whole_blocks_are_f16(tmp_path: Path) -> None:
    loaded = golden_model("qwen2_bias", tmp_path / "in")
    assert loaded.config.intermediate_size % 32
    export_gguf(loaded, tmp_path / "out.gguf", "q8_0")
    formats = {name: tensor.format_name for name, tensor in read_gguf(tmp_path / "out.gguf").tensors.items()}
    assert formats["blk.0.ffn_down.weight"] == "F16"
    assert formats["blk.0.ffn_up.weight"] == "Q8_0"
    assert formats["blk.0.attn_q.bias"] == "F32"


def biased_model(folder: Path) -> Path:
    """A Llama whose projections have biases, written by transformers' names."""
    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", "attention_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in list(weights):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            bias = torch.randn(len(weights[name]), generator=generator)
            weights[name.replace("weight", "bias")] = bias
    save_file(weights, folder / "model.safetensors")
    return folder


def test_biases_of_turning_channels_move_with_their_rows(tmp_path: Path) -> None:
    loaded = load(str(biased_model(tmp_path / "in")))
    export_gguf(loaded, tmp_path / "out.gguf", "f32")
    source = load_file(tmp_path / "in" / "model.safetensors")
    written = read_gguf(tmp_path / "out.gguf").tensors["blk.1.attn_k.bias"].to_float32()
    assert np.array_equal(written, permuted(source["model.layers.1.self_attn.k_proj.bias"].numpy(), 2))
    ids = torch.arange(40)[None] * 5 % 256
    assert (logits_of(load(str(tmp_path / "out.gguf")), ids) - logits_of(loaded, ids)).abs().max() < 1e-4


def test_weights_beyond_f16_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    make_tiny_model(tmp_path / "in")
    weights = load_file(tmp_path / "in" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 3] = 7e4
    save_file(weights, tmp_path / "in" / "model.safetensors")
    loaded = load(str(tmp_path / "in"))
    with pytest.raises(CannotExport, match=r"down_proj\.weight has weights beyond the range of f16"):
        export_hf(loaded, tmp_path / "out", "f16")
    with pytest.raises(CannotExport, match=r"ffn_down\.weight has weights beyond the range of f16"):
        export_gguf(loaded, tmp_path / "out.gguf", "f16")
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]
    export_gguf(loaded, tmp_path / "out.gguf", "bf16")


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    loaded = load(str(make_tiny_model(tmp_path / "in")))
    for write, name in ((export_hf, "out"), (export_gguf, "out.gguf")):
        write(loaded, tmp_path / name)
        with pytest.raises(UsageError, match="is there already"):
            write(loaded, tmp_path / name)
        write(loaded, tmp_path / name, "bf16", overwrite=True)
        assert load(str(tmp_path / name)).weights["layers.0.attn.q.weight"].format_name == "BF16"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "out", "out.gguf"]
    with pytest.raises(UsageError, match="is no folder"):
        export_gguf(loaded, tmp_path / "none" / "out.gguf")


def test_the_chat_template_is_the_loaded_one(tmp_path: Path) -> None:
    """An adapter's base may have another, or none."""
    for chat in (True, False):
        loaded = load(str(make_tiny_model(tmp_path / f"in-{chat}", chat=chat)))
        make_tiny_model(tmp_path / f"other-{chat}")
        (tmp_path / f"other-{chat}" / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
        other = load(str(tmp_path / f"other-{chat}"))
        changed_model = replace(loaded, make_tokenizer=other.make_tokenizer)
        export_hf(changed_model, tmp_path / f"out-{chat}")
        export_gguf(changed_model, tmp_path / f"out-{chat}.gguf")
        for name in (f"out-{chat}", f"out-{chat}.gguf"):
            template = load(str(tmp_path / name)).tokenizer.chat_template
            assert template is not None
            assert template.source == "{{ messages[0].content }}<|im_end|>"


@pytest.fixture(scope="module", params=["bpe", "bytes"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    values = {
        "data.files": [str(folder / "text.txt")], "data.tokenizer": request.param, "data.vocab_size": 400,
        "model.layers": 2, "model.hidden_size": 64, "model.heads": 4, "model.context_len": 64,
        "run.steps": 30, "run.threads": 1, "run.sample_every": 0, "run.eval_every": 0, "optim.lr": 0.01,
    }  # fmt: skip
    return begin(folder / "run", changed(TrainSettings(), values), say=lambda line: None).folder


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_run_s_gguf_says_the_same(kind: str, trained: Path, tmp_path: Path) -> None:
    loaded = load(str(trained))
    export_gguf(loaded, tmp_path / "run.gguf", kind)
    again = load(str(tmp_path / "run.gguf"))
    text = TEXT[:300] + "  naïve 🚀 1234\n\n\tx"
    assert again.tokenizer.encode(text) == loaded.tokenizer.encode(text)
    assert again.tokenizer.eos_ids == loaded.tokenizer.eos_ids
    made = [LLM(str(path), runner="torch", threads=1) for path in (trained, tmp_path / "run.gguf")]
    answers = [llm.generate("The whale", max_tokens=30, temperature=0).text for llm in made]
    assert len(answers[0]) > 10
    if kind == "f32":
        assert answers[1] == answers[0]
    ids = torch.tensor([loaded.tokenizer.encode(TEXT[:80])[:48]])
    tolerance = {"f32": 1e-4, "q8_0": 0.2}[kind]
    assert (logits_of(again, ids) - logits_of(loaded, ids)).abs().max() < tolerance


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_llama_cpp_says_what_heedful_says(kind: str, trained: Path, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    export_gguf(load(str(trained)), tmp_path / "run.gguf", kind)
    theirs = llama_cpp.Llama(str(tmp_path / "run.gguf"), n_ctx=64, n_threads=1, verbose=False)
    ours = LLM(str(tmp_path / "run.gguf"), runner="torch", threads=1)
    text = TEXT[:400] + "  naïve 🚀 1234\n\n\tx"
    assert theirs.tokenize(text.encode(), add_bos=True) == ours.tokenizer.encode(text)
    answer = theirs("The whale", max_tokens=30, temperature=0)["choices"][0]["text"]
    assert answer == ours.generate("The whale", max_tokens=30, temperature=0).text


@pytest.mark.parametrize("family", [*WRITTEN_AS_GGUF, "gemma3_text"])
def test_llama_cpp_computes_what_heedful_does(family: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    loaded = golden_model(family, tmp_path / "in", **({"query_pre_attn_scalar": 16} if family == "gemma3_text" else {}))
    export_gguf(loaded, tmp_path / "out.gguf", "f32")
    f32 = 0  # of keys and values, in ggml's numbers
    theirs = llama_cpp.Llama(
        str(tmp_path / "out.gguf"), n_ctx=64, n_threads=1, verbose=False, logits_all=True, type_k=f32, type_v=f32
    )
    ids = load_file(GOLDEN / family / "golden.safetensors")["input_ids"][:1, :40]
    theirs.eval(ids[0].tolist())
    logits = torch.tensor(theirs.scores[: ids.shape[1]])
    assert (logits - logits_of(loaded, ids)[0]).abs().max() < 2e-3
