"""The gated delta rule: blocks against token by token, token by token against the formulas, states of a shared step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from heedful.kernels.delta_rule import DeltaState, StatefulRecur, convolve, delta_blocks, delta_steps

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6


def inputs(length: int, batch: int = 2, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, g, beta as a layer makes them, and a state, float64."""
    torch.manual_seed(seed)
    q, k = (torch.randn(batch, length, KEY_HEADS, KEY_DIM, dtype=torch.float64) for _ in range(2))
    v = torch.randn(batch, length, HEADS, VALUE_DIM, dtype=torch.float64)
    g = -torch.rand(batch, length, HEADS, dtype=torch.float64) * 3
    beta = torch.rand(batch, length, HEADS, dtype=torch.float64)
    state = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, g, beta, state


def test_one_step_is_the_formula_number_by_number() -> None:
    q, k, v, g, beta, state = inputs(1, batch=1)
    out, after = delta_steps(q, k, v, g, beta, state)
    for head in range(HEADS):
        key, query = (x[0, 0, head // 2].tolist() for x in (k, q))
        faded = [[math.exp(g[0, 0, head]) * cell for cell in row] for row in state[0, head].tolist()]
        for d in range(VALUE_DIM):
            said = sum(faded[e][d] * key[e] for e in range(KEY_DIM))
            error = float(beta[0, 0, head]) * (float(v[0, 0, head, d]) - said)
            column = [faded[e][d] + key[e] * error for e in range(KEY_DIM)]
            assert after[0, head, :, d].tolist() == pytest.approx(column, abs=1e-12)
            assert float(out[0, 0, head, d]) == pytest.approx(
                sum(cell * part for cell, part in zip(column, query, strict=True)), abs=1e-12
            )


@pytest.mark.parametrize(("length", "block_len"), [(1, 64), (2, 64), (64, 64), (65, 64), (150, 64), (37, 5), (9, 1)])
def test_blocks_compute_what_steps_do(length: int, block_len: int) -> None:
    given = inputs(length)
    (stepped, state), (blocked, blocked_state) = delta_steps(*given), delta_blocks(*given, block_len=block_len)
    assert (stepped - blocked).abs().max() < 1e-12
    assert (state - blocked_state).abs().max() < 1e-12


def test_fast_fading_does_not_overflow() -> None:
    q, k, v, g, beta, state = (x.float() for x in inputs(64))
    given = (q, k, v, g * 40, beta, state)  # a block fades by exp(-4,000)
    (stepped, after), (blocked, blocked_after) = delta_steps(*given), delta_blocks(*given)
    assert blocked.isfinite().all()
    assert (stepped - blocked).abs().max() < 1e-5
    assert (after - blocked_after).abs().max() < 1e-5


def test_the_last_tap_meets_the_token_itself() -> None:
    rows = torch.tensor([[[1.0], [10.0], [100.0], [1000.0]]])
    assert convolve(rows, torch.tensor([[5.0, 2.0, 3.0]])).flatten().tolist() == [325.0, 3250.0]


def a_state(seed: int) -> DeltaState:
    torch.manual_seed(seed)
    return DeltaState(
        [torch.randn(3, 5, dtype=torch.float64)], [torch.randn(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)]
    )


def run(recur: StatefulRecur, lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """(convolved, recurred) of each sequence, whose tokens depend on its place alone."""
    parts = [tuple(x[0] for x in inputs(length, batch=1, seed=i)[:5]) for i, length in enumerate(lengths)]
    rows = torch.cat([torch.arange(n * 5, dtype=torch.float64).view(n, 5) + i for i, n in enumerate(lengths)])
    weight = torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64).expand(5, 4)
    convolved = recur.convolve(0, rows, weight)
    out = recur.delta(0, *(torch.cat(x) for x in zip(*parts, strict=True)))
    return list(zip(convolved.split(lengths), out.split(lengths), strict=True))


def test_sequences_of_a_step_do_not_touch_each_other() -> None:
    """Lengths that are alike go through together; each gives what it gives alone."""
    lengths = [1, 7, 1, 2, 7]
    states = [a_state(i) for i in range(len(lengths))]
    alone_states = [state.copy() for state in states]
    together = run(StatefulRecur(lengths, states), lengths)
    for i, length in enumerate(lengths):
        others = [n if j == i else 1 for j, n in enumerate(lengths)]
        spare = [a_state(9) for _ in lengths]
        spare[i] = alone_states[i]
        alone = run(StatefulRecur(others, spare), others)[i]
        for mine, theirs in zip(together[i], alone, strict=True):
            assert len(mine) == length
            assert (mine - theirs).abs().max() < 1e-12
        assert torch.equal(states[i].rows[0], alone_states[i].rows[0])
        assert (states[i].memory[0] - alone_states[i].memory[0]).abs().max() < 1e-12


def test_a_state_may_be_left_where_another_sequence_began() -> None:
    """The first leaves its state in the place of the second's, which has been read by then."""
    lengths = [1, 3]
    first, second = a_state(0), a_state(1)
    expected = run(StatefulRecur(lengths, [first.copy(), second.copy()]), lengths)
    spare = a_state(2)
    got = run(StatefulRecur(lengths, [first, second], [second, spare]), lengths)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


def test_states_to_begin_from_stay_as_they_are() -> None:
    before, after = a_state(0), a_state(1)
    kept = before.copy()
    run(StatefulRecur([4], [before], [after]), [4])
    assert torch.equal(before.rows[0], kept.rows[0])
    assert torch.equal(before.memory[0], kept.memory[0])
    assert not torch.equal(after.memory[0], a_state(1).memory[0])
