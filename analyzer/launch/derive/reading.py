"""Values of options, read with their type, and errors with the option as the user wrote it.

The modules of this package derive one spec each. They follow Megatron's `validate_args` and the `__post_init__` of its configs in
core 0.16.1 unless a comment names another release. Rules about sizes that must divide each other are in `analyzer.specs.rules`.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING, Final

from analyzer.errors import InputError
from analyzer.specs.option_names import flag_of
from analyzer.specs.release import release_number
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments

RELEASE_2023: Final = "2023"
"""The code of August 2023, core package 0.2.0."""
LARGEST: Final = {
    "num_layers": 10_000, "encoder_num_layers": 10_000, "mtp_num_layers": 100, "num_experts": 4_096,
    "pipeline_model_parallel_size": 1_024,
    "hidden_size": 10**7, "ffn_hidden_size": 10**8, "moe_ffn_hidden_size": 10**8, "num_attention_heads": 10**6,
}  # fmt: skip
"""Largest values of options whose numbers the analysis counts up to, so that it ends within a minute.

They are several times those of any published model: 1,000 layers (DeepNet), 2,048 experts (Switch-C), 64 stages (Narayanan et al.
2021, 1 trillion parameters) and one MTP layer (DeepSeek-V3).
"""
LARGEST_CHUNKS: Final = 2_048
"""Most model chunks of all pipeline ranks: each has its own schedule. Llama 3 405B had 128."""
LARGEST_LOCAL_EXPERTS: Final = 50_000
"""Most experts in all layers of one rank: the allocator is simulated with the tensors of each. Kimi K2 has 23,424 in all."""
LARGEST_INTEGER: Final = 2**63 - 1
"""Largest value of the other options: that of the integers of PyTorch."""


def option(arguments: Arguments, dest: str) -> str:
    """The flag of `dest` as the user wrote it, or Megatron's flag if it was not given."""
    return arguments.spelled.get(dest) or flag_of(dest)


def since(arguments: Arguments, release: str) -> bool:
    """Whether the Megatron release of the launch is `release` or a later one."""
    return release_number(arguments.release) >= release_number(release)


def switched_on(arguments: Arguments, dest: str) -> bool:
    """Whether a flag without a value is set; False if the release does not have it."""
    return bool(arguments.get(dest, False))


def text(arguments: Arguments, dest: str, default: str) -> str:
    """A word; `default` if it is not set."""
    value = arguments.get(dest)
    return default if value is None else str(value)


def number(arguments: Arguments, dest: str, default: float) -> float:
    """A number; `default` if it is not set. Raises InputError for anything else."""
    value = arguments.get(dest)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(option(arguments, dest), f"{value!r} is not a number", "give a number")
    return float(value)


def finite(arguments: Arguments, dest: str, default: float) -> float:
    """A number other than infinity and NaN; `default` if it is not set. Raises InputError for anything else."""
    value = number(arguments, dest, default)
    if not isfinite(value):
        raise InputError(option(arguments, dest), f"{value} is not a finite number", "give a finite number")
    return value


def share(arguments: Arguments, dest: str, default: float, *, zero: bool) -> float:
    """A number from 0 to 1; 0 is allowed with `zero`. Raises InputError for anything else."""
    value = number(arguments, dest, default)
    if not 0 <= value <= 1 or (value == 0 and not zero):
        bounds = "between 0 and 1" if zero else "above 0 and at most 1"
        raise InputError(option(arguments, dest), f"{value:g} is not {bounds}", f"give a number {bounds}, such as {default:g}")
    return value


def integer(arguments: Arguments, dest: str) -> int | None:
    """An integer, or None. Raises InputError for anything else, and for an integer above its limit in `LARGEST`."""
    value = arguments.get(dest)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(option(arguments, dest), f"{value!r} is not an integer", "give an integer")
    limit = LARGEST.get(dest, LARGEST_INTEGER)
    if value > limit:
        raise InputError(option(arguments, dest), f"{value} is above {limit}, the largest number that is modelled", "give less")
    return value


def positive(arguments: Arguments, dest: str) -> int | None:
    """An integer above 0, or None. Raises InputError for 0 and below."""
    value = integer(arguments, dest)
    if value is not None and value <= 0:
        raise InputError(option(arguments, dest), f"{value} is not above 0", "give 1 or more")
    return value


def required(arguments: Arguments, dest: str, example: str) -> int:
    """An integer above 0 that Megatron requires. Raises InputError if it is missing."""
    value = positive(arguments, dest)
    if value is None:
        named = option(arguments, dest)
        remedy = f"add it, for example {named} {example}"
        if arguments.get("use_checkpoint_args"):
            remedy += ", or give the folder of the checkpoint with --load: --use-checkpoint-args takes it from there"
        raise InputError(named, "is missing", remedy)
    return value


def size(arguments: Arguments, dest: str) -> int:
    """A size of parallelism: 1 if it is not given."""
    value = positive(arguments, dest)
    return 1 if value is None else value


def refuse(arguments: Arguments, violations: Iterable[Violation]) -> None:
    """Raises InputError for the first rule that is broken, with the options as the user wrote them."""
    for found in violations:
        raise InputError(" × ".join(option(arguments, dest) for dest in found.options), found.fault, found.remedy)
