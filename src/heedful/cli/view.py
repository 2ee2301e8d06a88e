"""`heedful view`: a prompt, its answer, and one file that shows where the token visits went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.generate import prompt_text
from heedful.cli.json_rows import print_json
from heedful.cli.policy_options import (
    Budget,
    Kv,
    Precise,
    Prefill,
    Sinks,
    Speculate,
    Window,
    policy_from_options,
    warn_of_loss,
)
from heedful.cli.prefix_options import PrefixCache, PrefixCacheSize, prefix_cache_from_options
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.engine.llm import LLM
    from heedful.request import CachePolicy

PAGE = Path("view.html")


def view(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue or answer; - or a pipe reads stdin.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…")] = default_model,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The page; default: view.html.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print what the page holds as one JSON object.")] = False,
    term: Annotated[bool, typer.Option("--term", help="A compact form for the terminal.")] = False,
    max_tokens: Annotated[int, typer.Option(help="At most this many output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt to the model as one user turn.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it (implies --chat).")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt, or its rest, from a file; - is stdin.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all.")] = None,
    kv: Kv = None,
    precise: Precise = None,
    window: Window = None,
    sinks: Sinks = 0,
    budget: Budget = None,
    prefill: Prefill = "dense",
    speculate: Speculate = False,
    prefix_cache: PrefixCache = None,
    prefix_cache_size: PrefixCacheSize = "2GB",
    runner: Annotated[str, typer.Option(help="native kernels, plain torch, or auto.")] = "auto",
) -> None:
    """Answer PROMPT, and write one offline page that shows what attention read, where its weight lay, and what less
    would have done."""
    if json_output and term:
        raise BadParameter("--json", "and --term both want stdout", "Leave one out.")
    text = prompt_text(prompt, file)
    policy = policy_from_options(kv, precise, window, sinks, budget, prefill)
    kept = prefix_cache_from_options(prefix_cache, prefix_cache_size)
    page = output or (None if json_output or term else PAGE)
    if page is not None:
        _check_writable(page)
    from heedful.view.network import require_torch

    require_torch()
    from heedful.engine.llm import LLM, sampling_params

    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling_params(**sampling)  # before seconds of loading
    llm = LLM(model, threads=threads, policy=policy, runner=runner, speculate=speculate, **kept)
    warn_of_loss(model, policy)
    messages = [] if system is None else [{"role": "system", "content": system}]
    asked = [*messages, {"role": "user", "content": text}] if chat or system is not None else text
    made = _view(llm, asked, policy, sampling)
    if page is not None:
        _write(page, made)
    if json_output:
        print_json(made)
    elif term:
        from heedful.view.term import view_text

        _print_plain(view_text(made))
    else:
        print(page)


def _view(llm: LLM, asked: str | list[dict[str, str]], policy: CachePolicy, sampling: dict[str, Any]) -> dict[str, Any]:
    from heedful.view.network import load_network
    from heedful.view.record import check_length, make_view, recorded_run
    from heedful.view.steps import RecordingRunner

    ids = llm.tokenizer.encode(asked) if isinstance(asked, str) else llm.encode_chat(asked)
    check_length(min(len(ids) + sampling["max_tokens"], llm.engine.longest(policy)), llm.config)
    recorder = RecordingRunner(llm.engine.runner)
    llm.engine.runner = recorder
    completion = llm.generate(asked, **sampling) if isinstance(asked, str) else llm.chat(asked, **sampling)
    llm.close()
    run = recorded_run(completion, policy, recorder.steps)
    progress = _Progress(len(run.token_ids))
    network = load_network(llm.name)
    try:
        return make_view(run, llm.name, llm.config, recorder.cache, llm.tokenizer, network, progress)
    finally:
        progress.clear()


def _print_plain(text: str) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    print(text)


class _Progress:
    """A line on the terminal while attention is rebuilt."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._is_shown = sys.stderr.isatty()

    def __call__(self, tokens: int) -> None:
        self._done += tokens
        if self._is_shown:
            line = f"\rlooking at {self._done:,} of {self._total:,} tokens"
            print(line, end="", flush=True, file=sys.stderr)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\033[K", end="", flush=True, file=sys.stderr)


def _check_writable(page: Path) -> None:
    if page.is_dir():
        raise BadParameter("--output", f"{page} is a folder", f"Name a file: {page / PAGE}")
    if not page.parent.is_dir():
        raise BadParameter("--output", f"{page.parent} does not exist", "Make the folder first.")


def _write(page: Path, made: dict[str, Any]) -> None:
    from heedful.view.html import view_page
    from heedful.weights.written_aside import file_aside

    try:
        with file_aside(page) as aside:
            aside.write_text(view_page(made), encoding="utf-8")
    except OSError as error:
        raise BadParameter("--output", f"{page} cannot be written: {error.strerror}") from error
    print(made["receipt_line"], file=sys.stderr)
