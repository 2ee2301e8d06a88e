"""A policy file's text as a tree whose every value knows where it stands: errors name the line and the key.

root = read_tree(Path("policy.yaml"))
targets = root.section("targets")
for name in targets.keys: targets.section(name).text("kind", …)
root.done()        # refuses keys that nobody has asked for, with the nearest that is known
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from heedful.errors import PolicyError

MOST_BYTES = 256 << 10
MOST_VALUES = 20_000
Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Tree:
    file: str
    value: Any
    lines: Mapping[Path_, int]
    """Path of a value → its line, from 1; empty where the format tells none (TOML)."""

    def where(self, path: Path_) -> str:
        """Of a value, for people."""
        line = self.lines.get(path)
        at = f"{self.file} line {line}" if line is not None else self.file
        return f"{at}, {dotted(path)}" if path else at


def dotted(path: Path_) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def read_tree(path: Path) -> Tree:
    """YAML, or TOML where the name ends in .toml. Raises PolicyError for what cannot be read or parsed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyError(str(path), f"cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise PolicyError(str(path), f"has {len(data):,} bytes; at most {MOST_BYTES:,} are read")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PolicyError(str(path), f"is not UTF-8 text (byte {error.start:,})") from None
    return _toml_tree(path.name, text) if path.suffix == ".toml" else _yaml_tree(path.name, text)


def _toml_tree(file: str, text: str) -> Tree:
    try:
        return Tree(file, tomllib.loads(text), {})
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(file, f"is not TOML: {str(error)[:150]}") from None


def _yaml_tree(file: str, text: str) -> Tree:
    if not find_spec("yaml"):
        remedy = "pip install 'heedful[router]', or write the policy as TOML: policy.toml."
        raise PolicyError(file, "is YAML, and PyYAML is not installed", remedy)
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = file if mark is None else f"{file} line {mark.line + 1}"
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise PolicyError(at, f"is not YAML: {problem[:150]}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise PolicyError(file, f"is not YAML: {str(error)[:150]}") from None
    reader = _YamlReader(file)
    value = None if node is None else reader.read(node, ())
    return Tree(file, value, reader.lines)


class _YamlReader:
    """Nodes to plain values; keys that stand twice, aliases without end and values that are no JSON are refused."""

    def __init__(self, file: str) -> None:
        import yaml

        self._file = file
        self._yaml = yaml
        self._scalars = yaml.constructor.SafeConstructor()
        self._count = 0
        self.lines: dict[Path_, int] = {}

    def read(self, node: Any, path: Path_) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        self._count += 1
        if self._count > MOST_VALUES or len(path) > 32:
            raise PolicyError(f"{self._file} line {line}", f"holds more than {MOST_VALUES:,} values, or 32 levels")
        if isinstance(node, self._yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, self._yaml.SequenceNode):
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: Any, path: Path_) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, self._yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise PolicyError(f"{self._file} line {line}", "has a key that is no text")
            key = str(key_node.value)
            if key in found:
                raise PolicyError(f"{self._file} line {line}, {dotted((*path, key))}", "stands twice")
            self.lines[(*path, key)] = line
            found[key] = self.read(value_node, (*path, key))
        return found

    def _scalar(self, node: Any, path: Path_) -> Any:
        try:
            value = self._scalars.construct_object(node)
        except (self._yaml.YAMLError, ValueError) as error:
            raise PolicyError(f"{self._file} line {node.start_mark.line + 1}", f"{str(error)[:100]}") from None
        if value is None or isinstance(value, str | bool | int | float):
            return value
        return str(node.value)  # a date, for instance: as it was written


class Section:
    """A mapping of the tree. Whoever has asked for all that it may hold calls done()."""

    def __init__(self, tree: Tree, path: Path_ = ()) -> None:
        self._tree = tree
        self._path = path
        self._asked: set[str] = set()
        value = tree.value
        for part in path:
            value = value[part]
        if not isinstance(value, Mapping):
            raise PolicyError(tree.where(path), f"must map names to values, not be {_kind(value)}")
        self._value: Mapping[str, Any] = value

    @property
    def keys(self) -> list[str]:
        return list(self._value)

    def has(self, key: str) -> bool:
        self._asked.add(key)
        return self._value.get(key) is not None

    def where(self, key: str | None = None) -> str:
        return self._tree.where(self._path if key is None else (*self._path, key))

    def wrong(self, key: str | None, message: str, remedy: str = "") -> PolicyError:
        return PolicyError(self.where(key), message, remedy)

    def any(self, key: str) -> Any:
        self._asked.add(key)
        return self._value.get(key)

    def text(self, key: str, default: str | None = None, *, one_of: Sequence[str] = ()) -> str:
        """Raises PolicyError where it is missing without a default, no text, or none of those."""
        value = self._given(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, f"must be a text, not {_kind(value)}")
        if one_of and value not in one_of:
            near = get_close_matches(value, one_of, 1)
            hint = f"Did you mean {near[0]}?" if near else ""
            raise self.wrong(key, f"is {value!r:.60}, and must be one of {', '.join(one_of)}", hint)
        return value

    def maybe_text(self, key: str) -> str | None:
        return self.text(key) if self.has(key) else None

    def number(self, key: str, default: float | None, *, least: float, most: float) -> float:
        value = self._given(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or not least <= value <= most:
            raise self.wrong(key, f"must be a number between {least:g} and {most:g}, not {value!r:.40}")
        return float(value)

    def whole(self, key: str, default: int | None, *, least: int, most: int) -> int:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"must be a whole number between {least:,} and {most:,}, not {value!r:.40}")
        return value

    def maybe_whole(self, key: str, *, least: int, most: int) -> int | None:
        return self.whole(key, None, least=least, most=most) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, not {value!r:.40}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; a text alone is one of one."""
        value = self._given(key, None)
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of texts")
        return tuple(value)

    def section(self, key: str) -> Section:
        self._given(key, None)
        return Section(self._tree, (*self._path, key))

    def sections(self, key: str) -> list[Section]:
        """A list of mappings; [] where the key is missing."""
        if not self.has(key):
            return []
        value = self._value[key]
        if not isinstance(value, list):
            raise self.wrong(key, f"must be a list, not {_kind(value)}")
        return [Section(self._tree, (*self._path, key, i)) for i in range(len(value))]

    def done(self) -> None:
        """Raises PolicyError for a key that nobody has asked for."""
        for key in self._value:
            if key not in self._asked:
                near = get_close_matches(key, self._asked, 1)
                hint = f"Did you mean {near[0]}?" if near else f"Known here: {', '.join(sorted(self._asked))}."
                raise self.wrong(key, "is no key that means something here", hint)

    def _given(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        value = self._value.get(key)
        value = default if value is None else value
        if value is None:
            near = get_close_matches(key, [other for other in self._value if other not in self._asked], 1)
            raise self.wrong(None, f"has no {key}", f"Did you mean {key} by {near[0]}?" if near else f"Add {key}.")
        return value


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "empty"}
    return names.get(type(value), "a number")
