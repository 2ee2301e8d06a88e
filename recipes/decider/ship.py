"""Puts the trained model into the package, with a card made of the measured numbers:
python -m recipes.decider.ship FOLDER RESULTS.json. Nothing in the card is typed by hand but its prose.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from recipes.decider.data import BUILD
from recipes.decider.fetch import EXCLUDED, PACKAGES
from recipes.decider.rows import HELD_OUT, TEST, TRAIN

from heedful.decide.load import BUILT_IN_FOLDER

MOST_BYTES = 12_000_000
PACKAGE_FOLDER = Path("src/heedful/decide") / BUILT_IN_FOLDER.name
SHIPPED = ("model.safetensors", "rl_agent_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    asked = parser.parse_args()
    results = json.loads(asked.results.read_text())
    counts = json.loads((BUILD / "data.json").read_text())
    PACKAGE_FOLDER.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(asked.folder / name, PACKAGE_FOLDER / name)
    (PACKAGE_FOLDER / "MODEL_CARD.md").write_text(card(results, counts), encoding="utf-8")
    size = sum(path.stat().st_size for path in PACKAGE_FOLDER.iterdir())
    if size > MOST_BYTES:
        raise SystemExit(f"{PACKAGE_FOLDER} has {size:,} bytes; {MOST_BYTES:,} may be shipped")
    print(f"{PACKAGE_FOLDER}: {size:,} bytes")


def card(results: dict[str, Any], counts: dict[str, dict[str, int]]) -> str:
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    test, held_out, training = results[TEST], results[HELD_OUT], results["training"]
    return template.format(
        targets=targets(results),
        test=table(test, counts[TRAIN]),
        held_out=table(held_out, None),
        test_accuracy=f"{test['all']['accuracy']:.3f}",
        test_ece=f"{test['all']['ece']:.3f}",
        test_interval=shown(test["all"]["interval"]),
        held_out_likelihood=likelihood(held_out),
        test_likelihood=likelihood(test),
        reordering=reordering(results["reordering"]),
        packages="\n".join(f"| {p.requirement} | {p.licence} | {p.use} |" for p in PACKAGES.values()),
        excluded="\n".join(f"- {name}: {why}." for name, why in EXCLUDED.items()),
        losses=losses(results["losses"]),
        taught=taught(counts),
        rows=f"{sum(counts[TRAIN].values()):,}",
        read=f"{training['steps'] * training['batch']:,}",
        steps=f"{training['steps']:,}",
        batch=training["batch"],
        loss={"ce": "soft cross-entropy", "rlcd": "RLCD"}[training["loss"]],
        minutes=f"{training['seconds'] / 60:.0f}",
    )


def targets(results: dict[str, Any]) -> str:
    """What was wanted of it, and whether it is so."""
    everything, order = results[TEST]["all"], results["reordering"]
    flipped = order["flips"] / order["asked"]
    wanted = [
        ("accuracy on held-out rows at least .90", f"{everything['accuracy']:.3f}", everything["accuracy"] >= 0.9),
        ("ECE there at most .05", f"{everything['ece']:.3f}", everything["ece"] <= 0.05),
        ("answers that change with the order of options at most 2 %", f"{flipped:.1%}", flipped <= 0.02),
    ]
    for name, found in results[HELD_OUT]["domains"].items():
        ends = [found[f"above_{baseline}"] for baseline in ("majority", "embedding")]
        said = f"{shown(ends[0], sign=True)} and {shown(ends[1], sign=True)}"
        wanted.append((f"{name}: above the majority and above embeddings", said, all(low > 0 for low, _ in ends)))
    lines = [f"| {what} | {measured} | {'yes' if met else '**no**'} |" for what, measured, met in wanted]
    return "\n".join(["| wanted | measured | met |", f"|{' --- |' * 3}", *lines])


def taught(counts: dict[str, dict[str, int]]) -> str:
    """Domains that no row is judged of."""
    return ", ".join(
        f"{name} ({rows:,} rows)" for name, rows in counts[TRAIN].items() if rows and not counts[TEST][name]
    )


def table(part: dict[str, Any], trained: dict[str, int] | None) -> str:
    """A line a domain: the model, and how far it is above each baseline."""
    head = ["domain", *([] if trained is None else ["trained on"]), "rows", "accuracy", "95 %", "ECE", "majority"]
    head += ["above it, 95 %", "embedding", "above it, 95 %"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for name, found in [*part["domains"].items(), ("**all**", part["all"])]:
        cells = [name, *([] if trained is None else [f"{trained.get(name, sum(trained.values())):,}"])]
        cells += [str(found["rows"]), f"{found['accuracy']:.3f}", shown(found["interval"]), f"{found['ece']:.3f}"]
        cells += [f"{found['majority']:.3f}", shown(found["above_majority"], sign=True)]
        cells += [f"{found['embedding']:.3f}", shown(found["above_embedding"], sign=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(interval: list[float], *, sign: bool = False) -> str:
    return " to ".join(f"{end:+.2f}" if sign else f"{end:.2f}" for end in interval)


def likelihood(part: dict[str, Any]) -> str:
    found = part["likelihood"]
    by = "; ".join(
        f"{domain} {ours:.2f} against {theirs:.2f}"
        for domain, (ours, theirs) in found["ours_and_smollm2_by_domain"].items()
    )
    return (
        f"{found['rows']} questions: this model {found['ours']:.3f}, smollm2 {found['smollm2']:.3f}; "
        f"difference {shown(found['above'], sign=True)} (95 %). By domain: {by}."
    )


def reordering(found: dict[str, Any]) -> str:
    share = found["flips"] / found["asked"]
    return (
        f"{found['flips']} of {found['asked']} answers changed ({share:.1%}) when {found['questions']} choices were "
        f"asked again in other orders; the largest change of a logit was {found['largest_logit_change']:.1e}."
    )


def losses(found: dict[str, Any]) -> str:
    """The comparison of the two losses, where it was run."""
    if not found:
        return "The two losses were not compared for this model."
    lines = ["| loss | steps | held-out rows | accuracy | 95 % | NLL | ECE |", f"|{' --- |' * 7}"]
    for one in found.values():
        lines.append(
            f"| {one['training']['loss']} | {one['training']['steps']} | {one['rows']} | {one['accuracy']:.3f} "
            f"| {shown(one['interval'])} | {one['nll']:.3f} | {one['ece']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
