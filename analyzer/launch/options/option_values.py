"""Words of a command line as values, by the name of the function that Megatron's parser converts them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ast

MAX_PATTERN_ITEMS: Final = 100_000
"""No model has more layers; a longer pattern is a slip, and would only eat memory."""


class Refused(ValueError):
    """A word that is no value of its option: what is wrong with it, and what to write."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.remedy = remedy


def convert(word: str, type_name: str | None) -> object:
    """`word` as the value that an option of this type holds. Raises Refused."""
    converter = CONVERTERS.get(type_name or "str")
    return converter(word) if converter else word


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise Refused(f"{word!r} is not a whole number", "write it in digits, such as 8") from None


def _float(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise Refused(f"{word!r} is not a number", "write a number such as 0.1 or 1e-5") from None


def _signal(word: str) -> int:
    import signal

    try:
        return int(signal.Signals[word])
    except KeyError:
        raise Refused(f"{word!r} is not a signal", "name one, such as SIGTERM") from None


def _frequency(word: str) -> int | tuple[int, ...]:
    """A whole number N, or a pattern in Python's list notation: '([0]*3+[1])*2'."""
    if "[" not in word:
        return _integer(word)
    return tuple(_pattern(word))


def _pattern(word: str) -> list[int]:
    """The list that `word` writes with numbers, brackets, + and *: what Megatron hands to `eval`, without `eval`."""
    import ast

    try:
        value = _evaluate(ast.parse(word, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, list):
        raise Refused(f"{word!r} is not a pattern of layers", "write lists of 0 and 1 with + and *, such as '([0]*3+[1])*2'")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    """The value of a sum or product of lists and whole numbers. Raises ValueError for anything else."""
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
    """'1,2' or '(1,2)' as whole numbers."""
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
"""Every other function leaves the word as it is: enums are held by name."""
