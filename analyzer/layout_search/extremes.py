"""The smallest number of GPUs, the longest sequence and the largest micro-batch with which any layout of a launch fits.

Whether a layout fits is a search of its own, which looks at layouts with the lowest bound of the memory first. It leaves out what
only needs more memory: virtual stages, larger micro-batches and overlapped communication (`Space.least`). The layout of the answer
is the fastest one with that number, of all that a search looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, lcm
from typing import Final, Literal, NamedTuple

from analyzer.errors import AnalyzerError, InputError
from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.evaluation import Evaluation
from analyzer.layout_search.executors import Workers
from analyzer.layout_search.nodes import root_nodes
from analyzer.layout_search.options import by_flag
from analyzer.layout_search.problem import Changes, Problem, with_changes
from analyzer.layout_search.related import LONGEST, in_a_legal_layout, length_changes, memory_of_job, with_world
from analyzer.layout_search.result import INTERRUPTED, SearchResult
from analyzer.layout_search.search import Aim, Progress, search_space
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

DAY: Final = 86_400.0
Trained = Callable[[Space, Evaluation], TrainingTime | None]
"""The whole training with a layout; None if its length is not known."""


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
        self,
        problem: Problem,
        workers: Workers,
        trained: Trained,
        *,
        over: Sequence[str] = (),
        keep: Sequence[str] = (),
        iterations: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """`iterations`: those of the training, at least, each as long as one with the whole batch."""
        self._problem, self._workers, self._trained = problem, workers, trained
        self._over, self._keep = over, keep
        self._iterations, self._progress = iterations, progress
        self._last: Layout | None = None
        """A layout that fitted with the last number or value."""

    def fewest_gpus(self, *, days: float | None = None) -> Extreme:
        """The smallest number of GPUs with which a layout fits, and the training takes at most `days`.

        Numbers are divisors of the GPUs of a node, and then whole nodes. Raises InputError if `days` is given and the length of the
        training is not known.
        """
        below: int | None = None
        for number in self._growing():
            if not self._is_enough(number, days):
                below = number
                continue
            for between in self._between(below, number):
                if self._is_enough(between, days):
                    return self._on(between, below, days)
                below = between
            return self._on(number, below, days)
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
        layout = result.best[0] if result.best else None
        training = None if layout is None else self._trained(space, layout)
        options = by_flag(_changes(option, fits, self._problem), self._problem.arguments)
        if flag_of(MASK) in options:
            options[flag_of(MASK)] = True  # a flag that switches off
        return Extreme(option, fits, gpus, above, options, layout, training)

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

    def _is_enough(self, number: int, days: float | None) -> bool:
        """Whether a layout fits on a number of GPUs, and the training with it takes at most `days`."""
        problem = self._with_gpus(number)
        if problem is None:
            return False
        if days is None:
            return self._fits(problem, self._keep)
        space = space_of(problem, over=self._over, keep=self._keep)
        most = (1 + 1e-9) * days * DAY / self._iterations if self._iterations else inf
        if not any(node.seconds <= most for node in root_nodes(space)) or not self._fits(problem, self._keep):
            return False
        found = self._search(space, "fastest", most_seconds=most, enough=lambda each: self._takes(space, each) <= days)
        return any(self._takes(space, each) <= days for each in found.best)

    def _takes(self, space: Space, layout: Evaluation) -> float:
        """Days of the training with a layout. Raises InputError if the length of the training is not known."""
        training = self._trained(space, layout)
        if training is None:
            fault = "the length of the training is not known"
            raise InputError("--info-search-days", fault, "add --info-tokens, or --train-iters to the launch")
        return training.days

    def _on(self, number: int, below: int | None, days: float | None) -> Extreme:
        """The answer for a number of GPUs that is enough: the fastest layout, or the fastest in time if that is not."""
        problem = self._with_gpus(number)
        space, result = self._fastest(problem, self._keep)
        first = result.best[0]
        if days is not None:
            first = next((each for each in result.best if self._takes(space, each) <= days), first)
        return Extreme("gpus", number, number, below, {}, first, self._trained(space, first))

    def _with_gpus(self, number: int) -> Problem | None:
        """The launch on a number of GPUs; None if no layout is legal."""
        try:
            return with_world(self._problem, number, over=self._over, keep=self._keep)
        except InputError:
            return None

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
            found = () if each is None else self._search(each, "any").best
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
        return space, self._search(space, "fastest")

    def _search(
        self, space: Space, aim: Aim, *, most_seconds: float = inf, enough: Callable[[Evaluation], bool] | None = None
    ) -> SearchResult:
        """A search for an answer. Raises KeyboardInterrupt if it was interrupted, and InputError if its workers are lost."""
        result = search_space(
            space, self._workers, aim=aim, progress=self._progress, most_seconds=most_seconds, enough=enough, advises=False
        )
        if result.ended == INTERRUPTED:
            raise KeyboardInterrupt
        if result.ended:
            raise InputError("--info-workers", f"the search ended early: {result.ended}", "start the workers again")
        return result


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
