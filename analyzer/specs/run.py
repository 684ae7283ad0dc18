"""The length of a training, and what happens between its iterations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The options of a launch about the length of its training. None for what it does not say."""

    train_iters: int | None = None
    train_samples: int | None = None
    eval_interval: int | None = None
    eval_iters: int = 0
    save_interval: int | None = None
    saves: bool = False
    """Checkpoints are written (`--save`)."""
    saves_optimizer: bool = True
    asynchronous_save: bool = False
    rampup: tuple[int, int, int] | None = None
    """First global batch size, its increment, and the samples over which it grows (`--rampup-batch-size`)."""
