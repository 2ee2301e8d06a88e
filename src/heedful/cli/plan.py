"""`heedful plan`: how many replicas a number of users needs, and what they cost; on paper, and simulated."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.cost import STORED_AS, known_dimensions
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.cost.formulas import Shape
    from heedful.plan.capacity import Plan, Replica
    from heedful.plan.simulate import Simulated
    from heedful.plan.speed import Speed
    from heedful.plan.workload import Workload

MOST_REQUESTS = 200_000
"""Simulated unless more are asked for: a minute."""


def plan(
    given: Annotated[str | None, typer.Argument(metavar="MODEL", help="As with --model.", show_default=False)] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Alias, model folder, config.json or GGUF file.")
    ] = None,
    users: Annotated[int, typer.Option(help="How many there are.")] = 1_000,
    tokens_per_user: Annotated[int, typer.Option(help="Answered to each in a day.")] = 20_000,
    context: Annotated[int, typer.Option(help="Tokens of the longest prompt: a conversation's last one.")] = 4_000,
    output: Annotated[int, typer.Option(help="Tokens of an answer.")] = 200,
    turns: Annotated[int, typer.Option(help="Of a conversation; its prompt grows evenly, answers included.")] = 1,
    shared: Annotated[int, typer.Option(help="Tokens that prompts begin with in common: a system prompt.")] = 0,
    prefixes: Annotated[int, typer.Option(help="So many different ones, with --shared.")] = 1,
    think: Annotated[float, typer.Option(help="Seconds from an answer to the next turn, on average.")] = 30.0,
    peak: Annotated[float, typer.Option(help="Requests of the busiest hour over those of a mean one.")] = 3.0,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            help="What `heedful bench --save` wrote of one replica, - is stdin; again for another --kv. "
            "Default: assumptions."
        ),
    ] = None,
    bandwidth: Annotated[float, typer.Option(help="Without --bench: memory bandwidth in GB/s.")] = 31.0,
    gflops: Annotated[float, typer.Option(help="Without --bench: arithmetic peak in GFLOP/s.")] = 350.0,
    cores: Annotated[int, typer.Option(help="Without --bench: cores that work, for the energy.")] = 2,
    weights: Annotated[
        str | None, typer.Option(help="Number format of the weights: f32, f16, q8, q4; default: the alias's, or f16.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Of a replica, as in 8GB.")] = "8GB",
    least_speed: Annotated[float, typer.Option(help="Tokens/s that each answer is to have while it is written.")] = 5.0,
    utilization: Annotated[float, typer.Option(help="Of the replicas' capacity, in the busiest hour.")] = 0.7,
    watts: Annotated[float | None, typer.Option(help="Of a busy replica; default: estimated.")] = None,
    price_per_kwh: Annotated[float | None, typer.Option(help="Of electricity, in any currency.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of a replica, in the same.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="q8, q4, window, budget, sparse; again for more; default: all.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Simulate so many; default: those of the first policy.")] = None,
    routing: Annotated[str, typer.Option(help="In the simulation: affinity or random.")] = "affinity",
    requests: Annotated[
        int | None, typer.Option(help="To simulate; 0: none; default: enough for a steady state.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulation.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Exact numbers as one JSON object.")] = False,
) -> None:
    """Count replicas, memory, visits, energy and price for a number of users, and simulate the queues before them.

    On paper: it needs no weights and fetches nothing.
    """
    from heedful.plan.capacity import POLICIES, Replica
    from heedful.plan.capacity import plan as planned

    if given is not None and model is not None:
        raise BadParameter("--model", "stands there twice", "Give MODEL or --model.")
    name = given or model or default_model
    for option, value, least, most in (
        ("--users", users, 1, 10**10), ("--tokens-per-user", tokens_per_user, 1, 10**9),
        ("--context", context, 1, 10**8), ("--output", output, 1, 10**6), ("--turns", turns, 1, 1_000),
        ("--shared", shared, 0, context - 1), ("--prefixes", prefixes, 1, 10**6), ("--think", think, 0.001, 86_400),
        ("--peak", peak, 1, 1_000), ("--least-speed", least_speed, 0.001, 10**4),
        ("--utilization", utilization, 0.01, 0.99), ("--bandwidth", bandwidth, 0.001, 10**6),
        ("--gflops", gflops, 0.001, 10**9), ("--cores", cores, 1, 10**4), ("--watts", watts, 0.001, 10**6),
        ("--price-per-kwh", price_per_kwh, 0, 10**6), ("--price-per-hour", price_per_hour, 0, 10**6),
        ("--replicas", replicas, 1, 10**5), ("--requests", requests, 0, 10**7), ("--seed", seed, 0, 1 << 62),
    ):  # fmt: skip
        _check(option, value, least, most)
    workload = _workload(users, tokens_per_user, context, output, turns, shared, prefixes, peak, think)
    chosen = list(dict.fromkeys(policy or POLICIES))
    if unknown := [one for one in chosen if one not in POLICIES]:
        raise BadParameter("--policy", f"{unknown[0]!r:.40} is not known", f"Known: {', '.join(POLICIES)}.")
    if routing not in ("affinity", "random"):
        raise BadParameter("--routing", f"must be affinity or random, not {routing!r:.40}")
    shape = known_dimensions(name).shape()
    if not shape.causal:
        raise BadParameter("--model", f"{name} is an encoder: it answers nothing", "Give a model that generates text.")
    form = weights or STORED_AS.get(name, "f16")
    replica = Replica(
        _size(memory), _weight_bytes(shape, form), least_speed, utilization, watts, price_per_kwh, price_per_hour
    )
    machine = _Machine(bandwidth, gflops, cores)
    measured = [_read(file) for file in bench or []]
    speeds = {one: _speed(shape, one, form, measured, machine) for one in chosen}
    plans = [planned(one, POLICIES[one], shape, workload, speeds[one], replica, name) for one in chosen]
    simulated = _simulated(plans[0], shape, workload, speeds[chosen[0]], replicas, routing, requests, seed)
    if json_output:
        found: dict[str, Any] = {
            "model": name,
            "workload": asdict(workload),
            "replica": asdict(replica),
            "weights": form,
        }
        found |= {"speed": {one: asdict(speed) for one, speed in speeds.items()}, "plans": [p.to_dict() for p in plans]}
        print(json.dumps({**found, "simulated": None if simulated is None else simulated.to_dict()}, indent=1))
    else:
        _print(name, workload, replica, plans, speeds[chosen[0]], simulated)


@dataclass(frozen=True)
class _Machine:
    bandwidth: float
    gflops: float
    cores: int


def _check(option: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise BadParameter(option, f"must be {least:,} to {most:,}, not {value:,}")


def _workload(
    users: int, tokens_per_user: int, context: int, output: int, turns: int, shared: int, prefixes: int, peak: float,
    think: float,
) -> Workload:  # fmt: skip
    from heedful.plan.workload import Workload

    grown = (context - shared) // turns
    if turns > 1 and grown <= output:
        what = f"of {context:,} leaves {grown:,} for each of {turns:,} turns, and an answer before it has {output:,}"
        raise BadParameter("--context", what, "Give more, or fewer --turns.")
    return Workload(users, tokens_per_user, context, output, turns, shared, prefixes, peak, think)


def _speed(shape: Shape, policy: str, form: str, measured: list[dict[str, Any]], machine: _Machine) -> Speed:
    """Measured with the policy's number format, else with another one, else assumed."""
    from heedful.cost.energy import Machine
    from heedful.plan.capacity import POLICIES
    from heedful.plan.speed import assumed_speed, measured_speed

    if not measured:
        assumed = Machine(1e9 * machine.bandwidth, 1e9 * machine.gflops, machine.cores)
        return assumed_speed(shape, form, assumed)
    same = [one for one in measured if one.get("kv_format") == POLICIES[policy].kv_format]
    return measured_speed((same or measured)[0], shape)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(sys.stdin.read() if str(file) == "-" else file.read_bytes())
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise BadParameter("--bench", f"{file} cannot be read: {what}") from None
    return found if isinstance(found, dict) else {}


def _size(text: str) -> int:
    from heedful.cli.prefix_options import size_in_bytes

    return size_in_bytes("--memory", text)


def _weight_bytes(shape: Shape, form: str) -> int:
    """Of the matrices; an embedding that is not the head's too is not among them."""
    from heedful.cost.formulas import WEIGHT_BLOCK_BYTES

    if form not in WEIGHT_BLOCK_BYTES:
        raise BadParameter(
            "--weights", f"{form!r:.40} is not a number format", f"Known: {', '.join(WEIGHT_BLOCK_BYTES)}."
        )
    if shape.linear_weights is None or shape.head_weights is None:
        raise BadParameter("--model", "has numbers missing", "Give a config.json or a GGUF file.")
    return -(-(shape.linear_weights + shape.head_weights) * WEIGHT_BLOCK_BYTES[form] // 32)


def _simulated(
    of: Plan, shape: Shape, workload: Workload, speed: Speed, replicas: int | None, routing: str,
    requests: int | None, seed: int,
) -> Simulated | None:  # fmt: skip
    from heedful.plan.capacity import POLICIES, CountsAt
    from heedful.plan.simulate import Fleet, simulate

    if requests == 0:
        return None
    count = replicas or of.replicas
    longest = workload.context + workload.output
    lasting = 3 * workload.turns * (workload.think_s if workload.turns > 1 else 0.0) * of.peak_requests_per_second
    wanted = requests or min(MOST_REQUESTS, max(2_000, 20 * count, int(lasting)))
    fleet = Fleet(count, of.kept_tokens + of.batch * longest, "random" if routing == "random" else "affinity")
    if sys.stderr.isatty():
        print(f"heedful: simulating {wanted:,} requests to {count:,} replicas", file=sys.stderr)
    return simulate(workload, fleet, speed, CountsAt(shape, POLICIES[of.policy], longest), requests=wanted, seed=seed)


# ---- output -------------------------------------------------------------------------------------------------------


def _print(
    name: str, workload: Workload, replica: Replica, plans: list[Plan], speed: Speed, simulated: Simulated | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    first = plans[0]
    saved = 1 - first.visits_per_request / first.dense_visits_per_request
    console.print(
        f"{name}: {workload.users:,} users, {workload.tokens_per_user:,} tokens a day each: "
        f"{_rate(first.peak_requests_per_second)} requests/s in the busiest hour, "
        f"of {_human(first.visits_per_request)} token visits ({saved:.1%} less than dense).",
        soft_wrap=True,
    )
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("policy", "replicas", "batch", "memory", "visits/s", "energy/day", "price/day", "loss"):
        table.add_column(column, justify="left" if column in ("policy", "loss") else "right", overflow="fold")
    for one in plans:
        table.add_row(*_cells(one))
    console.print(table)
    console.print()
    for line in [*_assumptions(workload, replica, plans, speed), *_queues(first, simulated)]:
        console.print(line, soft_wrap=True)


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _cells(one: Plan) -> list[str]:
    return [
        one.policy,
        f"{one.replicas:,}",
        f"{one.batch}",
        f"{_human(one.memory_bytes)}B",
        _human(one.peak_visits_per_second),
        f"{_human(one.energy_per_day.joules)}J",
        "" if one.price_per_day is None else f"{one.price_per_day:,.2f}",
        _loss(one),
    ]


def _loss(one: Plan) -> str:
    if one.quality is not None:
        return f"KLD {one.quality['mean_kld']:.2g}"
    return "none" if one.is_exact else "not measured"


def _assumptions(workload: Workload, replica: Replica, plans: list[Plan], speed: Speed) -> list[str]:
    prompts, energy = workload.prompts, plans[0].energy_per_day
    between = f"{prompts[0]:,}" if len(prompts) == 1 else f"{prompts[0]:,} to {prompts[-1]:,}"
    shared = f", {workload.shared:,} of them one of {workload.prefixes:,} beginnings" if workload.shared else ""
    turns = "1 turn" if workload.turns == 1 else f"{workload.turns:,} turns, {workload.think_s:g} s apart"
    return [
        f"Speed: {speed.source}.",
        f"Requests: {turns}; prompts of {between} tokens{shared}; answers of {workload.output:,}; "
        f"{workload.peak:g} times the mean rate in the busiest hour.",
        f"Replicas: {_human(replica.memory_bytes)}B each, {_human(replica.weight_bytes)}B of it weights; full to "
        f"{replica.utilization:.0%}; {replica.least_tok_s:g} tokens/s an answer at least; "
        f"{plans[0].seconds_per_request:.3g} s of one for a request in batches of {plans[0].batch}.",
        f"Energy: an estimate of the work alone, {plans[0].policy} between {_human(energy.low)}J and "
        f"{_human(energy.high)}J; idle machines are in the price by the hour only.",
    ]


def _queues(first: Plan, found: Simulated | None) -> list[str]:
    if found is None:
        return []
    return [
        f"Simulated, {first.policy}, {found.replicas:,} replicas, routing by {_ROUTINGS[found.routing]}: "
        f"{found.requests:,} requests in {found.seconds:,.3g} s; first token after {found.first_token_p50:.3g} s "
        f"(95 %: {found.first_token_p95:.3g}), then {found.tok_s_p50:,.3g} tokens/s; whole answers after "
        f"{found.total_p50:.3g} s (95 %: {found.total_p95:.3g}); replicas busy {found.busy_share:.0%}; "
        f"{found.cached_share:.1%} of prompt tokens were there already, {found.hit_share:.1%} of those that can be."
    ]


_ROUTINGS = {"affinity": "prefix affinity", "random": "chance"}


def _human(number: float) -> str:
    from heedful.cost.receipt import human

    return human(number)
