"""Values of options that need no conversion. From 0.29 on typer takes pydantic for every value, even for a default that
is left as it is, and loading that takes longer than reading a model's vocabulary. All other values stay typer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from typer.core import TyperCommand, TyperGroup

_READERS: dict[type, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    int: (re.compile("[0-9]{1,18}"), int),
    float: (re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?"), float),
}
"""Type → how a text must look so that nobody could read it otherwise, and what reads it."""


class PlainCommand(TyperCommand):
    """A verb whose plain values are taken as they are. Changes nothing under a typer that does without pydantic."""

    def get_params(self, ctx: Any) -> Any:
        return _taking_plain_values(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """The same for options before a verb."""

    def get_params(self, ctx: Any) -> Any:
        return _taking_plain_values(super().get_params(ctx))


def _taking_plain_values(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if hasattr(parameter, "type_descriptor") and not isinstance(parameter.process_value, partial):
            parameter.process_value = partial(_value, parameter, parameter.process_value)
    return parameters


def _value(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """What `convert`, typer's own, makes of a value; without it where that is plain to see."""
    if value is None and not parameter.required:
        left_out = () if parameter.multiple or parameter.nargs == -1 else None
        return left_out if parameter.callback is None else parameter.callback(ctx, parameter, left_out)
    wanted = parameter.type_descriptor.annotation
    if parameter.callback is not None or parameter.type_descriptor.is_ranged or wanted not in (str, *_READERS):
        return convert(ctx, value)
    if type(value) is wanted:
        return value
    if isinstance(value, str):
        pattern, read = _READERS[wanted]
        if pattern.fullmatch(value):
            return read(value)
    return convert(ctx, value)
