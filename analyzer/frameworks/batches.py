"""Batches of packed sequences, whose number of microbatches depends on the data."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from analyzer.launch.launchers.world import World
from analyzer.launch.megatron_words import LayoutSettings
from analyzer.specs.fine_tuning import FineTuning


class Batch(NamedTuple):
    """The options of the sequence length and the batch sizes of a launch, and the assumptions about them."""

    words: list[str]
    notes: list[str]
    longest_sample: int | None = None
    """Tokens of the longest sample of a packed microbatch."""
    filled: bool = False
    """Whether microbatches are filled up to a number of tokens."""
    layout: LayoutSettings | None = None
    """Where the layout is set."""

    def tuned(self, tuning: FineTuning) -> FineTuning:
        """The tuning with what the batch says of its samples."""
        return replace(tuning, longest_sample=self.longest_sample, filled=self.filled)


def plain_batch(length: int, micro: int, samples: int, *, note: str, layout: LayoutSettings) -> Batch:
    """Microbatches of `micro` sequences with `length` tokens, of `samples` sequences in an iteration."""
    words = ["--seq-length", str(length), "--micro-batch-size", str(micro), "--global-batch-size", str(samples)]
    return Batch(words, [note], layout=layout)


def replicas_of(world: World, *sizes: int) -> int:
    """Data-parallel replicas: the GPUs over the product of the tensor, pipeline and context sizes; 1 if it does not divide them."""
    count = world.size
    for size in sizes:
        count //= max(size, 1)
    return max(count, 1)


def packed_batch(tokens: int, setting: str, *, samples: int, length: int, replicas: int, multiple: int = 1) -> Batch:
    """Microbatches of one sequence with `tokens` tokens.

    `samples` sequences of the longest `length` fill them. With shorter sequences there are fewer, and the time is shorter; the
    memory depends on their number only if it is below that of the pipeline stages. Their number is rounded up to a `multiple`:
    the stages of an interleaved pipeline.
    """
    count = -(-samples * length // (tokens * replicas * multiple)) * multiple
    note = (
        f"A microbatch is assumed to have {tokens} tokens, from {setting}, as one sequence; {samples} sequences of the longest "
        f"length, {length} tokens, are {count} microbatches of each replica."
    )
    words = ["--seq-length", str(tokens), "--micro-batch-size", "1", "--global-batch-size", str(count * replicas)]
    return Batch(words, [note], length, filled=True)
