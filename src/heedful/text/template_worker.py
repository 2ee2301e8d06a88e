"""The program that renders one chat template, in a process of its own (see template_process.py, which starts it).

On stdin comes one line of JSON with the template and its limits, then a line for every rendering: its variables and the
stand-ins for control tokens (see provenance.py); on stdout goes a line for each: {"text"} or {"error", "kind"}.

A template is a stranger's program. Jinja's sandbox keeps it from Python's objects; the system keeps it from time and
memory: inside one call into C (a power, a comparison of nested lists, a format width) nothing in the process could.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from heedful.text.provenance import ControlTexts

# What a template can raise besides jinja2.TemplateError, being a program.
TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, AssertionError)

# Methods and filters whose arguments are looked for in a text and never become part of it.
SEARCHES = frozenset({
    "count", "endswith", "find", "groupby", "index", "lstrip", "map", "partition", "reject", "rejectattr",
    "removeprefix", "removesuffix", "replace", "rfind", "rpartition", "rsplit", "rstrip", "select", "selectattr",
    "split", "startswith", "strip", "trim",
})  # fmt: skip
MAX_ERROR_CHARS = 2000


class Refusal(jinja2.TemplateError):
    """The template called raise_exception: its own words about the messages."""


class OutputTooLongError(Exception):
    pass


class GenerationBlock(Extension):
    """{% generation %} marks, for training, what the assistant wrote; here its body is rendered as if unmarked."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on, i.e. without escapes for HTML, which jinja2's own filter makes.

    `ensure_ascii` is accepted and not obeyed: escapes would hide which characters are stand-ins.
    """
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: object) -> None:
    raise Refusal(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def compile_template(source: str, mark: Callable[[str], str]) -> jinja2.Template:
    """White space as transformers sets it, which templates are written for. `mark` is applied to the constants."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    tree = environment.parse(source)
    mark_constants(tree, mark)
    return environment.from_string(tree)


def mark_constants(node: nodes.Node, mark: Callable[[str], str]) -> None:
    """Marks every constant that can reach the output; those that text is only compared with or searched for stay."""
    if isinstance(node, nodes.TemplateData):
        node.data = mark(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str):
        node.value = mark(node.value)
    elif not isinstance(node, nodes.Compare | nodes.Test):
        for child in node.iter_child_nodes(exclude=fields_to_search_with(node)):
            mark_constants(child, mark)


def fields_to_search_with(node: nodes.Node) -> tuple[str, ...]:
    if isinstance(node, nodes.Getitem):
        return ("arg",)
    if isinstance(node, nodes.Pair):
        return ("key",)
    name = node.node.attr if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) else None
    name = node.name if isinstance(node, nodes.Filter) else name
    return ("args", "kwargs") if name in SEARCHES else ()


def rendered(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces: list[str] = []
    char_count = 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        char_count += len(piece)
        if char_count > max_chars:
            raise OutputTooLongError
    return "".join(pieces)


def answer(render: Callable[[], str]) -> dict[str, str]:
    try:
        return {"text": render()}
    except Refusal as error:
        return {"kind": "refused", "error": brief(str(error))}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"{brief(error.message)} (line {error.lineno})"}
    except OutputTooLongError:
        return {"kind": "length", "error": ""}
    except MemoryError:
        return {"kind": "memory", "error": ""}
    except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
        return {"kind": "fault", "error": f"{type(error).__name__}: {brief(str(error))}"}


def brief(message: str | None) -> str:
    return (message or "")[:MAX_ERROR_CHARS]


def limit_process(memory_bytes: int) -> None:
    """A ceiling on memory, where the system has one; and SIGPROF kills, whatever the parent did with it."""
    if sys.platform == "linux":
        _, ceiling = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory_bytes if ceiling == resource.RLIM_INFINITY else min(memory_bytes, ceiling)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    limit_process(job["memory_bytes"])
    control = ControlTexts(job["control_texts"])

    @lru_cache(maxsize=1)  # stand-ins are the same for nearly all requests
    def template(stand_ins: str) -> jinja2.Template:
        return compile_template(job["source"], partial(control.marked, stand_ins=json.loads(stand_ins)))

    def render(line: bytes) -> str:
        request = json.loads(line)
        return rendered(template(json.dumps(request["stand_ins"])), request["variables"], job["max_chars"])

    for line in sys.stdin.buffer:
        # Processor time, so that a busy machine does not fail an honest template. Compiling counts: it folds constants.
        signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
        reply = json.dumps(answer(partial(render, line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply + b"\n")
        sys.stdout.buffer.flush()
