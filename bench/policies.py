"""Cache policies side by side: what each loses, what it reads, how fast it decodes; makes docs/policies.md's tables.

python bench/policies.py quality [MODEL ...]   loss on a text, with weights in float32
python bench/policies.py needles [MODEL ...]   planted facts found again, on the native runner
python bench/policies.py speed [MODEL ...]     decode tokens/s at several contexts: wants a quiet machine
python bench/policies.py stream                loss along 30,000 tokens under a window, with sinks and without
python bench/policies.py write                 docs/policies.md, docs/stream.svg and the figures that ship, from it

Every figure goes into --results as soon as it is there, and what is in it is not measured again: break off and go on as
you like. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from context_curve import svg

from heedful import LLM, hardware
from heedful.cache.policy import PAGE_LEN
from heedful.cache.policy_text import is_exact, parse_policy
from heedful.cost import quality
from heedful.cost.meter import Meter
from heedful.cost.quality import Measurement, NeedleScore, PassageLoss
from heedful.cost.receipt import human
from heedful.engine.haystack import sentences
from heedful.engine.make_runner import make_runner
from heedful.engine.needles import DEPTHS, FACTS, LENGTHS, NeedleOutcome, ask, needle_cases, score
from heedful.engine.policy_quality import acts_from, in_float32, log_softmax, measure_passage, passage_ids, predictions
from heedful.engine.runner import Runner
from heedful.engine.scheduler import TOKEN_BUDGET
from heedful.engine.speed import measure_speed
from heedful.models.config import ModelConfig
from heedful.request import CachePolicy, Request, Selection, Sequence
from heedful.testing import plain_cache
from heedful.weights.load import LoadedModel, load, load_config
from heedful.weights.source_names import ALIASES
from heedful.weights.sources import resolve

ROOT = Path(__file__).parent.parent
SHIPPED = Path(quality.__file__).with_name("measured.json")
MODELS = ("smollm2", "gemma3-270m")
EXACT = "kv=f32"
POLICIES = (
    EXACT,
    "kv=f16",
    "kv=q8",
    "kv=k:q8/v:q4",
    "kv=q4",
    "kv=q4,precise=512",
    "kv=q4,precise=0",
    "kv=q8,window=1024,sinks=4",
    "kv=q8,window=1024",
    "kv=q8,budget=1024",
    "kv=q8,budget=512",
    "kv=q4,budget=1024",
    "kv=q8,prefill=sparse",
)
CONTEXTS = (64, 512, 2048, 4096, 7000)
TABLE_CONTEXTS = (64, 2048, 7000)
PLOTTED = ("kv=f16", "kv=q8", "kv=q4", "kv=q8,budget=1024")
COUNTED_AT = 7000
COUNTED_TOKENS = 64  # a selection costs more on some steps than on others
LONGEST_TEXT = 8192
AT_ONCE = 5  # policies that read the text in one run, with exact attention and the control
STREAM_TOKENS, STREAM_PART = 30_000, 1_000
STREAM = ("kv=q8,window=1024,sinks=4", "kv=q8,window=1024")


class Results:
    """part → model → policy → figures, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}

    def of(self, part: str, model: str, policy: str) -> dict[str, Any]:
        """To be read and written; save() keeps it."""
        found: dict[str, Any] = self.parts.setdefault(part, {}).setdefault(model, {}).setdefault(policy, {})
        return found

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self.parts, indent=1), encoding="utf-8")
        os.replace(aside, self.path)


def main() -> None:
    args = _arguments()
    results = Results(args.results)
    for model in args.models if args.part != "stream" else ["smollm2"]:
        if args.part != "write":
            _PARTS[args.part](results, model, args)
    if args.part == "write":
        write(results)
    print(json.dumps({"bench": "policies", "part": args.part, "results": results.parts.get(args.part)}))


def measure_quality(results: Results, model: str, args: argparse.Namespace) -> None:
    """Policies that the shipped text is long enough for some at a time, the others on longer ones each."""
    missing = [
        name for name in args.policies if not is_exact(parse_policy(name)) and not results.of("quality", model, name)
    ]
    if not missing:
        return
    loaded = load(model)
    text_len = len(passage_ids(loaded.tokenizer, context_len=loaded.config.context_len, policies=[])[0])
    short = [name for name in missing if 3 * acts_from(parse_policy(name)) <= text_len]
    groups = [short[i : i + AT_ONCE] for i in range(0, len(short), AT_ONCE)]
    groups += [[name] for name in missing if name not in short]
    runner = _runner(in_float32(loaded), args.runner, (AT_ONCE + 2) * LONGEST_TEXT)
    for group in groups:
        policies = [parse_policy(name) for name in group]
        ids, what = passage_ids(loaded.tokenizer, context_len=loaded.config.context_len, policies=policies)
        what = f"{what}; {args.runner} runner, weights in float32"
        report = _reporter(f"{model}: {', '.join(group)}", (len(group) + 2) * (len(ids) - 1))
        for name, loss in zip(group, measure_passage(runner, ids, policies, text=what, progress=report), strict=True):
            results.of("quality", model, name).update(asdict(loss))
            print(f"{model} {name}: mean KLD {loss.mean_kld:.5f}, ΔNLL {loss.mean_delta_nll:+.5f}", flush=True)
        results.save()


def measure_needles(results: Results, model: str, args: argparse.Namespace) -> None:
    loaded = load(model)
    cases = needle_cases(loaded.tokenizer, context_len=loaded.config.context_len)
    longest = max(case.length for case in cases)
    runner = _runner(loaded, "native", (len(args.policies) + 1) * longest)
    for i, case in enumerate(cases):
        missing = [name for name in args.policies if str(i) not in results.of("needles", model, name)]
        if not missing:
            continue
        outcomes = ask(runner, case, [parse_policy(name) for name in missing], loaded.tokenizer)
        for name, outcome in zip(missing, outcomes, strict=True):
            results.of("needles", model, name)[str(i)] = asdict(outcome)
        results.save()
        found = ", ".join(name for name, outcome in zip(missing, outcomes, strict=True) if outcome.found)
        print(f"{model} {i + 1} of {len(cases)}, {case.kind}, {case.length} tokens, found by: {found}", flush=True)


def measure_speeds(results: Results, model: str, args: argparse.Namespace) -> None:
    llm = LLM(model)
    for name in args.policies:
        for context in (n for n in args.contexts if str(n) not in results.of("speed", model, name)):
            case = measure_speed(llm.engine, context, policy=parse_policy(name))
            results.of("speed", model, name)[str(context)] = asdict(case)
            results.save()
            print(f"{model} {name} at {context}: {case.decode_tok_s:.1f} tok/s", flush=True)


def measure_stream(results: Results, model: str, args: argparse.Namespace) -> None:
    """Mean NLL of every thousand tokens of generated sentences."""
    if all(results.of("stream", model, name) for name in STREAM):
        return
    loaded = load(model)
    source = sentences(seed=1)
    ids = loaded.tokenizer.encode(" ".join(next(source) for _ in range(args.stream_tokens // 8)))
    assert len(ids) > args.stream_tokens, len(ids)
    ids = ids[: args.stream_tokens + 1]
    policies = [parse_policy(name) for name in STREAM]
    report = _reporter(f"{model}: a stream", len(policies) * args.stream_tokens)
    runner = _runner(loaded, "auto", 4 * 2048)
    nll = np.array(
        [
            -log_softmax(logits)[:, target]
            for logits, target in predictions(runner, ids, policies, prompt_len=1, progress=report)
        ]
    )
    for name, column in zip(STREAM, nll.T, strict=True):
        means = [float(part.mean()) for part in np.split(column, range(STREAM_PART, len(column), STREAM_PART))]
        results.of("stream", model, name).update(mean_nll=means, tokens=len(column))
        print(f"{model} {name}: " + " ".join(f"{mean:.2f}" for mean in means), flush=True)
    results.save()


@dataclass(frozen=True)
class Counts:
    """Of a prompt and of one token decoded after it, from the plans alone."""

    prompt_visits: int
    token_visits: int
    kv_read_bytes: int
    """By the token, bounds of pages among them."""
    kv_held_bytes: int
    """Rows alone: without padding and bounds."""


def count(config: ModelConfig, context: int, policy: CachePolicy) -> Counts:
    cache = plain_cache(
        config.windows, config.num_kv_heads, config.head_dim, capacity_tokens=2 * context, default="f32"
    )
    sequence = Sequence(Request((0,) * context, policy=policy), [0] * (context + COUNTED_TOKENS))
    meter, read = Meter(sequence), 0
    while sequence.cached_len < len(sequence.token_ids):
        known = context if sequence.cached_len < context else sequence.cached_len + 1
        chunk = cache.plan(sequence, cache.chunk_end(sequence, min(known, sequence.cached_len + TOKEN_BUDGET)))
        for selection in (span.selection for span in chunk.spans if span.selection is not None):
            _choose_evenly(selection, newest=sequence.cached_len // PAGE_LEN)
        kv_bytes = meter.count(chunk, config, 0)
        read += kv_bytes if sequence.cached_len >= context else 0
        sequence.cached_len = chunk.end
    return Counts(
        meter.prefill_visits, meter.decode_visits // COUNTED_TOKENS, read // COUNTED_TOKENS, sequence.held_bytes
    )


def _choose_evenly(selection: Selection, newest: int) -> None:
    """As if what promises most lay all over the text; which pages it is decides how many are 4-bit ones."""
    first_local = newest - selection.local_pages
    middle = np.linspace(1, first_local - 1, selection.num_pages - selection.local_pages - 2)
    selection.chosen[:] = [0, *middle.astype(int), *range(first_local, newest + 1)]


def write(results: Results) -> None:
    _take_shipped(results)
    path = ROOT / "docs" / "policies.md"
    page = path.read_text(encoding="utf-8")
    for model in MODELS:
        page = _between(page, model, _table(results, model))
    if stream := results.parts.get("stream", {}).get("smollm2"):
        page = _between(page, "stream", _stream_table(stream))
        curves = {
            name: [((i + 1) * STREAM_PART, mean) for i, mean in enumerate(found["mean_nll"])]
            for name, found in stream.items()
        }
        drawn = svg(curves, across="position", up="mean NLL of 1,000 tokens")
        (ROOT / "docs" / "stream.svg").write_text(drawn, encoding="utf-8")
    page = _between(page, "speed", _speed_plot(results, "smollm2"))
    path.write_text(page, encoding="utf-8")
    _write_shipped(results)


def _take_shipped(results: Results) -> None:
    """Losses that ship and are not in the results: of an earlier machine, or checkout."""
    for model, policies in _shipped().items():
        for name, found in policies.items():
            loss = results.of("quality", model, name)
            loss.update({} if loss else found["passage"])


def _shipped() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(SHIPPED.read_bytes())["models"]
    return models


def _speed_plot(results: Results, model: str) -> str:
    """Draws docs/policy_speed.svg; the line that shows it, or nothing while a figure is missing."""
    speeds = {name: results.of("speed", model, name) for name in PLOTTED}
    if any(str(context) not in speed for speed in speeds.values() for context in CONTEXTS):
        return ""
    curves = {name: [(n, speed[str(n)]["decode_tok_s"]) for n in CONTEXTS] for name, speed in speeds.items()}
    (ROOT / "docs" / "policy_speed.svg").write_text(svg(curves), encoding="utf-8")
    return f"![Decode tokens/s of {model} against context under four policies](policy_speed.svg)"


def _write_shipped(results: Results) -> None:
    models = {
        model: {name: asdict(found) for name in POLICIES if (found := _measurement(results, model, name)) is not None}
        for model in MODELS
    }
    files = {f"{ALIASES[model].file} {ALIASES[model].size_bytes}": model for model in MODELS}
    SHIPPED.write_text(json.dumps({"files": files, "models": models}, indent=1) + "\n", encoding="utf-8")


def _measurement(results: Results, model: str, name: str) -> Measurement | None:
    loss = results.of("quality", model, name)
    return Measurement(PassageLoss(**loss), _needles(results, model, name)) if loss else None


def _needles(results: Results, model: str, name: str) -> NeedleScore | None:
    """What ships until every case was asked, of exact attention too; None where nothing does."""
    exact, found = (results.of("needles", model, which) for which in (EXACT, name))
    if min(len(exact), len(found)) < len(FACTS) * len(LENGTHS) * len(DEPTHS):
        of_needles = _shipped().get(model, {}).get(name, {}).get("needles")
        return None if of_needles is None else NeedleScore(**of_needles)
    return score(*([NeedleOutcome(**of[key]) for key in sorted(exact, key=int)] for of in (exact, found)))


def _table(results: Results, model: str) -> str:
    config = load_config(resolve(model).path)
    speeds = [f"tok/s at {context:,}" for context in TABLE_CONTEXTS]
    head = (
        "policy",
        "prompt",
        "visits",
        "KV read",
        "KV held",
        *speeds,
        "mean KLD",
        "p50",
        "p99",
        "ΔNLL",
        "found",
        "chosen",
    )
    rows = [head, ("---",) * len(head)]
    for name in POLICIES:
        counts = count(config, COUNTED_AT, parse_policy(name))
        speed = results.of("speed", model, name)
        rows.append(
            (
                f"`{name}`",
                human(counts.prompt_visits).strip(),
                human(counts.token_visits).strip(),
                f"{human(counts.kv_read_bytes)}B",
                f"{human(counts.kv_held_bytes)}B",
                *(f"{speed[str(n)]['decode_tok_s']:.0f}" if str(n) in speed else "–" for n in TABLE_CONTEXTS),
                *_loss_cells(results.of("quality", model, name), name),
                *_needle_cells(_needles(results, model, name)),
            )
        )
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}{_note(results, model)}"


def _note(results: Results, model: str) -> str:
    """What the losses were measured on, text by text."""
    by_text: dict[str, list[str]] = {}
    for name in POLICIES:
        if loss := results.of("quality", model, name):
            text = f"{loss['text']} (noise: a mean KLD of {loss['noise_kld']:.5f})"
            by_text.setdefault(text, []).append(f"`{name}`")
    return "".join(f"\n\nKLD and ΔNLL of {', '.join(names)}: {text}." for text, names in by_text.items())


def _loss_cells(loss: dict[str, Any], name: str) -> tuple[str, ...]:
    if name == EXACT:
        return ("0",) * 4
    if not loss:
        return ("–",) * 4
    return (*(f"{loss[key]:.5f}" for key in ("mean_kld", "p50_kld", "p99_kld")), f"{loss['mean_delta_nll']:+.5f}")


def _needle_cells(found: NeedleScore | None) -> tuple[str, str]:
    return ("–", "–") if found is None else (f"{found.recall:.0%}", f"{found.choice:.0%}")


def _stream_table(stream: dict[str, Any]) -> str:
    shown = (0, 1, 2, 4, 9, 19, 29)
    rows = [("mean NLL of tokens", *(f"to {(i + 1) * STREAM_PART:,}" for i in shown)), ("---",) * (len(shown) + 1)]
    rows += [(f"`{name}`", *(f"{found['mean_nll'][i]:.2f}" for i in shown)) for name, found in stream.items()]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{table}\n\n![Mean NLL along the stream, with sinks and without](stream.svg)"


def _between(page: str, name: str, content: str) -> str:
    begin, end = f"<!-- measured: {name} -->", "<!-- end -->"
    found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert found.search(page), f"docs/policies.md has no {begin}"
    return found.sub(lambda _: f"{begin}\n{content}\n{end}", page, count=1)


def _runner(loaded: LoadedModel, kind: str, capacity_tokens: int) -> Runner:
    machine = hardware.detect()
    return make_runner(
        loaded,
        kind=kind,
        kv_format="f32",
        weights_format=None,
        context_len=capacity_tokens,
        threads=machine.threads,
        free_memory_bytes=machine.free_memory_bytes,
    )


def _reporter(what: str, total: int) -> Callable[[int], None]:
    """Prints every tenth."""
    done = 0

    def report(count: int) -> None:
        nonlocal done
        if (done + count) * 10 // total > done * 10 // total:
            print(f"{what}: {(done + count) / total:.0%}", flush=True)
        done += count

    return report


_PARTS: dict[str, Callable[[Results, str, argparse.Namespace], None]] = {
    "quality": measure_quality,
    "needles": measure_needles,
    "speed": measure_speeds,
    "stream": measure_stream,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*_PARTS, "write"])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--runner", default="native", help="of the quality part: native or torch")
    parser.add_argument("--stream-tokens", type=int, default=STREAM_TOKENS)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "policies.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
