"""The sampler, judged by a plain float64 implementation that sorts everything, and by numbers worked out by hand."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from heedful.errors import BadLogits, BadParameter
from heedful.request import SamplingParams
from heedful.sampling.sampler import Sampler, _draw, candidates

NEVER = -np.inf


def float32(values: ArrayLike) -> NDArray[np.float32]:
    """A row of logits that nobody may write to."""
    logits = np.array(values, dtype=np.float32)
    logits.flags.writeable = False
    return logits


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 7, **fields})


def judged_probs(logits: NDArray[np.float32], asked: SamplingParams) -> tuple[NDArray[np.float64], bool]:
    """(V,) probability of every token, 0 for those filtered out; whether no border is within float32's rounding."""
    clear = True
    exact = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(exact)), -exact))
    if asked.top_k:
        order = order[: asked.top_k]
    probs = np.exp((exact[order] - exact[order[0]]) / asked.temperature)
    probs /= probs.sum()
    if asked.top_p < 1:
        before = np.cumsum(probs) - probs
        clear &= bool(np.abs(before - asked.top_p).min() > 2e-7)
        order, probs = order[before < asked.top_p], probs[before < asked.top_p]
        probs /= probs.sum()
    if asked.min_p > 0:
        share = probs / probs[0]
        clear &= bool(np.abs(share / asked.min_p - 1).min() > 1e-5)
        order, probs = order[share >= asked.min_p], probs[share >= asked.min_p]
        probs /= probs.sum()
    dense = np.zeros(len(exact))
    dense[order] = probs
    return dense, clear


def assert_candidates_are(expected: NDArray[np.float64], logits: NDArray[np.float32], asked: SamplingParams) -> None:
    ids, probs = candidates(logits, asked)
    assert (np.diff(ids) > 0).all()
    assert (probs > 0).all()
    dense = np.zeros(len(logits))
    dense[ids] = probs
    # Below 1e-30 a float32 exponential may be subnormal, or 0.
    assert np.flatnonzero(dense > 1e-30).tolist() == np.flatnonzero(expected > 1e-30).tolist()
    np.testing.assert_allclose(dense, expected, rtol=2e-5, atol=1e-30)


coarse = st.integers(-20, 20).map(lambda n: n / 4)  # ties are common
fine = st.floats(-30, 30, width=32)
rows = st.lists(st.one_of(coarse, fine, st.just(NEVER)), min_size=1, max_size=50).filter(lambda row: max(row) > NEVER)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.7, 1.0, 1.3, 20.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 30, 1000]),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    }
)


@settings(max_examples=400, deadline=None)
@given(rows, filters)
@example([NEVER] + [0.0] * 5, {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.0})
def test_candidates_of_small_rows(row: list[float], asked: dict[str, Any]) -> None:
    expected, clear = judged_probs(float32(row), params(**asked))
    assume(clear)
    assert_candidates_are(expected, float32(row), params(**asked))


LARGE_FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 4_321},
    {"top_p": 0.9},
    {"top_p": 0.31},
    {"top_p": 0.98},
    {"min_p": 0.05},
    {"top_k": 3_000, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 3.0, "top_p": 0.77},
    {"temperature": 0.4, "top_p": 0.77},
]


def large_row(shape: str) -> NDArray[np.float32]:
    """11,003 logits: more than are ever sorted, a draw's block or top-k's groups don't divide them."""
    noise = np.random.default_rng(3).standard_normal(11_003)
    if shape == "flat":
        return float32(noise * 0.1)
    if shape == "tied":
        return float32(np.round(noise * 4) / 4)
    if shape == "clustered":  # one bin of the first histogram holds all but one token
        return float32(np.append(noise[1:] * 1e-5, 9.0))
    if shape == "masked":
        return float32(np.where(noise > 1.5, noise, NEVER))
    return float32(noise * 3)


@pytest.mark.parametrize("asked", LARGE_FILTERS, ids=str)
@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "clustered", "masked"])
def test_candidates_of_large_rows(shape: str, asked: dict[str, Any]) -> None:
    expected, clear = judged_probs(large_row(shape), params(**asked))
    assert clear, "choose another top_p or min_p"
    assert_candidates_are(expected, large_row(shape), params(**asked))


def test_top_p_of_a_constant_row_keeps_the_lowest_ids() -> None:
    ids, probs = candidates(float32([2.5] * 4096), params(top_p=0.25))
    assert ids.tolist() == list(range(1024))
    assert probs.tolist() == [1 / 1024] * 1024


@pytest.mark.parametrize("size", [600, 3_000], ids=["sorted", "histogram"])
def test_top_p_just_below_one_survives_rounding(size: int) -> None:
    """Two orders of summing the same weights differ in the last bit, so the target may lie above the running sum."""
    rng = np.random.default_rng(4)
    for _ in range(40):
        _, probs = candidates(float32(rng.standard_normal(size) * 6), params(top_p=np.nextafter(1.0, 0.0)))
        assert len(probs) > size / 2


def test_the_largest_uniform_number_draws_a_token_that_has_a_weight() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        weights = np.exp(rng.standard_normal(2_000) * 6).astype(np.float32)
        weights[1_900:] = 0
        assert weights[_draw(weights, np.nextafter(1.0, 0.0))] > 0


FOUR_THREE_TWO_ONE = float32(np.log([0.4, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"top_k": 3}, [4 / 9, 3 / 9, 2 / 9]),
        ({"top_k": 99}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.65}, [4 / 7, 3 / 7]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9]),
        ({"top_p": 1e-9}, [1.0]),
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9]),
        ({"min_p": 1.0}, [1.0]),
        ({"top_k": 2, "top_p": 0.5}, [1.0]),  # 0.4 is 4/7 of what top-k leaves
        ({"top_p": 0.55, "min_p": 0.6}, [4 / 7, 3 / 7]),  # min-p first would make 0.4 enough
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 0.5, "top_p": 0.5}, [1.0]),  # temperature first
        ({"temperature": 0.5, "min_p": 0.4}, [16 / 25, 9 / 25]),
    ],
    ids=str,
)
def test_filters_by_hand(asked: dict[str, Any], kept: list[float]) -> None:
    ids, probs = candidates(FOUR_THREE_TWO_ONE, params(**asked))
    assert ids.tolist() == list(range(len(kept)))
    np.testing.assert_allclose(probs, kept, rtol=1e-6)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [({"top_k": 1}, [1]), ({"top_k": 2}, [1, 3]), ({"top_k": 4}, [0, 1, 3, 4]), ({"min_p": 1.0}, [1, 3, 4])],
    ids=str,
)
def test_ties_at_the_border_go_to_the_lowest_ids(asked: dict[str, Any], kept: list[int]) -> None:
    ids, _ = candidates(float32([1, 2, 1, 2, 2, 1]), params(**asked))
    assert ids.tolist() == kept


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_tiny_temperatures_leave_the_likeliest(temperature: float, scale: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ids, probs = candidates(float32([-scale, 0, scale, scale / 2]), params(temperature=temperature))
    assert (ids.tolist(), probs.tolist()) == ([2], [1.0])


def chi_square(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("vocab_size", "asked"),
    [(30, {}), (30, {"top_k": 12}), (30, {"top_p": 0.8}), (3_000, {})],  # 3,000: several blocks of a draw
    ids=str,
)
def test_draws_follow_the_probabilities(vocab_size: int, asked: dict[str, Any]) -> None:
    logits = float32(np.random.default_rng(5).uniform(-1, 1, vocab_size))
    sampler = Sampler(params(**asked), [], vocab_size)
    counts = np.bincount([sampler.sample(logits).token_id for _ in range(20_000)], minlength=vocab_size)
    probs, _ = judged_probs(logits, params(**asked))
    assert not counts[probs == 0].any()
    freedom = np.count_nonzero(probs) - 1
    statistic = chi_square(counts[probs > 0], probs[probs > 0])
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)  # its mean and five deviations


@pytest.mark.parametrize("asked", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_token_takes_one_uniform_number_in_ascending_id(asked: dict[str, Any]) -> None:
    logits = float32(np.random.default_rng(6).standard_normal(2_000))
    reached = np.cumsum(judged_probs(logits, params(**asked))[0])
    uniform = np.random.Generator(np.random.PCG64(7)).random(200)
    clear = np.abs(reached[:, None] - uniform).min(axis=0) > 1e-6
    expected = np.searchsorted(reached, uniform)
    sampler = Sampler(params(**asked), [], 2_000)
    drawn = np.array([sampler.sample(logits).token_id for _ in range(200)])
    assert clear.sum() > 150
    assert drawn[clear].tolist() == expected[clear].tolist()


def drawn_tokens(seed: int | None) -> list[int]:
    sampler = Sampler(params(seed=seed, frequency_penalty=0.5), [1, 2], 500)
    logits = float32(np.random.default_rng(8).standard_normal(500))
    return [sampler.sample(logits).token_id for _ in range(50)]


def test_seeds() -> None:
    assert drawn_tokens(11) == drawn_tokens(11)
    assert drawn_tokens(11) != drawn_tokens(12)
    assert drawn_tokens(2**200) == drawn_tokens(2**200)
    assert drawn_tokens(None) != drawn_tokens(None)


@pytest.mark.parametrize("asked", [{}, {"top_k": 2, "top_p": 0.1, "min_p": 0.9}], ids=str)
def test_greedy_takes_the_lowest_of_the_likeliest(asked: dict[str, Any]) -> None:
    sampler = Sampler(params(temperature=0, **asked), [], 5)
    assert sampler.sample(float32([1, 3, 3, NEVER, 3])).token_id == 1


def chosen_after(asked: dict[str, Any], prompt_ids: list[int], output_ids: list[int], logits: list[float]) -> int:
    """The greedy choice from `logits` by a sampler that was made to choose `output_ids` before."""
    sampler = Sampler(params(temperature=0, **asked), prompt_ids, len(logits))
    for token_id in output_ids:
        forcing = np.full(len(logits), -1e4)
        forcing[token_id] = 1e4
        assert sampler.sample(float32(forcing.tolist())).token_id == token_id
    return sampler.sample(float32(logits)).token_id


@pytest.mark.parametrize(
    ("asked", "prompt_ids", "output_ids", "logit", "worth"),
    [
        ({"repetition_penalty": 2.0}, [0, 0], [0], 3.0, 3.0),  # others were seen, token 1 wasn't
        ({"repetition_penalty": 2.0}, [1, 0], [], 3.0, 1.5),
        ({"repetition_penalty": 2.0}, [1], [], -3.0, -6.0),
        ({"repetition_penalty": 2.0}, [1, 1], [1, 1], 3.0, 1.5),
        ({"repetition_penalty": 0.5}, [], [1], 3.0, 6.0),
        ({"presence_penalty": 0.5}, [1, 1], [], 3.0, 3.0),  # the prompt doesn't count
        ({"presence_penalty": 0.5}, [1], [1, 1], 3.0, 2.5),
        ({"presence_penalty": -0.5}, [], [1, 1], 3.0, 3.5),
        ({"frequency_penalty": 0.5}, [1, 1], [], 3.0, 3.0),
        ({"frequency_penalty": 0.5}, [1], [1, 0, 1], 3.0, 2.0),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}, [], [1, 1], 3.0, 0.25),
        ({"logit_bias": {1: 1.5}}, [], [], 3.0, 4.5),
        ({"logit_bias": {1: 1.0}, "repetition_penalty": 2.0}, [1], [], 3.0, 2.0),  # bias first
        ({"logit_bias": {1: 3.0}, "repetition_penalty": 2.0}, [1], [], -1.0, 1.0),
    ],
)
def test_bias_and_penalties_by_hand(
    asked: dict[str, Any], prompt_ids: list[int], output_ids: list[int], logit: float, worth: float
) -> None:
    """Token 1 is worth what a rival, token 2, must have to win against it."""
    assert chosen_after(asked, prompt_ids, output_ids, [-50, logit, worth - 0.01, -50]) == 1
    assert chosen_after(asked, prompt_ids, output_ids, [-50, logit, worth + 0.01, -50]) == 2


def test_penalties_move_the_probabilities_of_draws() -> None:
    """Token 0 always wins, but for a penalty above its lead that its first draw brings."""
    sampler = Sampler(params(presence_penalty=90.0), [], 2)
    assert [sampler.sample(float32([50, 0])).token_id for _ in range(2)] == [0, 1]


def test_extreme_bias_and_penalties_saturate() -> None:
    never = {0: -1e300, 1: -1e300, 2: -1e300}
    assert chosen_after({"logit_bias": {2: 1e300}}, [], [], [1, 2, -3]) == 2
    assert chosen_after({"logit_bias": {1: -1e300}}, [], [], [1, 2, -3]) == 0
    assert chosen_after({"logit_bias": never, "repetition_penalty": 50.0}, [0, 1, 2], [], [1, 2, -3]) == 0
    assert chosen_after({"repetition_penalty": 1e-310}, [1], [], [3, 2, 1]) == 1
    ids, _ = candidates(float32([1e30, 1e30, -1e30]), params())
    assert ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    "asked", [{"logit_bias": {1: 1e300}}, {"repetition_penalty": 1e-310}, {"presence_penalty": -100.0}], ids=str
)
def test_masked_tokens_stay_masked(asked: dict[str, Any]) -> None:
    sampler = Sampler(params(temperature=0, **asked), [1], 3)
    assert sampler.sample(float32([-9, 8, -9])).token_id == 1
    assert sampler.sample(float32([-9, NEVER, -9])).token_id == 0


def test_a_masked_token_ranks_below_the_most_penalised() -> None:
    assert chosen_after({"logit_bias": {1: -1e300}, "repetition_penalty": 2.0}, [0, 1], [], [NEVER, 5]) == 1


@pytest.mark.parametrize("token_id", [-1, 32_000])
def test_bias_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(BadParameter, match=f"no token {token_id}: the vocabulary has 32,000") as raised:
        Sampler(params(logit_bias={3: 1.0, token_id: 1.0}), [], 32_000)
    assert raised.value.field == "logit_bias"


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    peak = float(exact.max())
    return exact - (peak + float(np.log(np.exp(exact - peak).sum())))


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_logprobs_are_those_of_the_raw_logits(temperature: float, offset: float) -> None:
    logits = float32(np.random.default_rng(9).standard_normal(1_000) * 4 + offset)
    asked = params(
        temperature=temperature, repetition_penalty=1.7, presence_penalty=1.0, logit_bias={5: 20.0}, logprobs=7
    )
    sampled = Sampler(asked, [1, 2, 3], 1_000).sample(logits)
    expected = log_softmax(logits)
    likeliest = np.argsort(-logits)[:7]
    assert sampled.token_id == 5
    assert sampled.logprob == pytest.approx(expected[5], abs=1e-6)
    assert [token_id for token_id, _ in sampled.top_logprobs] == likeliest.tolist()
    assert [logprob for _, logprob in sampled.top_logprobs] == pytest.approx(expected[likeliest], abs=1e-6)


def test_how_many_logprobs() -> None:
    logits = float32([1, 2, 2, 0])
    assert Sampler(params(temperature=0), [], 4).sample(logits).logprob is None
    assert Sampler(params(temperature=0), [], 4).sample(logits).top_logprobs == ()
    only_chosen = Sampler(params(temperature=0, logprobs=0), [], 4).sample(logits)
    assert only_chosen.logprob == pytest.approx(log_softmax(logits)[1], abs=1e-6)
    assert only_chosen.top_logprobs == ()
    for asked, ids in [(1, [1]), (3, [1, 2, 0]), (20, [1, 2, 0, 3])]:
        sampled = Sampler(params(temperature=0, logprobs=asked), [], 4).sample(logits)
        assert [token_id for token_id, _ in sampled.top_logprobs] == ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0, np.nan, np.inf, np.nan], "nan, first at token 1 of 4"),
        ([0, 1, np.inf, 2], "inf, first at token 2 of 4"),
        ([NEVER] * 4, "-inf, first at token 0 of 4"),
    ],
)
def test_broken_logits_stop_here(logits: list[float], message: str, temperature: float) -> None:
    with pytest.raises(BadLogits, match=message):
        Sampler(params(temperature=temperature), [], 4).sample(float32(logits))


def test_contracts_of_the_caller() -> None:
    with pytest.raises(AssertionError, match=r"\(3,\), 4"):
        Sampler(params(), [], 4).sample(float32([1, 2, 3]))
    with pytest.raises(AssertionError, match="float64"):
        Sampler(params(), [], 3).sample(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"\(4, 4, 4\)"):
        Sampler(params(repetition_penalty=2.0), [4], 4)
    with pytest.raises(AssertionError, match="0"):
        candidates(float32([1, 2]), params(temperature=0.0))


class OnlySome:
    """A grammar that allows some tokens."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed
        self.accepted: list[int] = []

    def mask(self, logits: NDArray[np.float32]) -> None:
        logits[[i for i in range(len(logits)) if i not in self.allowed]] = NEVER

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_rules_tokens_out_and_is_told(temperature: float) -> None:
    grammar = OnlySome({0, 2})
    logits = float32([1, 9, 2, 8])  # read-only, so the mask cannot have been written into them
    sampler = Sampler(params(temperature=temperature, logprobs=1), [], 4, grammar=grammar)  # type: ignore[arg-type]
    chosen = [sampler.sample(logits) for _ in range(20)]
    assert {sampled.token_id for sampled in chosen} <= {0, 2}
    assert grammar.accepted == [sampled.token_id for sampled in chosen]
    for sampled in chosen:  # of the model's own distribution, in which token 1 is likeliest
        assert sampled.logprob == pytest.approx(log_softmax(logits)[sampled.token_id], abs=1e-6)
        assert [token_id for token_id, _ in sampled.top_logprobs] == [1]


def test_a_grammar_has_the_last_word_on_a_bias() -> None:
    asked = params(temperature=0, logit_bias={1: 100.0, 2: 5.0}, repetition_penalty=1.1)
    grammar = OnlySome({0, 2})
    assert Sampler(asked, [], 4, grammar=grammar).sample(float32([1, 1, 1, 1])).token_id == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_allows_only_what_the_model_never_says(temperature: float) -> None:
    sampler = Sampler(params(temperature=temperature), [], 3, grammar=OnlySome({0}))  # type: ignore[arg-type]
    with pytest.raises(BadLogits):
        sampler.sample(float32([NEVER, 1, 2]))
