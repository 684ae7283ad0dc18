"""The smallest number of GPUs, the longest sequence and the largest micro-batch with which any layout of a launch fits.

Whether a layout fits is a search of its own, which looks at layouts with the lowest bound of the memory first. It leaves out what
only needs more memory: virtual stages, larger micro-batches and overlapped communication (`Space.least`). The layout of the answer
is the fastest one with that number, of all that a search looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Final, Literal, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.executors import Workers
from analyzer.layout_search.options import by_flag
from analyzer.layout_search.problem import Changes, Problem, with_changes
from analyzer.layout_search.related import LONGEST, in_a_legal_layout, length_changes, memory_of_job, with_world
from analyzer.layout_search.result import SearchResult
from analyzer.layout_search.search import search_space
from analyzer.layout_search.space import Layout
from analyzer.layout_search.split_jobs import job_of_layout
from analyzer.results import TrainingTime
from analyzer.specs.option_names import flag_of

What = Literal["gpus", "seq-length", "micro-batch-size"]
REFINING: Final = ("layers", "etp", "overlap")
"""Dimensions with many layouts, which are needed to fit only if none fits without them."""
MOST_GPUS: Final = 131_072
MASK: Final = "create_attention_mask_in_dataloader"
"""The mask has the square of the sequence length in bytes. Transformer Engine does not read it, so a long sequence is trained
without it."""
SIGNIFICANT_BITS: Final = 3
"""Sequence lengths that are tried are multiples of a power of two, at most 2 to this power of them."""

Trained = Callable[[Space, SearchResult], TrainingTime | None]
"""The whole training with the first layout of a result; None if its length is not known."""


class Extreme(NamedTuple):
    """The smallest number of GPUs, or the largest value of an option, with which a layout fits."""

    what: What
    value: int | None
    """None if there is none."""
    gpus: int
    """GPUs of the layout."""
    not_enough: int | None
    """The next smaller number of GPUs, or the next larger value, with which no layout fits or is fast enough."""
    options: dict[str, object]
    """The options that this value sets, by flag, in addition to those of the layout."""
    layout: Evaluation | None
    """The fastest layout with this value."""
    training: TrainingTime | None
    """The training with this layout; None if its length is not known."""


class Answers:
    """Answers questions about a problem. `over` and `keep` limit the dimensions of a layout, as in a search."""

    def __init__(
        self, problem: Problem, workers: Workers, trained: Trained, *, over: Sequence[str] = (), keep: Sequence[str] = ()
    ) -> None:
        self._problem, self._workers, self._trained = problem, workers, trained
        self._over, self._keep = over, keep
        self._last: Layout | None = None
        """A layout that fitted with the last number or value."""

    def fewest_gpus(self, *, days: float | None = None) -> Extreme:
        """The smallest number of GPUs with which a layout fits, and the training takes at most `days`.

        Numbers are divisors of the GPUs of a node, and then whole nodes. Raises InputError if `days` is given and the length of the
        training is not known.
        """
        below: int | None = None
        for number in self._growing():
            if (found := self._enough(number, days)) is None:
                below = number
                continue
            for between in self._between(below, number):
                smaller = self._enough(between, days)
                if smaller is not None:
                    return smaller._replace(not_enough=below)
                below = between
            return found._replace(not_enough=below)
        return Extreme("gpus", None, MOST_GPUS, None, {}, None, None)

    def largest(self, option: Literal["seq-length", "micro-batch-size"]) -> Extreme:
        """The longest sequence, or the largest micro-batch size, with which a layout of the launch fits."""
        gpus = self._problem.world.size
        keep = (*self._keep, option)
        values = self._lengths() if option == "seq-length" else self._batches()
        fits: int | None = None
        above: int | None = None
        for value in values:
            if not self._fits(self._changed(_changes(option, value, self._problem), keep), keep):
                above = value
                break
            fits = value
        if option == "seq-length" and fits is not None and above is not None:
            fits, above = self._refined(fits, above, keep)
        if fits is None:
            return Extreme(option, None, gpus, above, {}, None, None)
        space, result = self._fastest(self._changed(_changes(option, fits, self._problem), keep), keep)
        training = self._trained(space, result)
        options = by_flag(_changes(option, fits, self._problem), self._problem.arguments)
        if flag_of(MASK) in options:
            options[flag_of(MASK)] = True  # a flag that switches off
        return Extreme(option, fits, gpus, above, options, result.best[0] if result.best else None, training)

    # -- numbers of GPUs

    def _growing(self) -> Iterator[int]:
        """Powers of two up to the GPUs of a node, and then twice as many nodes each time."""
        per_node = self._problem.given.parallel.gpus_per_node
        yield from (each for each in range(1, per_node) if per_node % each == 0)
        number = per_node
        while number <= MOST_GPUS:
            yield number
            number *= 2

    def _between(self, below: int | None, above: int) -> Iterator[int]:
        """Whole nodes between two numbers."""
        per_node = self._problem.given.parallel.gpus_per_node
        if below is not None and below >= per_node:
            yield from range(below + per_node, above, per_node)

    def _enough(self, number: int, days: float | None) -> Extreme | None:
        """The answer for a number of GPUs; None if no layout fits, or the fastest one is too slow."""
        try:
            problem = with_world(self._problem, number, over=self._over, keep=self._keep)
        except InputError:
            return None
        if not self._fits(problem, self._keep):
            return None
        space, result = self._fastest(problem, self._keep)
        if not result.best:
            return None
        training = self._trained(space, result)
        if days is not None:
            if training is None:
                fault = "the length of the training is not known"
                raise InputError("--info-search-days", fault, "add --info-tokens, or --train-iters to the launch")
            if training.days > days:
                return None
        return Extreme("gpus", number, number, None, {}, result.best[0], training)

    # -- values of options

    def _lengths(self) -> Iterator[int]:
        """Sequence lengths, each twice the one before."""
        step = self._step()
        length = step
        while length <= LONGEST:
            yield length
            length *= 2

    def _refined(self, fits: int, above: int, keep: Sequence[str]) -> tuple[int, int]:
        """The longest length that fits and the next one that does not, in steps of a fraction of `fits`."""
        step = max(self._step(), fits >> SIGNIFICANT_BITS)
        low, high = fits // step, above // step
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(self._changed(_changes("seq-length", middle * step, self._problem), keep), keep):
                low = middle
            else:
                high = middle
        return low * step, high * step

    def _step(self) -> int:
        return lcm(1024 if self._problem.given.batch.seq_length >= 1024 else 1, 2)

    def _batches(self) -> Iterator[int]:
        """Micro-batch sizes: the divisors of the global batch size."""
        batch = self._problem.given.batch.global_batch_size
        return (size for size in range(1, batch + 1) if batch % size == 0)

    def _changed(self, changes: Changes, keep: Sequence[str]) -> Problem | None:
        """The launch with other options, in any layout; None if Megatron refuses all of them."""
        problem = self._problem
        sizes = {name: value for name, value in changes.items() if name in ("micro_batch_size", "seq_length")}
        given = replace(problem.given, batch=replace(problem.given.batch, **sizes))  # type: ignore[arg-type]
        changed = replace(problem, arguments=with_changes(problem.arguments, changes), given=given, runs=False)
        found = in_a_legal_layout(changed, over=self._over, keep=keep)
        return None if found is None else replace(found, runs=False)

    # -- searches

    def _fits(self, problem: Problem | None, keep: Sequence[str]) -> bool:
        """Whether a layout fits: that of the last answer, one of a small space, or one of all."""
        if problem is None:
            return False
        space = space_of(problem, over=self._over, keep=keep, least=True)
        if self._last is not None and _layout_fits(space, self._last):
            return True
        for each in (self._small(space), space):
            found = () if each is None else search_space(each, self._workers, aim="any").best
            if found:
                self._last = found[0].layout
                return True
        return False

    @staticmethod
    def _small(space: Space) -> Space | None:
        """The space without `REFINING`; None if that leaves nothing out or nothing to search."""
        over = space.over.difference(REFINING)
        return replace(space, over=over) if over and over != space.over else None

    def _fastest(self, problem: Problem | None, keep: Sequence[str]) -> tuple[Space, SearchResult]:
        """The fastest layout."""
        if problem is None:
            raise AssertionError("a launch that no layout of which is legal does not fit")
        space = space_of(problem, over=self._over, keep=keep)
        return space, search_space(space, self._workers, aim="fastest")


def _layout_fits(space: Space, layout: Layout) -> bool:
    """Whether a layout is one of Megatron and fits."""
    if layout.setting >= len(space.settings):
        return False
    job = job_of_layout(space, layout._replace(split=layout.split._replace(micro_batch=space.sizes.micro_batch[0])))
    try:
        return job is not None and memory_of_job(job).device_bytes <= space.problem.capacity
    except AnalyzerError:
        return False


def _changes(option: What, value: int, problem: Problem) -> Changes:
    if option == "micro-batch-size":
        return {"micro_batch_size": value}
    found = length_changes(problem, value)
    if problem.arguments.get(MASK) and problem.given.model.implementation == "transformer_engine":
        found[MASK] = False
    return found
