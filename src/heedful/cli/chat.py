"""`heedful chat`: a conversation on the terminal, or line by line through a pipe. Owns the options and puts the parts
together; the loop is chat_loop.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.adapter_option import Adapter, adapter_from_option
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
from heedful.cli.tool_options import DEFAULT_EMBEDDER, Mcp, McpTrust, ToolEmbedder, check_tools
from heedful.errors import BadParameter, HeedfulError, TemplateError
from heedful.weights.source_names import default_model

if TYPE_CHECKING:
    from heedful.cli.chat_loop import ChatLoop
    from heedful.cli.conversation import Conversation
    from heedful.cli.history import History, StoredChat
    from heedful.cli.message_input import MessageReader
    from heedful.cli.terminal import LiveTerminal, Screen
    from heedful.engine.llm import LLM
    from heedful.mcp.catalogue.catalog import CatalogTool
    from heedful.mcp.client.elicit import Answer, Question

MOST_ANSWER_TOKENS = 1024
RECALLED_QUESTIONS = 200


def chat(
    resume_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="With --resume: a number from /history, or last (the default).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help=f"Alias, path, hf:org/name or wheel:…; default: {default_model}."),
    ] = None,
    adapter: Adapter = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help=f"Most tokens of an answer; default: {MOST_ANSWER_TOKENS}, less in a small context."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.5,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens with this total probability.")] = 0.9,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answers.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a conversation; default: the model's.")] = None,
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier chat.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", help="Keep nothing of this chat.")] = False,
    mcp: Mcp = None,
    mcp_trust: McpTrust = False,
    tool_embedder: ToolEmbedder = DEFAULT_EMBEDDER,
    receipts: Annotated[
        bool | None, typer.Option("--receipts/--no-receipts", help="What each answer cost; default: on a terminal.")
    ] = None,
) -> None:
    """Talk with a model: answers as they come, with what they cost. /help, once there, lists the commands.

    Piped input works too: every line is a message, every answer goes to stdout.
    """
    from heedful.cli.message_input import stdin_is_typed
    from heedful.engine.llm import sampling_params

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    sampling_params(**sampling)  # before seconds of loading
    policy = policy_from_options(kv, precise, window, sinks, budget, prefill)
    kept = prefix_cache_from_options(prefix_cache, prefix_cache_size)
    _check_texts(model, system)
    check_tools(mcp, trust=mcp_trust, can_ask=stdin_is_typed())
    wanted = _wanted_chat(resume_id, resume=resume, no_history=no_history)
    screen = _screen()
    history = None if no_history else _open_history(screen, must_serve=wanted is not None)
    try:
        stored = _find_chat(history, wanted) if history is not None and wanted is not None else None
        name = model or (stored.model if stored else default_model)
        how = {"policy": policy, "speculate": speculate, "adapters": adapter_from_option(adapter), **kept}
        llm = _load(name, screen, context_len=context, threads=threads, **how)
        warn_of_loss(llm.name, policy)
        sampling["max_tokens"] = _answer_tokens(max_tokens, llm.context_len)
        conversation = _conversation(llm, sampling, system, adapter, history, screen)
        if stored is not None and history is not None:
            conversation.resume(stored, history.messages(stored.id))
        _talk(conversation, screen, mcp, trust=mcp_trust, embedder=tool_embedder, receipts=receipts)
    finally:
        if history is not None:
            history.close()


def _check_texts(model: str | None, system: str | None) -> None:
    """Arguments that are not text in this locale come with lone surrogates; neither a file nor a model takes those."""
    for option, text in (("--model", model), ("--system", system)):
        if text is not None and any("\ud800" <= character <= "\udfff" for character in text):
            raise BadParameter(option, "is not UTF-8 text")


def _wanted_chat(resume_id: str | None, *, resume: bool, no_history: bool) -> int | str | None:
    """The number of the chat to go on with, "last", or None for a new one."""
    if not resume:
        if resume_id is not None:
            raise BadParameter(
                "ID",
                f"{resume_id!r} comes without --resume",
                'Go on with an earlier chat: heedful chat --resume ID. One answer: heedful generate --chat "…".',
            )
        return None
    if no_history:
        raise BadParameter("--resume", "needs the history, and --no-history turns it off")
    if resume_id in (None, "last"):
        return "last"
    if not (resume_id.isascii() and resume_id.isdigit() and len(resume_id) < 19):
        raise BadParameter("ID", f"{resume_id!r} is neither a number nor last", "/history in a chat lists the numbers.")
    return int(resume_id)


def _screen() -> Screen:
    from heedful.cli.terminal import Screen

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character still gets the rest
    return Screen(sys.stdout, sys.stderr, is_terminal=sys.stdout.isatty(), is_styled=not _is_dumb())


def _is_dumb() -> bool:
    return os.environ.get("TERM", "dumb") == "dumb"


def _open_history(screen: Screen, *, must_serve: bool) -> History | None:
    from heedful.cli.history import History, history_path
    from heedful.errors import HistoryError

    try:
        return History.open(history_path())
    except HistoryError as error:
        if must_serve:
            raise
        _warn(screen, error)
        return None


def _warn(screen: Screen, error: HeedfulError) -> None:
    screen.note(f"This chat will not be kept: {error.message}\n  {error.remedy}")


def _find_chat(history: History, wanted: int | str) -> StoredChat:
    chat_id = history.latest_id() if wanted == "last" else int(wanted)
    found = history.chat(chat_id) if chat_id is not None else None
    if found is None:
        what = "no chat is kept yet" if wanted == "last" else f"there is no chat {wanted}"
        raise BadParameter("--resume", what, "/history in a chat lists those that are kept.")
    return found


def _load(model: str, screen: Screen, **options: Any) -> LLM:
    from heedful.engine.llm import LLM

    if screen.is_terminal:
        screen.note(f"loading {model}")
    return LLM(model, **options)


def _answer_tokens(wanted: int | None, context_len: int) -> int:
    if wanted is None:
        return min(MOST_ANSWER_TOKENS, max(1, context_len // 4))
    if wanted >= context_len:
        raise BadParameter("--max-tokens", f"{wanted:,} leaves no room for messages in a context of {context_len:,}")
    return wanted


def _conversation(
    llm: LLM,
    sampling: dict[str, Any],
    system: str | None,
    adapter: str | None,
    history: History | None,
    screen: Screen,
) -> Conversation:
    """Raises TemplateError for a model that cannot chat, before anybody has typed anything."""
    from heedful.cli.conversation import Conversation

    if llm.tokenizer.chat_template is None:
        raise TemplateError(
            f"{llm.name} has no chat template: it is a base model, which continues text",
            f'Let it continue one: heedful generate -m {llm.name} "Once upon a time". `heedful models` lists others.',
        )
    return Conversation(
        llm, sampling, system=system, adapter=adapter, history=history, warn=lambda error: _warn(screen, error)
    )


def _talk(
    conversation: Conversation, screen: Screen, mcp: Path | None, *, trust: bool, embedder: str, receipts: bool | None
) -> None:
    from heedful.cli.chat_loop import ChatLoop
    from heedful.cli.message_input import stdin_is_typed
    from heedful.cli.tool_options import agree, opened_tools

    interactive = stdin_is_typed()
    reader = _reader(conversation.history, interactive)
    loop: ChatLoop | None = None

    def ask(tool: CatalogTool, arguments: Mapping[str, Any], why: str) -> bool:
        assert loop is not None
        return loop.wants_call(tool, arguments, why)

    def approve(server: str) -> bool:
        assert mcp is not None
        return agree(mcp, server)

    def answer(question: Question) -> Answer:
        assert loop is not None
        return loop.answers(question)

    asking: dict[str, Any] = {"ask": ask, "approve": approve, "answer": answer}
    if not interactive:
        asking = dict.fromkeys(asking)
    with opened_tools(conversation.llm, mcp, trust=trust, embedder=embedder, **asking) as tools:
        live = _live_terminal(interactive)
        loop = ChatLoop(conversation, reader, screen, live, interactive=interactive, tools=tools, receipts=receipts)
        if interactive:
            _greet(conversation, loop, screen)
        loop.run()
    if interactive and conversation.history is not None and conversation.chat_id is not None:
        screen.note(f"Kept: heedful chat --resume {conversation.chat_id} goes on with it.")


def _reader(history: History | None, interactive: bool) -> MessageReader:
    from heedful.cli.message_input import MessageReader, PipedLines, TypedLines, escaped, strict_text

    stdin = strict_text(sys.stdin, is_utf8=not interactive)
    if not interactive:
        return MessageReader(PipedLines(stdin))
    earlier = history.questions(RECALLED_QUESTIONS) if history is not None else []
    return MessageReader(TypedLines(map(escaped, earlier)))


def _live_terminal(interactive: bool) -> LiveTerminal:
    from heedful.cli.terminal import LiveTerminal, StatusLine

    status = None
    if sys.stdout.isatty() and not _is_dumb():
        status = StatusLine(sys.stdout, size=lambda: os.get_terminal_size(sys.stdout.fileno()))
    return LiveTerminal(status, sys.stdin.fileno() if interactive else None)


def _greet(conversation: Conversation, loop: ChatLoop, screen: Screen) -> None:
    llm = conversation.llm
    name = llm.name if conversation.adapter is None else f"{llm.name} with {conversation.adapter}"
    screen.note(f"{name} · context {llm.context_len:,} tokens · /help lists commands, Ctrl-D leaves")
    loop.show_tail()
