"""The tree keeps its shape: imports go downward by rank, torch stays behind its line, public names are listed once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

PACKAGE = Path(heedful.__file__).parent
MODULES = {
    ".".join(("heedful", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

RANKS = {
    **dict.fromkeys(["errors", "request", "hardware", "listening"], 0),
    **dict.fromkeys(["kernels", "text"], 1),
    **dict.fromkeys(["models", "cache", "sampling"], 2),
    **dict.fromkeys(["weights", "cost"], 3),
    "engine": 4,
    **dict.fromkeys(["testing", "decide", "view"], 5),
    **dict.fromkeys(["train", "mcp", "router"], 6),
    "server": 7,
    "plan": 7,
    "deploy": 8,
    "cli": 9,
    "__main__": 10,
}

MCP_RANKS = {
    "schemas": 0,
    **dict.fromkeys(["settings", "server"], 1),
    "catalogue": 2,
    "client": 3,
    "calls": 4,
    "delegation": 5,
    "chat": 6,
}
"""Of the folders inside of heedful.mcp."""

BEHIND_THE_TORCH_LINE = {
    "heedful.kernels.reference",
    "heedful.kernels.attention",
    "heedful.kernels.delta_rule",
    "heedful.kernels.text_attention",
    "heedful.kernels.option_attention",
    "heedful.models.bert",
    "heedful.models.carried",
    "heedful.models.deberta",
    "heedful.models.gliclass",
    "heedful.models.heads",
    "heedful.models.laya",
    "heedful.models.modernbert",
    "heedful.models.qwen3_5",
    "heedful.models.layers",
    "heedful.models.decoder",
    "heedful.engine.torch_adapters",
    "heedful.engine.torch_classify",
    "heedful.engine.torch_embed",
    "heedful.engine.torch_gliclass",
    "heedful.engine.torch_laya",
    "heedful.engine.torch_branches",
    "heedful.engine.torch_kev",
    "heedful.engine.torch_packed",
    "heedful.engine.torch_runner",
    "heedful.engine.torch_states",
    "heedful.models.kev_head",
    "heedful.train.choices",
    "heedful.train.decision_loss",
    "heedful.train.decision_trainer",
    "heedful.train.fast",
    "heedful.train.layout",
    "heedful.train.learner",
    "heedful.train.loss",
    "heedful.train.low_rank",
    "heedful.train.mixed",
    "heedful.train.network",
    "heedful.train.optim",
    "heedful.train.parallel",
    "heedful.train.peak",
    "heedful.train.preference_loss",
    "heedful.train.preference_trainer",
    "heedful.train.spread",
    "heedful.train.team",
    "heedful.train.trained_decider",
    "heedful.train.trainer",
    "heedful.view.analysis",
}

BEHIND_THE_RAY_LINE = {"heedful.deploy.app", "heedful.deploy.request_router"}
"""They import it at their top: Ray Serve looks for them by name, and they are of no use without it."""


def part_of(module: str) -> str:
    return "__main__" if module.endswith(".__main__") else module.split(".")[1]


def mcp_rank_of(module: str) -> int | None:
    """None: not in one of mcp's folders."""
    match module.split("."):
        case ["heedful", "mcp", folder, *_]:
            return MCP_RANKS[folder]
    return None


def imported_modules(path: Path) -> set[str]:
    """Modules of heedful that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(str(node.module))
    return {name for name in found if name.startswith("heedful.") and name in MODULES}


def test_every_part_has_a_rank() -> None:
    assert {part_of(name) for name in MODULES if name != "heedful"} == set(RANKS)
    assert {name.split(".")[2] for name in MODULES if name.startswith("heedful.mcp.")} == set(MCP_RANKS)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "heedful"])
def test_imports_go_downward(module: str) -> None:
    for other in imported_modules(MODULES[module]):
        lower = RANKS[part_of(other)] < RANKS[part_of(module)]
        own_folder = MODULES[other].parent == MODULES[module].parent
        inner, other_inner = mcp_rank_of(module), mcp_rank_of(other)
        lower_in_mcp = inner is not None and other_inner is not None and other_inner < inner
        assert lower or own_folder or lower_in_mcp, f"{module} imports {other}"


def test_torch_stays_behind_its_line() -> None:
    """Imports everything outside of the line in one fresh interpreter and looks."""
    outside = sorted(set(MODULES) - BEHIND_THE_TORCH_LINE - BEHIND_THE_RAY_LINE - {"heedful.__main__"})
    program = (
        "import importlib, sys\n"
        f"for name in {outside!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_torch_line_is_drawn_where_torch_is() -> None:
    users = {name for name, path in MODULES.items() if "torch" in {n.split(".")[0] for n in _top_imports(path)}}
    assert users == BEHIND_THE_TORCH_LINE


def test_ray_stays_behind_its_line() -> None:
    users = {name for name, path in MODULES.items() if "ray" in {n.split(".")[0] for n in _module_imports(path)}}
    assert users == BEHIND_THE_RAY_LINE


def _module_imports(path: Path) -> set[str]:
    """At the file's top level, not inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)}


def _top_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


def test_version_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys\n"
        "from heedful.cli.main import run\n"
        "assert run(['--version']) == 0\n"
        "assert not {'torch', 'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"heedful {heedful.__version__}\n"), done.stderr


def test_public_names() -> None:
    assert heedful.__all__ == [
        "LLM",
        "CachePolicy",
        "Completion",
        "Decider",
        "Finish",
        "HeedfulError",
        "Ledger",
        "Logprob",
        "Piece",
        "Receipt",
        "SamplingParams",
        "TextStream",
    ]
    for name in heedful.__all__:
        assert getattr(heedful, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = heedful.nothing_like_it
