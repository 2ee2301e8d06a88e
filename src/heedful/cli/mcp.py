"""`heedful mcp`: the servers of a file, their tools, what was agreed to, one call, one selection. Results to stdout,
what cannot be done to stderr. `heedful mcp serve` is in mcp_serve.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.cli.mcp_serve import serve
from heedful.errors import BadParameter, McpNotApproved, McpUnknownTool

if TYPE_CHECKING:
    from collections.abc import Callable

    from heedful.mcp.calls.call import CallDone
    from heedful.mcp.calls.handles import Handle
    from heedful.mcp.catalogue.catalog import Catalogue, NotOffered
    from heedful.mcp.catalogue.select import SchemaVisits, Selection
    from heedful.mcp.client.blocking import McpThread
    from heedful.mcp.client.elicit import Answer, Ask, Question
    from heedful.mcp.settings.approvals import Approvals
    from heedful.mcp.settings.config import McpConfig, ServerConfig
    from heedful.weights.load import LoadedModel

app = typer.Typer(help="Tools of MCP servers: list, approve, call, choose the few that a request needs; serve our own.")
app.command("serve")(serve)

Config = Annotated[Path, typer.Option("--config", "-c", help="JSON file with mcpServers.")]
Trust = Annotated[bool, typer.Option("--trust", help="Start what the file names without approval, in this run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_DEFAULT = Path("servers.json")


@app.command("list")
def list_servers(
    config: Config = _DEFAULT,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Start the approved servers and show how each is: its state, its number of tools, its command as written."""
    found, approvals = _read(config)
    with _manager(found, approvals, trust) as manager:
        catalogue = manager.catalogue()
        rows = [_server_row(server, manager, catalogue, approvals) for server in found.servers.values()]
        said = {name: manager.manager.stderr(name) for name in found.servers}
    if as_json:
        print(json.dumps({"servers": [{**row, "stderr": said[row["name"]]} for row in rows]}))
        return
    if any(row["state"] == "not approved" for row in rows):
        print(f"Look at them and agree: heedful mcp approve --config {config}", file=sys.stderr)
    for row in rows:
        print(f"{_line(row['name'])}: {row['state']}, {row['tools']} tools, {_line(row['command'])}")
        if row["problem"] and row["state"] != "not approved":
            print(f"  {_line(row['problem'])}")


@app.command("tools")
def list_tools(
    config: Config = _DEFAULT,
    trust: Trust = False,
    as_json: AsJson = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Count tokens as this model does; default: no counts.")
    ] = None,
) -> None:
    """Show the tools as a model would see them, and those that are kept from it with the reason."""
    found, approvals = _read(config)
    with _manager(found, approvals, trust) as manager:
        catalogue = manager.catalogue()
    counts = None
    if model is not None:
        from heedful.weights.load import load

        counts = catalogue.token_counts(_counter(load(model)))
    if as_json:
        print(json.dumps(_catalogue_json(catalogue, counts)))
        return
    for tool in catalogue.tools:
        print(_line(tool.signature))
    if counts:
        print(f"{len(catalogue)} tools: " + ", ".join(f"{count:,} tokens as {form}" for form, count in counts.items()))
    for each in catalogue.not_offered:
        print(f"not offered: {_line(each.server)}/{_line(each.name)}: {_line(each.reason)}", file=sys.stderr)
    _print_unavailable(catalogue)


@app.command("approve")
def approve(
    servers: Annotated[list[str] | None, typer.Argument(metavar="[SERVER]...", help="Of the file; none: all.")] = None,
    config: Config = _DEFAULT,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Agree to everything without a question.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Take the agreement back instead.")] = False,
) -> None:
    """Show each server's command, start it when you agree, show its tools, and remember both when you agree to them."""
    found, approvals = _read(config)
    chosen = _chosen(found, servers or [])
    if forget:
        for server in chosen:
            print(f"{server.name}: {'forgotten' if approvals.forget(server) else 'was not approved'}")
        return
    for server in chosen:
        _approve_one(server, found, approvals, yes)


@app.command("call")
def call(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="As the file names it.")],
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="As the server or `heedful mcp tools` names it.")],
    arguments: Annotated[str, typer.Argument(metavar="ARGUMENTS", help="A JSON object; - reads it from stdin.")] = "{}",
    config: Config = _DEFAULT,
    trust: Trust = False,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Longest seconds; default: the file's.")] = None,
    as_json: AsJson = False,
    full: Annotated[bool, typer.Option("--full", help="All of a long result on a terminal too.")] = False,
    path: Annotated[str | None, typer.Option("--path", help="Only this of a JSON result: .rows[0:3].name")] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines with this text; * anything, | or.")] = None,
    lines: Annotated[str | None, typer.Option("--lines", help="Only these lines, from 0: 0:20, -5:")] = None,
) -> None:
    """Call one tool once and print its result; on a terminal a long one in short. The arguments must be what the tool's
    schema says. The exit status is 1 when the tool says that it has failed."""
    if sum(each is not None for each in (path, grep, lines)) > 1:
        raise BadParameter("--path", "stands alone: give one of --path, --grep and --lines")
    span = None if lines is None else _span(lines)
    found, approvals = _read(config)
    from heedful.cli.message_input import stdin_is_typed
    from heedful.cli.tool_options import asking
    from heedful.mcp.calls.call import ToolCaller
    from heedful.mcp.calls.handles import HandleStore
    from heedful.mcp.calls.results import Shower
    from heedful.mcp.client.desk import Desk

    given = _arguments(sys.stdin.read() if arguments == "-" else arguments)
    only = type(found)({each.name: each for each in _chosen(found, [server])}, found.source)
    desk = Desk()
    can_ask = stdin_is_typed() and arguments != "-"
    with _manager(only, approvals, trust, ask=asking(desk, _answer) if can_ask else None) as manager:
        catalogue = manager.catalogue()
        for problem in manager.manager.problems().values():
            raise problem
        wanted = catalogue.find(server, tool) or manager.manager.offered(catalogue, tool)
        store = HandleStore()
        caller = ToolCaller(manager.manager, Shower(store), approve=lambda *_: True)  # a person has typed it
        done = desk.wait(manager.submit(caller.call(wanted, given, on_progress=_print_progress, timeout_s=timeout)))
    if done.error is not None:
        raise done.error
    assert done.output is not None, done
    for repair in done.record.repairs:
        print(f"heedful: {_line(repair)}", file=sys.stderr)
    if path is not None or grep is not None or span is not None:
        _print_part(store.keep(done.output.value, source=done.record.tool), path, grep, span)
    elif as_json:
        sdk_result = done.result.model_dump(by_alias=True, mode="json", exclude_none=True) if done.result else {}
        print(json.dumps({**sdk_result, "record": asdict(done.record)}))
    elif sys.stdout.isatty() and not full and done.shown is not None and not done.shown.is_whole:
        print(done.shown.text)
        print("All of it: --full, or a part: --path, --grep, --lines", file=sys.stderr)
    else:
        _print_blocks(done)
    if done.output.is_error:
        raise typer.Exit(1)


@app.command("select")
def select(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="What a user asks.")],
    config: Config = _DEFAULT,
    trust: Trust = False,
    k: Annotated[int, typer.Option("--k", help="Most tools.")] = 5,
    budget: Annotated[int, typer.Option("--budget", help="Most tokens of tools before the model.")] = 600,
    model: Annotated[str, typer.Option("--model", "-m", help="Whose tokens and visits are counted.")] = "smollm2",
    embedder: Annotated[
        str, typer.Option("--embedder", help="Encoder beside the words; none: words alone, at once.")
    ] = "minilm",
    as_json: AsJson = False,
) -> None:
    """Show which few tools a request would put before the model, and what all of them would have cost."""
    if k < 1:
        raise BadParameter("--k", f"must be at least 1, not {k}")
    found, approvals = _read(config)
    from heedful.cost.formulas import Shape
    from heedful.engine.embedder import load_embedder
    from heedful.mcp.catalogue.select import ToolSelector
    from heedful.weights.load import load

    loaded = load(model)
    count, shape = _counter(loaded), Shape.from_config(loaded.config)
    with _manager(found, approvals, trust) as manager:
        catalogue = manager.catalogue()
    vectors = None if embedder == "none" else load_embedder(embedder)
    selector = ToolSelector(catalogue, count, embedder=vectors, k=k, token_budget=budget)
    selection = selector.select(request)
    visits = selection.visits(shape, count(request))
    if as_json:
        print(json.dumps({**selection.to_dict(), "visits": asdict(visits)}))
        return
    for each in selection.chosen:
        print(f"{each.score:.2f} {each.cause}, {each.form}, {each.tokens} tokens: {_line(each.tool.signature)}")
    print(_selection_line(selection, visits), file=sys.stderr)
    _print_unavailable(catalogue)


def _read(path: Path) -> tuple[McpConfig, Approvals]:
    from heedful.mcp.settings.approvals import Approvals
    from heedful.mcp.settings.config import read_config

    return read_config(path), Approvals.open()


def _manager(config: McpConfig, approvals: Approvals, trust: bool, ask: Ask | None = None) -> McpThread:
    from heedful.mcp.client.blocking import McpThread

    return McpThread(config, approvals, trust=trust, ask=ask)


def _answer(question: Question) -> Answer:
    """A server's own question, to who has typed the call."""
    from heedful.cli.form_answer import answer_of

    return answer_of(question, _read_line, lambda line: print(line, file=sys.stderr))


def _read_line(prompt: str) -> str:
    try:
        return input(prompt)
    except EOFError:
        return ""


def _chosen(config: McpConfig, names: list[str]) -> list[ServerConfig]:
    for name in names:
        if name not in config.servers:
            there = ", ".join(config.servers) or "none"
            raise McpUnknownTool(f"{config.source} names no server {name!r:.80}", f"There are: {there}.")
    return [server for server in config.servers.values() if not names or server.name in names]


def _server_row(server: ServerConfig, manager: McpThread, catalogue: Catalogue, approvals: Approvals) -> dict[str, Any]:
    status = next(each for each in manager.status() if each.name == server.name)
    approved = approvals.is_approved(server)
    return {
        "name": server.name,
        "command": server.launch.shown,
        "approved": approved,
        "state": status.state if status.starts else "stopped" if approved else "not approved",
        "protocol": status.protocol,
        "tools": sum(tool.server == server.name for tool in catalogue.tools),
        "not_offered": sum(each.server == server.name for each in catalogue.not_offered),
        "problem": catalogue.unavailable.get(server.name, ""),
    }


def _approve_one(server: ServerConfig, config: McpConfig, approvals: Approvals, yes: bool) -> None:
    print(f"{_line(server.name)}: {_line(server.launch.shown)}")
    env = getattr(server.launch, "env", {}) or getattr(server.launch, "headers", {})
    if env:
        print(f"  gets: {_line(', '.join(env))}")
    if not _agreed("Start it?", yes):
        return
    only = type(config)({server.name: server}, config.source)
    with _manager(only, approvals, trust=True) as manager:
        catalogue = manager.catalogue()
        for problem in manager.manager.problems().values():
            raise problem
        tools = manager.manager.pins(server.name)
    before = approvals.pins(server) or {}
    flagged = {each.name: each for each in catalogue.not_offered}
    for name, pin in tools.items():
        known = before.get(name)
        mark = "" if known == pin else "new: " if known is None else "changed: "
        print(f"  {mark}{_line(name)}: {_line(pin.description)}")
        if known is not None and known.fingerprint != pin.fingerprint and known.description != pin.description:
            print(f"    was: {_line(known.description)}")
        if name in flagged:
            print(f"    take care: {_line(flagged[name].reason)}")
    _print_bad(catalogue.not_offered)
    if _agreed(f"Let models use {_tools(len(tools))}?", yes):
        approvals.approve(server, tools)
        print(f"{_line(server.name)}: approved")


def _print_bad(not_offered: tuple[NotOffered, ...]) -> None:
    for each in not_offered:
        if each.pin is None:
            print(f"  cannot be offered: {_line(each.name)}: {_line(each.reason)}")


def _tools(count: int) -> str:
    return "this tool" if count == 1 else f"these {count} tools"


def _agreed(question: str, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise McpNotApproved("nobody is there to ask", "Agree without a question: heedful mcp approve --yes")
    return typer.confirm(f"  {question}", default=False)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadParameter(
            "ARGUMENTS", f"is not JSON: {str(error)[:100]}", """Like this: '{"name": "value"}'"""
        ) from None
    if not isinstance(value, dict):
        raise BadParameter("ARGUMENTS", "must be a JSON object", """Like this: '{"name": "value"}'""")
    return value


def _span(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    try:
        start, stop = (int(each) if each.strip() else None for each in (first, last))
    except ValueError:
        raise BadParameter("--lines", f"{text!r:.40} is no range", "Like this: 0:20, 100:, -5:") from None
    return (start, stop) if colon or start is None else (start, start + 1 or None)


def _print_part(handle: Handle, path: str | None, grep: str | None, span: tuple[int | None, int | None] | None) -> None:
    if path is not None:
        found = handle.path(path)
        print(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
    elif grep is not None:
        matches = handle.grep(grep)
        for match in matches.first:
            print(f"{match.line}: {_line(match.excerpt)}")
        print(f"{matches.total:,} lines, {len(matches.first):,} shown", file=sys.stderr)
    elif span is not None:
        print(handle.lines(*span))


def _print_blocks(done: CallDone) -> None:
    """All of a result, as its server sent it; on a terminal without what would move the cursor."""
    from heedful.mcp.catalogue.lint import visible

    assert done.result is not None, done
    for block in done.result.content:
        print(visible(_block(block)) if sys.stdout.isatty() else _block(block))
    if not done.result.content and done.result.structured_content is not None:
        print(json.dumps(done.result.structured_content, ensure_ascii=False))


def _print_progress(done: float, total: float | None, message: str | None) -> None:
    if sys.stderr.isatty():
        of = f" of {total:g}" if total else ""
        print(f"  {done:g}{of} {_line(message or '')}", file=sys.stderr)


def _block(block: Any) -> str:
    """A text as it is; of other kinds what they are."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[resource {_line(str(block.uri))}]"
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {_line(str(block.resource.uri))}]"))
    return f"[{block.type}, {_line(block.mime_type)}, {len(block.data):,} characters of base64]"


def _counter(loaded: LoadedModel) -> Callable[[str], int]:
    return lambda text: len(loaded.tokenizer.encode(text, add_bos=False))


def _selection_line(selection: Selection, visits: SchemaVisits) -> str:
    tools = "no tool fits" if selection.abstained else f"{len(selection.chosen)} of {selection.all_tools} tools"
    return (
        f"{tools} · {selection.schema_tokens:,} schema tokens of {selection.all_schema_tokens:,} · "
        f"{visits.chosen:,} visits of {visits.all_tools:,} · "
        f"need {selection.need:.2f}, threshold {selection.threshold:.2f}"
        + (f" · encoder {visits.selection:,} visits" if visits.selection else "")
    )


def _catalogue_json(catalogue: Catalogue, counts: Any) -> dict[str, Any]:
    return {
        "tools": [
            {
                **tool.as_json("full")["function"],
                "server": tool.server,
                "server_name": tool.name,
                "signature": tool.signature,
                "hints": asdict(tool.hints),
                "fingerprint": tool.fingerprint,
            }
            for tool in catalogue.tools
        ],
        "not_offered": [
            {"server": each.server, "name": each.name, "cause": each.cause, "reason": each.reason}
            for each in catalogue.not_offered
        ],
        "unavailable": catalogue.unavailable,
        "tokens": counts,
    }


def _print_unavailable(catalogue: Catalogue) -> None:
    for why in catalogue.unavailable.values():
        print(f"heedful: {_line(why)}", file=sys.stderr)


def _line(text: str) -> str:
    """Without what would move a cursor."""
    return "".join(c if c.isprintable() else " " for c in text)
