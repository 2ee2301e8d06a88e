"""Every cache policy in the plain runner against brute force: the whole sequence at once, each query with its own list
of keys, each key in the format it has at that query.

The models compute in float64 here: a code that rounding noise moves by a step would hide what is looked for.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from heedful.cache import pages as cache_pages
from heedful.cache import policy as cache_policy
from heedful.cache.policy import PAGE_LEN, PagePolicy, rotation_block
from heedful.engine.torch_runner import TorchRunner
from heedful.kernels import reference
from heedful.kernels.attention import DenseAttend
from heedful.models.config import ModelConfig, config_from_gguf, config_from_hf
from heedful.models.layers import rotary_table
from heedful.request import Batch, CachePolicy, Chunk, KVFormat, Request, Sequence
from heedful.weights import names
from heedful.weights.gguf_file import read_gguf
from heedful.weights.safetensors_file import read_safetensors

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = sorted(folder.name for folder in (GOLDEN / "tiny_decoders").iterdir())
TOLERANCE = 1e-6
SMALLER = {  # so that sequences of a few hundred tokens meet every border
    "STRIDE": 128,
    "DENSE_LAYERS": 1,
    "SPARSE_SINKS": 70,
    "SPARSE_WINDOW": 90,
    "SPARSE_TAIL": 30,
}
STRIDE, DENSE_LAYERS, SPARSE_SINKS, SPARSE_WINDOW, SPARSE_TAIL = SMALLER.values()
RENEW_STEPS = 4
LOCAL_PAGES = 1  # what a budget of 4 pages leaves


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALLER.items():
        monkeypatch.setattr(cache_pages, name, value)


def tiny_runner(family: str, windows: tuple[int | None, ...] | None = None) -> TorchRunner:
    folder = GOLDEN / "tiny_decoders" / family
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    weights = names.from_hf(read_safetensors(folder), config)
    if windows is not None:
        config = dataclasses.replace(config, windows=windows)
    runner = TorchRunner(config, weights, capacity_tokens=4096, threads=1)
    if runner.decoder.position_embed is not None:  # learned for 128 positions: go round
        learned = runner.decoder.position_embed.weight
        runner.decoder.position_embed = torch.nn.Embedding.from_pretrained(learned.repeat(8, 1))
    runner.decoder.double()
    return runner


def some_ids(runner: TorchRunner, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, runner.config.vocab_size, length).tolist()


def new_sequence(ids: list[int], prompt_len: int, asked: CachePolicy) -> Sequence:
    return Sequence(Request(tuple(ids[:prompt_len]), policy=asked), list(ids))


def next_chunk(runner: TorchRunner, sequence: Sequence, most: int) -> Chunk:
    """The prompt in chunks of up to `most` tokens, what follows token by token."""
    start = sequence.cached_len
    end = min(start + most, sequence.prompt_len) if start < sequence.prompt_len else start + 1
    return runner.cache.plan(sequence, runner.cache.chunk_end(sequence, end))


@torch.inference_mode()
def hidden_of_step(runner: TorchRunner, chunks: list[Chunk]) -> list[Tensor]:
    ids = [token for chunk in chunks for token in chunk.token_ids]
    positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
    hidden = runner.decoder(torch.tensor(ids), positions, runner.attend(Batch(tuple(chunks))))
    for chunk in chunks:
        chunk.sequence.cached_len = chunk.end
    return list(hidden.split([chunk.end - chunk.start for chunk in chunks]))


def hidden_states(runner: TorchRunner, sequence: Sequence, most: int) -> Tensor:
    """Of all tokens (T, C), through pages; these are given back."""
    parts = []
    while sequence.cached_len < len(sequence.token_ids):
        parts += hidden_of_step(runner, [next_chunk(runner, sequence, most)])
    runner.cache.release(sequence)
    return torch.cat(parts)


# ---- brute force ------------------------------------------------------------------------------------------------


@dataclass
class BruteForce:
    """An Attend for whole sequences: what the policy means, query by query."""

    config: ModelConfig
    asked: CachePolicy
    policy: PagePolicy
    prompt_len: int

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        block = rotation_block(self.config.head_dim) if self.policy.main.rotated else 1
        here = reference.hadamard(q, block)
        at_sinks = reference.hadamard(torch.stack([self.as_if_at_sinks(layer, q[p], p) for p in range(len(q))]), block)
        formats = self.policy.precise, self.policy.main
        keys = self.by_stride(reference.hadamard(k, block), [form.keys for form in formats])
        values = self.by_stride(reference.hadamard(v, block), [form.values for form in formats])
        share = self.config.num_heads // self.config.num_kv_heads
        chosen: list[list[int]] | None = None
        outs = []
        for p in range(len(q)):
            k_now, v_now = (rows[p // STRIDE][: p + 1] for rows in (keys, values))
            if self.selects(layer, p):
                if p % RENEW_STEPS == 0 or chosen is None:
                    chosen = self.choose(here[p], k_now, p, chosen)
                seen = torch.stack([torch.isin(torch.arange(p + 1) // PAGE_LEN, torch.tensor(one)) for one in chosen])
                sinks = 0
            else:
                window, sinks, _ = self.reach(layer, p)
                one = torch.tensor([at < sinks or window is None or p - at < window for at in range(p + 1)])
                seen = one.expand(self.config.num_kv_heads, -1)
            by_head = (x.repeat_interleave(share, dim=1) for x in (k_now, v_now))
            outs.append(attend_one(here[p], at_sinks[p], *by_head, seen.repeat_interleave(share, dim=0), sinks, scale))
        return reference.hadamard(torch.stack(outs), block)

    def by_stride(self, x: Tensor, numbers: list[str]) -> list[Tensor]:
        """Keys or values (T, K, D) as they are read by the queries of each stride."""
        precise = stored(numbers[0], x)
        if self.policy.main == self.policy.precise:
            return [precise] * (len(x) // STRIDE + 1)
        main = stored(numbers[1], precise)  # written from the page in the precise format
        page = torch.arange(len(x)) // PAGE_LEN
        old = [stride * STRIDE - self.policy.precise_len for stride in range(len(x) // STRIDE + 1)]
        is_main = [(page > 0) & ((page + 1) * PAGE_LEN <= end) for end in old]
        return [torch.where(these[:, None, None], main, precise) for these in is_main]

    def reach(self, layer: int, p: int) -> tuple[int | None, int, int | None]:
        own, asked = self.config.windows[layer], self.asked
        if asked.sparse_prefill and own is None and p < self.prompt_len - SPARSE_TAIL:
            return SPARSE_WINDOW, SPARSE_SINKS, None
        if asked.window is not None and (own is None or own > asked.window):
            return asked.window, asked.sinks, asked.window + asked.sinks - 1
        return own, 0, None

    def as_if_at_sinks(self, layer: int, q: Tensor, p: int) -> Tensor:
        """(H, D) of position p, turned back to position 0, then to where it meets the sinks."""
        rope, (_, _, distance) = self.config.rope_of(layer), self.reach(layer, p)
        if rope is None or distance is None or p <= distance:
            return q
        cos, sin = rotary_table(rope, torch.tensor([p]))
        unturned = reference.rotate(q[None], cos, -sin)
        unturned[..., : rope.rotary_dim] /= rope.attention_scaling**2  # scaled twice
        return reference.rotate(unturned, *rotary_table(rope, torch.tensor([distance])))[0]

    def selects(self, layer: int, p: int) -> bool:
        budget = self.policy.budget_pages
        enough = budget is not None and p // PAGE_LEN + 1 > budget
        return enough and p >= self.prompt_len and layer >= DENSE_LAYERS and self.config.windows[layer] is None

    def choose(self, q: Tensor, keys: Tensor, p: int, before: list[list[int]] | None) -> list[list[int]]:
        own = p // PAGE_LEN
        candidates = range(1, own - LOCAL_PAGES)
        assert self.policy.budget_pages is not None
        count = self.policy.budget_pages - LOCAL_PAGES - 2
        share = self.config.num_heads // self.config.num_kv_heads
        choices = []
        for head in range(self.config.num_kv_heads):
            queries = q[head * share : (head + 1) * share].double() * self.config.query_scale
            last = [] if before is None else before[head]

            def best(scores: Tensor, pages: list[int], wanted: int, last: list[int] = last) -> list[int]:
                """scores (queries, pages): of those that have the largest shares of their softmaxes."""
                shares = scores.softmax(dim=-1).sum(dim=0).tolist()
                favoured = [x * (1.25 if page in last else 1) for x, page in zip(shares, pages, strict=True)]
                order = sorted(range(len(pages)), key=lambda i: (-favoured[i], i))
                return sorted(pages[i] for i in order[:wanted])

            listed = list(candidates)
            if len(listed) > (most := max(cache_policy.LISTED_PAGES, 2 * self.policy.budget_pages)):
                bounds = []
                for page in listed:
                    rows = reference.encode_bounds(keys[page * PAGE_LEN : (page + 1) * PAGE_LEN].float())
                    mean, variance = (bound[head].double() for bound in reference.decode_bounds(rows))
                    bounds.append(queries @ mean + 2 * (queries**2 @ variance) ** 0.5)
                listed = best(torch.stack(bounds, dim=1), listed, most)
            of_keys = (keys[page * PAGE_LEN : (page + 1) * PAGE_LEN, head].double() for page in listed)
            weights = torch.stack([(queries @ of_page.T).logsumexp(dim=-1) for of_page in of_keys], dim=1)
            chosen = best(weights, listed, count)
            choices.append(sorted([0, *chosen, *range(own - LOCAL_PAGES, own + 1)]))
        return choices


def stored(number: str, x: Tensor) -> Tensor:
    return reference.decode(number, reference.encode(number, x), x.shape[-1]).to(x.dtype)


def attend_one(q: Tensor, sink_q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: int, scale: float) -> Tensor:
    """One query (H, D) over keys and values (N, H, D), of which each head sees some (H, N): one softmax → (H, D)."""
    at_sinks, others = (torch.einsum("hd,nhd->hn", one, k) for one in (sink_q, q))
    scores = torch.where(torch.arange(len(k)) < sinks, at_sinks, others) * scale
    return torch.einsum("hn,nhd->hd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@torch.inference_mode()
def brute_force(runner: TorchRunner, ids: list[int], prompt_len: int, asked: CachePolicy) -> Tensor:
    attend = BruteForce(runner.config, asked, runner.cache.policy(asked), prompt_len)
    return runner.decoder(torch.tensor(ids), torch.arange(len(ids)), attend)


def check(
    runner: TorchRunner, asked: CachePolicy, *, length: int, prompt_len: int, chunk_lens: tuple[int, ...]
) -> None:
    ids = some_ids(runner, length)
    expected = brute_force(runner, ids, prompt_len, asked)
    for most in chunk_lens:
        found = hidden_states(runner, new_sequence(ids, prompt_len, asked), most)
        assert (found - expected).abs().max() < TOLERANCE, most
    assert runner.cache.taken_bytes == 0


# ---- tests ------------------------------------------------------------------------------------------------------

POLICIES = {
    "f32": CachePolicy(),
    "f16": CachePolicy(kv_format="f16"),
    "q8": CachePolicy(kv_format="q8"),
    "q4": CachePolicy(kv_format="q4", precise=0),
    "k=q8,v=q4": CachePolicy(kv_format="k=q8,v=q4", precise=0),
    "window": CachePolicy(window=40),
    "sparse": CachePolicy(sparse_prefill=True),
    "mixed": CachePolicy(kv_format="q4", precise=64),
    "k=q4,v=f16 mixed": CachePolicy(kv_format="k=q4,v=f16", precise=64),
    "window, mixed": CachePolicy(kv_format="q4", precise=64, window=150),
    "sparse, q8": CachePolicy(kv_format="q8", sparse_prefill=True),
}
MANY_SIDED = ["mixed", "k=q4,v=f16 mixed", "window, mixed", "sparse, q8"]


@pytest.mark.parametrize("name", MANY_SIDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_policies_on_every_family(family: str, name: str) -> None:
    check(tiny_runner(family), POLICIES[name], length=290, prompt_len=280, chunk_lens=(290, 41))


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in MANY_SIDED])
@pytest.mark.parametrize("family", ["gemma3_text", "llama3_rope"])
def test_plain_policies(family: str, name: str) -> None:
    """Heads of 16 channels, which are never rotated, and of 32."""
    check(tiny_runner(family), POLICIES[name], length=200, prompt_len=190, chunk_lens=(200, 41))


def test_pages_of_windowed_layers_change_format_too() -> None:
    runner = tiny_runner("mistral_swa16", windows=(230, None, 16))
    check(runner, POLICIES["mixed"], length=330, prompt_len=320, chunk_lens=(100,))


@pytest.mark.parametrize(("kv_format", "window", "sinks"), [("f32", 70, 66), ("q4", 150, 5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sinks(family: str, kv_format: str, window: int, sinks: int) -> None:
    """The model's own rotary tables are float32: a query turned back and forth is not the same to the last bit."""
    asked = CachePolicy(kv_format=kv_format, precise=64, window=window, sinks=sinks)
    runner = tiny_runner(family)
    ids = some_ids(runner, 290)
    expected = brute_force(runner, ids, 280, asked)
    for most in (290, 41):
        found = hidden_states(runner, new_sequence(ids, 280, asked), most)
        assert (found - expected).abs().max() < (1e-4 if kv_format == "f32" else 0.02), most


@pytest.mark.parametrize("kv_format", ["f32", "q8", "q4"])
@pytest.mark.parametrize("family", ["llama_gqa", "gemma3_text", "gpt2_mha", "llama_yarn"])
def test_selected_pages(family: str, kv_format: str) -> None:
    """Budget 4 pages: the first, one by its keys, one local, the query's own; four pages to choose from at the end."""
    asked = CachePolicy(kv_format=kv_format, precise=64, budget=256)
    check(tiny_runner(family), asked, length=460, prompt_len=330, chunk_lens=(460, 100))


def test_bounds_list_some_of_many_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of up to twelve."""
    monkeypatch.setattr(cache_policy, "LISTED_PAGES", 1)
    asked = CachePolicy(kv_format="q8", budget=256)
    check(tiny_runner("llama_gqa"), asked, length=980, prompt_len=950, chunk_lens=(100,))


def test_selection_begins_where_the_pages_outgrow_the_budget() -> None:
    check(tiny_runner("llama_gqa"), CachePolicy(budget=256), length=330, prompt_len=230, chunk_lens=(64,))


def test_queries_meet_the_sinks_as_if_the_tokens_between_had_never_been() -> None:
    """One layer: the newest query's output is the one after a sequence of the sinks and its window alone."""
    runner = tiny_runner("llama_gqa")
    runner.decoder.layers = runner.decoder.layers[:1]
    ids = some_ids(runner, 200)
    found = hidden_states(runner, new_sequence(ids, 200, CachePolicy(window=60, sinks=6)), 33)[-1]
    short = [*ids[:6], *ids[-60:]]
    with torch.inference_mode():
        expected = runner.decoder(torch.tensor(short), torch.arange(66), DenseAttend([66]))[-1]
    assert (found - expected).abs().max() < 1e-4
    everything = hidden_states(runner, new_sequence(ids, 200, CachePolicy()), 33)[-1]
    assert (found - everything).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama_yarn", "gemma3_text"])
def test_a_window_as_wide_as_the_sequence_changes_nothing(family: str) -> None:
    runner = tiny_runner(family)
    ids = some_ids(runner, 150)
    plain = hidden_states(runner, new_sequence(ids, 140, CachePolicy()), 150)
    for asked in (CachePolicy(window=150), CachePolicy(window=146, sinks=4), CachePolicy(budget=256)):
        assert (hidden_states(runner, new_sequence(ids, 140, asked), 40) - plain).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama3_rope", "qwen3_qknorm"])
def test_rotation_alone_changes_nothing(family: str) -> None:
    """Rotated float32 rows: what turns the keys turns the queries, and the output is turned back."""
    runner = tiny_runner(family)
    asked, rotated = CachePolicy(window=50, sinks=3), KVFormat("f32", "f32", rotated=True)
    ids = some_ids(runner, 150)
    plain = hidden_states(runner, new_sequence(ids, 140, asked), 60)
    runner.cache._policies[asked] = PagePolicy(rotated, rotated, 0, window=50, sinks=3)
    found = hidden_states(runner, new_sequence(ids, 140, asked), 60)
    assert 0 < (found - plain).abs().max() < 1e-4


def test_sequences_of_different_policies_share_a_step() -> None:
    """Prompts and single tokens of six policies, side by side, their pages mixed up: as each alone."""
    runner = tiny_runner("mistral_swa16", windows=(None, 16, None))
    asked = [POLICIES[name] for name in ("f32", "q8", "mixed", "k=q4,v=f16 mixed", "window", "sparse")]
    lengths = [100, 290, 300, 290, 200, 250]
    ids = [some_ids(runner, length, seed) for seed, length in enumerate(lengths)]
    alone = [
        hidden_states(runner, new_sequence(row, len(row) - 20, one), 77) for row, one in zip(ids, asked, strict=True)
    ]
    sequences = [new_sequence(row, len(row) - 20, one) for row, one in zip(ids, asked, strict=True)]
    found: list[list[Tensor]] = [[] for _ in sequences]
    while running := [i for i, sequence in enumerate(sequences) if sequence.cached_len < lengths[i]]:
        chunks = [next_chunk(runner, sequences[i], 30) for i in running]
        for i, hidden in zip(running, hidden_of_step(runner, chunks), strict=True):
            found[i].append(hidden)
    for parts, expected in zip(found, alone, strict=True):
        assert (torch.cat(parts) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["f32", "q8", "mixed", "window"])
def test_slots_that_are_not_read_may_hold_anything(name: str) -> None:
    runner = tiny_runner("gemma3_text")
    ids = some_ids(runner, 290)
    expected = hidden_states(runner, new_sequence(ids, 270, POLICIES[name]), 100)
    for arena in runner.cache.arenas:
        for buffer in (*arena.buffers.values(), *arena.bounds.values()):
            buffer.fill(0xFF)  # NaN, read as floats or scales
    assert torch.equal(hidden_states(runner, new_sequence(ids, 270, POLICIES[name]), 100), expected)


def test_the_choice_is_kept_between_renewals_and_lists_every_page_that_is_read() -> None:
    runner = tiny_runner("llama_gqa")
    ids = some_ids(runner, 520)
    sequence = new_sequence(ids, 400, CachePolicy(budget=256))
    choices: dict[int, np.ndarray] = {}
    while sequence.cached_len < len(ids):
        chunk = next_chunk(runner, sequence, 400)
        hidden_of_step(runner, [chunk])
        if chunk.spans[0].selection is not None:
            choices[chunk.start] = chunk.spans[0].selection.chosen.copy()
    assert sorted(choices) == list(range(400, 520))
    for p, chosen in choices.items():
        own = p // PAGE_LEN
        assert (chosen[:DENSE_LAYERS] == 0).all()
        rows = chosen[DENSE_LAYERS:].reshape(-1, 4)
        assert (rows[:, 0] == 0).all()
        assert (rows[:, 2:] == [own - 1, own]).all()
        assert ((rows[:, 1] > 0) & (rows[:, 1] < own - 1)).all()
        if p % RENEW_STEPS and p > 400:
            assert np.array_equal(chosen, choices[p - 1])
    assert len({tuple(chosen.ravel()) for chosen in choices.values()}) > 3  # it does choose anew


# ---- real weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passage:
    runner: TorchRunner
    ids: list[int]
    exact: Tensor
    """Hidden states (T, C) of dense attention."""

    @torch.inference_mode()
    def losses(self, form: KVFormat) -> tuple[float, float]:
        """Mean NLL of the passage, and mean KLD from exact attention, with all pages in this format."""
        asked = CachePolicy(kv_format=form.name, precise=0)
        self.runner.cache._policies[asked] = PagePolicy(form, form, 0)
        hidden = hidden_states(self.runner, new_sequence(self.ids, len(self.ids), asked), 512)
        nll = kld = 0.0
        count, decoder = len(self.ids) - 1, self.runner.decoder
        for begin in range(0, count, 256):
            rows = slice(begin, min(begin + 256, count))
            found, exact = (decoder.logits(states[rows]).log_softmax(-1) for states in (hidden, self.exact))
            targets = torch.tensor(self.ids[1:])[rows, None]
            nll -= float(found.gather(1, targets).sum())
            kld += float((exact.exp() * (exact - found)).sum())
        return nll / count, kld / count


@pytest.fixture(scope="module")
def passage(smollm2_path: Path) -> Passage:
    file = read_gguf(smollm2_path)
    config = config_from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()})
    runner = TorchRunner(config, names.from_gguf(file.tensors, config), capacity_tokens=4096, threads=2)
    runner.decoder.double()
    ids = json.loads((GOLDEN / "smollm2" / "passage.json").read_text())["ids"]
    with torch.inference_mode():
        exact = runner.decoder(torch.tensor(ids), torch.arange(len(ids)), DenseAttend([len(ids)]))
    return Passage(runner, ids, exact)


@pytest.mark.parametrize(
    ("variant", "form", "nll_tolerance"),
    [
        ("q4_0", KVFormat("q4", "q4"), 0.01),
        ("hadamard_int8_row", KVFormat("q8", "q8", rotated=True), 0.003),
    ],
)
def test_quality_of_quantized_pages_is_the_recorded_one(
    passage: Passage, variant: str, form: KVFormat, nll_tolerance: float
) -> None:
    """Means only, and to the recording's own tolerance: single tokens are noisy under quantization."""
    recorded = json.loads((GOLDEN / "smollm2" / "kv_quality.json").read_text())["variants"][variant]
    nll, kld = passage.losses(form)
    assert abs(nll - recorded["mean_nll"]) < nll_tolerance
    assert abs(kld / recorded["mean_kld"] - 1) < 0.15
