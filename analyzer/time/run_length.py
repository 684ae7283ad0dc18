"""The length of a training: `--train-iters`, `--train-samples`, evaluation, checkpoints and the ramp-up of the batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analyzer.launch.derive.reading import integer, switched_on
from analyzer.specs.run import RunSpec

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments


def run_spec(arguments: Arguments) -> RunSpec:
    """What a launch says about the length of its training. Values below 1 count as not given."""

    def count(dest: str) -> int | None:
        value = integer(arguments, dest)
        return value if value is not None and value > 0 else None

    rampup = arguments.get("rampup_batch_size")
    sizes = tuple(int(each) for each in rampup) if isinstance(rampup, list | tuple) and len(rampup) == 3 else None
    return RunSpec(
        train_iters=count("train_iters"),
        train_samples=count("train_samples"),
        eval_interval=count("eval_interval"),
        eval_iters=count("eval_iters") or 0,
        save_interval=count("save_interval"),
        saves=bool(arguments.get("save")),
        saves_optimizer=not switched_on(arguments, "no_save_optim"),
        asynchronous_save=switched_on(arguments, "async_save"),
        rampup=(sizes[0], sizes[1], sizes[2]) if sizes is not None else None,
    )
