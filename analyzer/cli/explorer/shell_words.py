"""Words of bash in a text: splits it into commands and words, and expands parameters whose values are known.

Sources: sections 3.1 to 3.5 of the Bash Reference Manual (quoting, parameters, expansions, word splitting).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

UNKNOWN: Final = "\0"
"""Stands for a value that is not known, such as the output of a command."""
PLACEHOLDER: Final = "unknown"
"""The part of a path that is not known."""
BETWEEN: Final = "\n;&|"
"""Characters that end a command."""
PARAMETER: Final = re.compile(r"([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
Value = TypeVar("Value", str, list[str])
LONGEST: Final = 200_000
"""Characters of a text that is read."""


class Unreadable(Exception):
    """A text that cannot be read without running it. The message says which part, as a fragment of a sentence."""


class Command(NamedTuple):
    """A simple command as it is written, or the head of a condition, loop or function."""

    text: str
    depends: bool
    """It follows && or ||, so that the command before it decides whether it runs."""


def split_commands(text: str) -> Iterator[Command]:
    """The commands of a text, without comments and with lines that are continued. Arrays and quotations are in one command."""
    if len(text) > LONGEST:
        raise Unreadable(f"it is longer than {LONGEST:,} characters")
    command, place, depth, depends = "", 0, 0, False
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    while place < len(text):
        mark = text[place]
        if mark == "#" and (not command or command[-1] in " \t\n(;"):
            place = _end(text, "\n", place)
            continue
        if mark in BETWEEN and not depth and not _joined(text, place):
            yield Command(command, depends)
            double = mark in "&|" and text[place + 1 : place + 2] == mark
            depends = double or (depends and not command.strip())
            command, place = "", place + (2 if double else 1)
            continue
        end = _end_of_part(text, place)
        depth += {"(": 1, ")": -1}.get(mark, 0) if end == place + 1 else 0
        depth = max(depth, 0)
        command += text[place:end]
        place = end
    yield Command(command, depends)


def _joined(text: str, place: int) -> bool:
    """Whether `&` is a part of a redirection: 2>&1, &>file."""
    return text[place] == "&" and (text[place - 1 : place] in (">", "<") or text[place + 1 : place + 2] == ">")


def _end(text: str, mark: str, place: int) -> int:
    found = text.find(mark, place)
    return len(text) if found < 0 else found


def _end_of_part(text: str, place: int) -> int:
    """The end of the quotation, expansion or character that begins at `place`."""
    mark = text[place]
    if mark == "\\":
        return min(place + 2, len(text))
    if mark == "'":
        return _closed(text.find("'", place + 1))
    if mark == "`":
        return _closed(text.find("`", place + 1))
    if mark == '"':
        return _end_of_quotation(text, place)
    if mark == "$" and text[place + 1 : place + 2] in ("(", "{"):
        return _end_of_bracket(text, place + 1)
    if text[place : place + 2] == "<<":
        raise Unreadable("a here-document")
    return place + 1


def _closed(end: int) -> int:
    if end < 0:
        raise Unreadable("a quotation that does not end")
    return end + 1


def _end_of_quotation(text: str, place: int) -> int:
    place += 1
    while place < len(text) and text[place] != '"':
        if text[place] == "\\":
            place += 2
        elif text[place] == "$" and text[place + 1 : place + 2] in ("(", "{"):
            place = _end_of_bracket(text, place + 1)
        else:
            place += 1
    return _closed(place if place < len(text) else -1)


def _end_of_bracket(text: str, place: int) -> int:
    """The end of the bracket that opens at `place`, with brackets and quotations in it."""
    opening = text[place]
    closing = {"(": ")", "{": "}"}[opening]
    place += 1
    while place < len(text) and text[place] != closing:
        place = _end_of_bracket(text, place) if text[place] == opening else _end_of_part(text, place)
    return _closed(place if place < len(text) else -1)


def split_words(command: str) -> list[str]:
    """The words of a command as they are written, with their quotation marks. An array is one word with its assignment."""
    words, word, place, depth = [], "", 0, 0
    while place < len(command):
        mark = command[place]
        end = _end_of_part(command, place)
        if mark in " \t\n" and not depth:
            words += [word] if word else []
            word, place = "", place + 1
            continue
        if end == place + 1 and mark in "()":
            depth = max(depth + (1 if mark == "(" else -1), 0)
        word += command[place:end]
        place = end
    return [*words, *([word] if word else [])]


class Expander:
    """The variables of a script, and what words expand to. A list of words is the value of an array, a text that of a variable."""

    def __init__(self) -> None:
        self._values: dict[str, str | list[str]] = {}
        self.empty: dict[str, None] = {}
        """Variables without a value that were expanded."""
        self.sourced = False
        """Whether another file or text may have set variables."""

    def forget(self, name: str) -> None:
        """The value of a variable is not known from here on."""
        self._values[name] = UNKNOWN

    def text(self, name: str) -> str | None:
        """The value of a variable that is no array."""
        value = self._values.get(name)
        return value if isinstance(value, str) else None

    def assign(self, name: str, raw: str, *, add: bool) -> None:
        """NAME=value, NAME+=value and arrays."""
        before = self._values.get(name, [] if raw.startswith("(") else "")
        if raw.startswith("("):
            items = [word for each in split_words(without_comments(raw[1:-1])) for word in self._split(each)]
            if add:
                items = [*([before] if isinstance(before, str) else before), *items]
            self._values[name] = _limited(items)
            return
        value = "".join(self._pieces(raw))
        self._values[name] = _limited(before + value if add and isinstance(before, str) else value)

    def words(self, raw: str) -> list[str]:
        """The words that a word expands to. Raises Unreadable if its value is not known, unless that is a part of a path."""
        return [self._known(word, raw) for word in self._split(raw)]

    def _known(self, word: str, raw: str) -> str:
        if UNKNOWN not in word:
            return word
        path = word.replace(UNKNOWN, PLACEHOLDER)
        if "/" in path and path != PLACEHOLDER:
            return path
        raise Unreadable(f"the value of {raw[:60]} is not known")

    def _split(self, raw: str) -> list[str]:
        """The words of a word before unknown parts are looked at."""
        found: list[str] = []
        current, begun = "", False
        for text, splits in self._parts(raw):
            if isinstance(text, list):
                items = [*text]
                if items:
                    items[0] = current + items[0]
                    found += items[:-1]
                    current, begun = items[-1], True
            elif not splits:
                current, begun = current + text, True
            else:
                fields = text.split()
                if text[:1].isspace() and begun:
                    found.append(current)
                    current, begun = "", False
                for place, field in enumerate(fields):
                    if place:
                        found.append(current)
                        current = ""
                    current, begun = current + field, True
                if text[-1:].isspace() and fields:
                    found.append(current)
                    current, begun = "", False
        return [*found, *([current] if begun else [])]

    def _pieces(self, raw: str) -> Iterator[str]:
        for text, _ in self._parts(raw):
            yield " ".join(text) if isinstance(text, list) else text

    def _parts(self, raw: str) -> Iterator[tuple[str | list[str], bool]]:
        """The parts of a word: a text, and whether it is split into words; or the items of an array."""
        place = 0
        while place < len(raw):
            end = _end_of_part(raw, place)
            part, mark = raw[place:end], raw[place]
            if mark == "'":
                yield part[1:-1], False
            elif mark == '"':
                yield from self._quoted(part[1:-1])
            elif mark == "\\":
                yield part[1:], False
            elif mark in "$`":
                part, end = self._parameter_at(raw, place, end)
                value = self._expanded(part)
                yield (" ".join(value) if isinstance(value, list) else value), True
            else:
                yield part, False
            place = end

    def _quoted(self, text: str) -> Iterator[tuple[str | list[str], bool]]:
        place = 0
        if not text:
            yield "", False
        while place < len(text):
            mark = text[place]
            if mark == "\\" and text[place + 1 : place + 2] in ("$", "`", '"', "\\", "\n"):
                yield text[place + 1], False
                place += 2
            elif mark in "$`":
                part, place = self._parameter_at(text, place, _end_of_part(text, place))
                yield self._expanded(part), False
            else:
                yield mark, False
                place += 1

    def _parameter_at(self, text: str, place: int, end: int) -> tuple[str, int]:
        """The expansion at `place`, and its end: ${...}, $(...), or $NAME."""
        if end == place + 1 and text[place] == "$":
            found = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(text, place + 1)
            end = place + 1 if found is None else found.end()
        return text[place:end], end

    def _expanded(self, part: str) -> str | list[str]:
        """The value of an expansion: a text, or the items of an array or of the arguments."""
        if part == "$":
            return part
        if part.startswith("$(("):
            return self._arithmetic(part[3:-2])
        if part.startswith(("$(", "`")):
            return UNKNOWN
        written = part[2:-1] if part.startswith("${") else part[1:]
        found = PARAMETER.fullmatch(written)
        if found is None:
            return UNKNOWN
        name, items, operation, other = found.groups()
        value = self._value(name)
        if operation is not None:
            return self._with_default(name, value, operation, other)
        if value is None:
            if name not in "@*":
                self.empty[name] = None
            return [] if items or name in "@*" else ""
        if isinstance(value, list):
            return value if items or name in "@*" else "".join(value[:1])
        return value

    def _value(self, name: str) -> str | list[str] | None:
        known = {"#": "0", "0": UNKNOWN, "$": UNKNOWN, "?": "0", "!": UNKNOWN}
        value = known.get(name, self._values.get(name))
        return UNKNOWN if value is None and self.sourced and not name.isdigit() and name not in "@*" else value

    def _with_default(self, name: str, value: str | list[str] | None, operation: str, other: str) -> str | list[str]:
        """${NAME:-other} and the like."""
        if value == UNKNOWN:
            return UNKNOWN
        missing = value is None or (operation.startswith(":") and not value)
        if operation.endswith("+"):
            return "" if missing else "".join(self._pieces(other))
        if not missing and value is not None:
            return value
        if operation.endswith("?"):
            raise Unreadable(f"${name} must be set")
        text = "".join(self._pieces(other))
        if operation.endswith("="):
            self._values[name] = text
        return text

    def _arithmetic(self, text: str) -> str:
        """The value of $((...)) with whole numbers and + - * / %."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        try:
            return str(self._number(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return UNKNOWN

    def _number(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            value = self._values.get(node.id, "0")
            return int(value) if isinstance(value, str) else 0
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](self._number(node.left), self._number(node.right))
        raise ValueError("not an arithmetic expression of whole numbers")


def _limited(value: Value) -> Value:
    """A value that is not too long. Raises Unreadable."""
    if sum(map(len, value)) > LONGEST:
        raise Unreadable(f"a variable has more than {LONGEST:,} characters")
    return value


def without_comments(text: str) -> str:
    """The text of an array without comments."""
    return re.sub(r"(^|[ \t\n])#[^\n]*", r"\1", text)
