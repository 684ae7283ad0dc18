"""Element sizes, rounding, and conversion between numbers of bytes and text."""

from __future__ import annotations

from typing import Final

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
MAX_DIGITS: Final = 18
"""Digits of an integer that is read from text: it fits into 64 bits."""


BLOCK: Final = 512
"""PyTorch's caching allocator rounds sizes up to multiples of this (kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp)."""

DTYPE_BYTES: Final[dict[str, float]] = {
    "fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "int16": 2, "fp8": 1, "uint8": 1, "bool": 1, "fp4": 0.5,
}  # fmt: skip


def share_of(text: str) -> float | None:
    """The number from 0 to 1 that a text is; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None


def natural(text: str) -> int | None:
    """The number that `text` writes in decimal digits; None if it is no number, or has more digits than MAX_DIGITS.

    `str.isdigit` also holds for '²', which `int` does not read, and `int` refuses numbers of more than 4,300 digits.
    """
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


_LENGTHS: Final = {"k": 1024, "m": 1024**2}
"""Tokens of a suffix of a sequence length."""


def length(text: str) -> int | None:
    """The number of tokens of a sequence that `text` writes, such as 2048 or 32k, of which k is 1,024; None if it is no number."""
    unit = _LENGTHS.get(text[-1:].lower())
    if unit is None:
        return natural(text)
    number = natural(text[:-1])
    return None if number is None else number * unit


def dtype_bytes(dtype: str, elements: int) -> int:
    """Bytes of `elements` elements of `dtype`, without rounding to blocks."""
    return int(DTYPE_BYTES[dtype] * elements)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up to an integer."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """n rounded up to a multiple of `multiple`."""
    return ceil_div(n, multiple) * multiple


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, which must be positive."""
    return 1 << (n - 1).bit_length()


def format_bytes(n: int) -> str:
    """`n` bytes with a binary unit and two decimals: 1536 -> '1.50 KiB'."""
    sign = "-" if n < 0 else ""
    size = abs(n)
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        # 1023.996 KiB would print as 1024.00 KiB, so sizes that round up to the next unit are printed in it
        if size >= scale - scale // 2**18:
            return f"{sign}{size / scale:,.2f} {unit}"
    return f"{sign}{size} B"


def format_count(n: int) -> str:
    """`n` with thousands separators."""
    return f"{n:,}"


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape in the notation of torch: [2048,4,4096]."""
    return "[" + ",".join(str(d) for d in shape) + "]"


def parse_size(text: str) -> int:
    """Bytes of '80GiB', '80GB', '81920MiB' or a plain number of bytes. GB is 10**9 and GiB is 2**30 bytes.

    Raises ValueError for other text, for 0, for an infinite size, and for a plain number below 1 MiB.
    """
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40}
    stripped = text.strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(digits) :].strip()
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r}")
    number = float(digits) * units[unit]
    if not number < float("inf"):
        raise ValueError("the size is not finite")
    size = int(number)
    if size <= 0:
        raise ValueError("the size is not above 0")
    if not unit and size < MIB:
        raise ValueError(f"{stripped} bytes is less than the memory of any GPU")
    return size


def format_seconds(value: float) -> str:
    """A time with three digits: 12.3 s, 85.5 ms."""
    shown, unit = (value, "s") if value >= 1 else (1000 * value, "ms")
    digits = 2 if shown < 10 else 1 if shown < 100 else 0
    return f"{shown:,.{digits}f} {unit}"
