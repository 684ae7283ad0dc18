"""Converts words of a command line, by the name of the function that Megatron's parser uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from analyzer.units import MAX_DIGITS

if TYPE_CHECKING:
    import ast

_POWERS: Final = {"k": 1, "m": 2}
MAX_PATTERN_ITEMS: Final = 100_000
"""Longer patterns are refused: they exceed the layers of any model, and would need much memory."""


class InvalidValue(ValueError):
    """A word that is not a valid value of its option, with the fault and the remedy."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.remedy = remedy


def convert(word: str, type_name: str | None) -> object:
    """`word` converted to the type of an option. Raises InvalidValue."""
    converter = CONVERTERS.get(type_name or "str")
    return converter(word) if converter else word


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InvalidValue(f"{word!r} is not an integer", f"write an integer such as {_in_digits(word)}") from None


def _in_digits(word: str) -> str:
    """What a number with a suffix may mean, in digits; 8 for another word."""
    number, suffix = word[:-1], word[-1:].lower()
    if not number.isdecimal() or len(number) > MAX_DIGITS or suffix not in _POWERS:
        return "8"
    power = _POWERS[suffix]
    return f"{int(number) * 1024**power} or {int(number) * 1000**power}"


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InvalidValue(f"{word!r} is not a number", "write a number such as 0.1 or 1e-5") from None


def _signal(word: str) -> int:
    import signal

    try:
        return int(signal.Signals[word])
    except KeyError:
        raise InvalidValue(f"{word!r} is not a signal", "write a signal such as SIGTERM") from None


def _frequency(word: str) -> int | tuple[int, ...]:
    """An integer N, or a pattern in Python's list notation: '([0]*3+[1])*2'."""
    if "[" not in word:
        return _integer(word)
    return tuple(_pattern(word))


def _pattern(word: str) -> list[int]:
    """The list that `word` denotes with numbers, brackets, + and *. Megatron passes it to `eval`; here it is parsed safely."""
    import ast

    try:
        value = _evaluate(ast.parse(word, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, list):
        raise InvalidValue(f"{word!r} is not a layer pattern", "write lists of 0 and 1 with + and *, such as '([0]*3+[1])*2'")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    """The value of an expression of lists and integers with + and *. Raises ValueError for anything else."""
    import ast

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        numbers = [_evaluate(item) for item in node.elts]
        return [number for number in numbers if isinstance(number, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        items, times = (left, right) if isinstance(left, list) else (right, left)
        if isinstance(node.op, ast.Mult) and isinstance(items, list) and isinstance(times, int):
            if len(items) * times <= MAX_PATTERN_ITEMS:
                return items * times
            raise ValueError("too long")
    raise ValueError("not a list of numbers")


def _tuple(word: str) -> tuple[int, ...]:
    """'1,2' or '(1,2)' as integers."""
    return tuple(_integer(part) for part in word.strip("()").split(","))


CONVERTERS: Final[dict[str, Callable[[str], object]]] = {
    "int": _integer,
    "float": _float,
    "bool": bool,
    "exit_signal": _signal,
    "moe_freq_type": _frequency,
    "la_freq_type": _frequency,
    "no_rope_freq_type": _frequency,
    "tuple_type": _tuple,
}
"""By function name. With any other function the word is kept as text: enums are stored by name."""
