"""Checks of the length of training, the learning rate and the weight decay.

Megatron: `validate_args` (megatron/training/arguments.py), 2023 to 0.19. Other checks of the length are in
`analyzer.launch.derive.batch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from analyzer.launch.derive.reading import option
from analyzer.specs.option_names import flag_of
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def schedule_violations(arguments: Arguments) -> Iterator[Violation]:
    """Hyperparameters that contradict each other."""
    yield from _warmup(arguments)
    yield from _learning_rate(arguments)
    yield from _weight_decay(arguments)


def _warmup(arguments: Arguments) -> Iterator[Violation]:
    """Iterations with training in samples, and a warm-up that is given twice."""
    in_samples = bool(arguments.get("train_samples"))
    if in_samples:
        for dest in ("lr_decay_iters", "lr_warmup_iters"):
            if arguments.get(dest):
                samples = flag_of(dest.replace("_iters", "_samples"))
                yield Violation((dest,), f"contradicts {option(arguments, 'train_samples')}", f"use {samples}")
    counted = "lr_warmup_samples" if in_samples else "lr_warmup_iters"
    limited = in_samples or bool(arguments.get("train_iters"))
    if limited and arguments.get("lr_warmup_fraction") is not None and arguments.get(counted):
        yield Violation(("lr_warmup_fraction",), f"contradicts {option(arguments, counted)}", "keep one of the two")


def _learning_rate(arguments: Arguments) -> Iterator[Violation]:
    largest, least = arguments.get("lr"), arguments.get("min_lr")
    if isinstance(largest, int | float) and isinstance(least, int | float) and least > largest:
        yield Violation(("min_lr",), f"{least:g} is above {option(arguments, 'lr')} {largest:g}", f"use {largest:g} or less")


def _weight_decay(arguments: Arguments) -> Iterator[Violation]:
    """A weight decay that changes needs both ends; a constant one has none."""
    ends = ("start_weight_decay", "end_weight_decay")
    constant = arguments.get("weight_decay_incr_style", "constant") == "constant"
    for dest in ends:
        given = arguments.get(dest) is not None
        if constant and given:
            yield Violation((dest,), "has no effect while the weight decay is constant", "add --weight-decay-incr-style linear")
        if not constant and not given:
            yield Violation(("weight_decay_incr_style",), f"needs {flag_of(dest)}", "add it, for example 0.01")
