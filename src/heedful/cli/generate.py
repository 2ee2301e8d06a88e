"""`heedful generate`: one prompt, one answer; text to stdout, what it cost to stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.adapter_option import Adapter, adapter_from_option
from heedful.cli.generate_tools import answer_with_tools, check_for_answer
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
from heedful.cli.tool_options import DEFAULT_EMBEDDER, Mcp, McpTrust, ToolEmbedder
from heedful.errors import BadParameter
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.cost.explain import Explained
    from heedful.engine.answer import Completion
    from heedful.engine.llm import LLM, TextStream


SHOWN_FROM = 1024  # tokens still to read: about a second of work


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue or answer; - or a pipe reads stdin.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Alias, path, hf:org/name or wheel:…")] = default_model,
    adapter: Adapter = None,
    max_tokens: Annotated[int, typer.Option(help="At most this many output tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens with this total probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: seen tokens become less likely.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities with so many alternatives.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt to the model as one user turn.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before it (implies --chat).")] = None,
    messages: Annotated[
        Path | None, typer.Option(help='A conversation: JSON file with [{"role": …, "content": …}]; - is stdin.')
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt, or its rest, from a file; - is stdin.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a prompt that does not fit; say how much.")] = False,
    context: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer together; default: the model's.")
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
    weights: Annotated[str | None, typer.Option(help="Quantize weights at load: q8 or q4; default: as stored.")] = None,
    runner: Annotated[str, typer.Option(help="native kernels, plain torch, or auto.")] = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object with ids and receipt.")] = False,
    receipt: Annotated[
        bool | None, typer.Option("--receipt/--no-receipt", help="Receipt line on stderr; default: when not piped.")
    ] = None,
    explain_cost: Annotated[
        bool, typer.Option("--explain-cost", help="Afterwards: what each cache policy would have cost here (stderr).")
    ] = False,
    mcp: Mcp = None,
    mcp_trust: McpTrust = False,
    tool_embedder: ToolEmbedder = DEFAULT_EMBEDDER,
) -> None:
    """Continue PROMPT, or answer it with --chat, and show what the answer cost."""
    conversation = _conversation(prompt, file, messages, chat, system)
    question = prompt_text(prompt, file) if conversation is None else conversation
    if logprobs is not None and not json_output:
        raise BadParameter("--logprobs", "is shown in JSON only", "Add --json.")
    check_for_answer(mcp, mcp_trust, conversation, {"--logprobs": logprobs is not None, "--explain-cost": explain_cost})
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "logprobs": logprobs,
    }
    policy = policy_from_options(kv, precise, window, sinks, budget, prefill)
    kept = prefix_cache_from_options(prefix_cache, prefix_cache_size)
    from heedful.engine.llm import LLM, sampling_params

    sampling_params(**sampling)  # before seconds of loading
    llm = LLM(
        model,
        context_len=context,
        threads=threads,
        policy=policy,
        weights=weights,
        runner=runner,
        speculate=speculate,
        adapters=adapter_from_option(adapter),
        **kept,
    )
    warn_of_loss(model, policy)
    shows_receipt = receipt if receipt is not None else sys.stdout.isatty() and not json_output
    if mcp is not None and conversation is not None:
        how = {**sampling, "adapter": adapter}
        answer_with_tools(
            llm, conversation, mcp,
            trust=mcp_trust, embedder=tool_embedder, as_json=json_output, receipt=shows_receipt, how=how,
        )  # fmt: skip
        return
    stream = _ask(llm, question, truncate, {**sampling, "adapter": adapter})
    completion = stream.complete() if json_output else _print_as_it_comes(stream)
    explained = _explain(llm, completion) if explain_cost else None
    if json_output:
        shown = _as_json(completion) | ({} if explained is None else {"explained": [asdict(row) for row in explained]})
        print_json(shown)
    if completion.dropped_tokens:
        print(f"heedful: {completion.dropped_tokens:,} prompt tokens were cut to fit the context", file=sys.stderr)
    if shows_receipt:
        print(completion.receipt.line(), file=sys.stderr)
    if explained is not None and not json_output:
        from heedful.cli.explain_cost import table

        print(table(explained, completion.receipt.prompt_tokens + completion.receipt.output_tokens), file=sys.stderr)


def _explain(llm: LLM, completion: Completion) -> list[Explained]:
    from heedful.cost.explain import explain

    return explain(llm.name, llm.config, llm.engine.runner.facts, completion.receipt)


def _ask(llm: LLM, question: str | list[dict[str, Any]], truncate: bool, how: dict[str, Any]) -> TextStream:
    if isinstance(question, str):
        return llm.stream(question, truncate=truncate, **how)
    return llm.stream_chat(question, truncate=truncate, **how)


def _print_as_it_comes(stream: TextStream) -> Completion:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    try:
        with stream:
            _read_prompt(stream)
            for piece in stream:
                print(piece.text, end="", flush=True)
    finally:
        print()
    return stream.completion


def _read_prompt(stream: TextStream) -> None:
    """A long prompt is computed with its progress on the terminal."""
    shown = False
    while (
        sys.stderr.isatty()
        and (live := stream.live) is not None
        and live.prompt_tokens - live.prompt_tokens_computed > SHOWN_FROM
    ):
        print(f"\rreading {live.prompt_tokens_computed:,} of {live.prompt_tokens:,} tokens", end="", file=sys.stderr)
        shown = True
        stream.step()
    if shown:
        print("\r\033[K", end="", flush=True, file=sys.stderr)


def _as_json(completion: Completion) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": completion.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "receipt": completion.receipt.to_dict(),
    }
    if completion.dropped_tokens:
        shown["dropped_tokens"] = completion.dropped_tokens
    if completion.logprobs is not None:
        shown["logprobs"] = [
            {"token_id": entry.token_id, "logprob": entry.logprob, "top": entry.top} for entry in completion.logprobs
        ]
    return shown


def _conversation(
    prompt: str | None, file: Path | None, messages: Path | None, chat: bool, system: str | None
) -> list[dict[str, Any]] | None:
    """The messages to answer, or None when the prompt is to be continued as it is."""
    if messages is not None:
        if prompt is not None or file is not None or system is not None:
            raise BadParameter("--messages", "holds the whole conversation", "Leave out PROMPT, --file and --system.")
        return _read_messages(messages)
    if not chat and system is None:
        return None
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": prompt_text(prompt, file)}]


def _read_messages(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(_read_text(path, "--messages"))
    except (ValueError, RecursionError) as e:
        raise BadParameter("--messages", f"{path} is not JSON: {e}") from e
    if isinstance(found, dict) and "messages" in found:
        found = found["messages"]
    if not isinstance(found, list) or not found:
        raise BadParameter("--messages", f"{path} holds no list", 'Expected: [{"role": "user", "content": "…"}].')
    return found


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """PROMPT, then the file's text; from stdin when neither is given. One newline at a file's end is not meant."""
    if prompt is None and file is None and sys.stdin.isatty():
        raise BadParameter("PROMPT", "is missing", 'Give a text: heedful generate "Once upon a time", or pipe one in.')
    parts = [] if prompt in (None, "-") else [str(prompt)]
    if file is not None:
        parts.append(_read_text(file, "--file").removesuffix("\n").removesuffix("\r"))
    if prompt == "-" or (prompt is None and file is None):
        parts.append(_read_text(Path("-"), "PROMPT").removesuffix("\n").removesuffix("\r"))
    text = "\n\n".join(parts)
    if not text:
        raise BadParameter("PROMPT", "is empty", "Give at least one character.")
    return text


def _read_text(path: Path, option: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as e:
        raise BadParameter(option, f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadParameter(option, f"{path} is not UTF-8 text (byte {e.start:,})", "Convert it first.") from e
