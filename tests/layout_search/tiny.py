"""A small launch, and workers that are disturbed while they search its layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from analyzer.api import problem_of, read_launch
from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.executors import Outcome, Task, Workers
from analyzer.layout_search.result import SearchResult

ARGV = (
    "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024"
    " --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --vocab-size 32000 --tokenizer-type NullTokenizer"
    " --bf16 --lr 1e-4 --train-iters 10 --mock-data --tensor-model-parallel-size 2 --info-gpu H100-80GB"
)


SEARCHED = ("tp", "pp", "cp", "recompute", "optimizer")
"""Dimensions of a search of three rounds."""


def tiny_space(over: Sequence[str] = SEARCHED) -> Space:
    """Some layouts of the launch."""
    launch = read_launch(ARGV.split(), environ={}, folder=Path("/"))
    return space_of(problem_of(launch), over=over)


class Disturbed(Workers):
    """Workers that something happens to in each of the first rounds, when a task is finished and others are running."""

    def __init__(self, found: Workers, disturb: Callable[[], object], rounds: int = 1) -> None:
        self.found = found
        self.disturb = disturb
        self.rounds = rounds

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for position, outcome in enumerate(self.found.run(tasks)):
            if position == 0 and self.rounds:
                assert len(tasks) > 2
                self.rounds -= 1
                self.disturb()
            yield outcome


def same_for_all(result: SearchResult) -> tuple[object, ...]:
    """What does not depend on the workers."""
    return result.candidates, result.evaluated, result.best, result.front, result.given, result.complete
