"""The smallest change with which a launch that does not fit does: of one dimension if possible, otherwise of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import inf
from typing import Final, NamedTuple

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, seconds_of, with_memory
from analyzer.layout_search.result import order
from analyzer.layout_search.space import Layout, Recompute, Split, Stages, distributions
from analyzer.layout_search.split_jobs import changed_options, job_of_layout
from analyzer.layout_search.state_floors import StateFloors
from analyzer.memory.screen import screen
from analyzer.specs import TrainingJob

MOST: Final = 2
"""Dimensions that are changed together."""
_OF_SPLIT: Final = ("tensor", "context", "expert", "expert_tensor", "micro_batch", "sequence")

Values = Mapping[str, Sequence[object]]
"""Other values of each dimension than those of the launch."""


class Changed(NamedTuple):
    """A legal layout that differs from the launch in some dimensions."""

    names: tuple[str, ...]
    """The dimensions, in the order of `other_values`."""
    values: tuple[object, ...]
    layout: Layout
    job: TrainingJob
    least_bytes: int
    """A lower bound of the device memory."""


def smallest_change(space: Space) -> Evaluation | None:
    """The fastest layout that fits among those that change the fewest dimensions; None if changes of two are not enough.

    The dimensions are the sizes of tensor, context, expert and expert-tensor parallelism, the micro-batch size, sequence
    parallelism, the distribution of layers over the pipeline, recomputation, and the other options that are changed together.
    """
    values, may_fit = other_values(space), fits_states(space)
    for count in range(1, MOST + 1):
        found = fastest(space, changed_layouts(space, values, count, may_fit))
        if found:
            return min(found.values(), key=order)
    return None


def fits_states(space: Space) -> Callable[[Layout], bool]:
    """Whether a lower bound of the model states of a layout fits."""
    states, capacity = StateFloors(space), space.problem.capacity
    return lambda layout: states.of_layout(layout) <= capacity


def fastest(space: Space, layouts: Iterable[Changed], *, within: float = inf) -> dict[tuple[str, ...], Evaluation]:
    """For each combination of changed dimensions the fastest layout that fits; combinations without one are left out.

    `within`: seconds of an iteration that a layout may take at most.
    """
    problem = space.problem
    found: dict[tuple[str, ...], Evaluation] = {}
    slow: list[Recompute] = []
    """Recomputations that take so long that one of more modules, which takes longer, is not the fastest."""
    for changed in layouts:
        if changed.least_bytes > problem.capacity:
            continue
        options = changed_options(space, changed.layout)
        if not options:
            continue
        best, recompute = found.get(changed.names), changed.layout.recompute
        limit = within if best is None else best.iteration_seconds
        only_recompute = changed.names == ("recompute",)
        if only_recompute and any(_recomputes_more(recompute, each) for each in slow):
            continue
        try:
            seconds, parts = seconds_of(changed.job, problem.speed, problem.rates)
            is_needed = seconds <= limit
            each = with_memory(changed.layout, options, changed.job, problem.speed, seconds, parts) if is_needed else None
        except AnalyzerError:
            continue
        if only_recompute and (each is not None or not is_needed):
            slow.append(recompute)
        if each is not None and (best is None or order(each) < order(best)):
            found[changed.names] = each
    return found


def _recomputes_more(recompute: Recompute, other: Recompute) -> bool:
    """Whether a recomputation has the modules of another, and others: it takes longer."""
    if "full" in (recompute.granularity, other.granularity):
        return False
    return set(recompute.modules).issuperset(other.modules)


def changed_layouts(
    space: Space, values: Values, count: int, is_needed: Callable[[Layout], bool] = lambda _: True
) -> Iterator[Changed]:
    """The legal layouts that differ from the launch in `count` dimensions, those that are needed."""
    known: set[Layout] = set()
    for names in combinations(values, count):
        for chosen in product(*(values[name] for name in names)):
            layout = with_values(space, dict(zip(names, chosen, strict=True)))
            if layout in known:
                continue
            known.add(layout)
            if not is_needed(layout):
                continue
            try:
                job = job_of_layout(space, layout)
                if job is not None:
                    yield Changed(names, chosen, layout, job, screen(job).device_bytes)
            except AnalyzerError:
                continue


def other_values(space: Space) -> Values:
    """The other values of each dimension."""
    given, sizes = space.given, space.sizes
    of_split = {
        "tensor": sizes.tensor,
        "context": sizes.context,
        "expert": sizes.expert,
        "expert_tensor": sizes.expert_tensor or (),
        "micro_batch": sizes.micro_batch,
        "sequence": space.sequences(given.split.tensor),
    }
    found: dict[str, Sequence[object]] = {
        name: [value for value in values if value != getattr(given.split, name)] for name, values in of_split.items()
    }
    found["stages"] = [
        stages
        for pipeline in sizes.pipeline
        for stages in distributions(pipeline, space.scale.layers, tuple(sizes.virtual), tuple(sizes.uneven))
        if stages[:2] != given.stages[:2] and space.may_have(stages)
    ]
    found["recompute"] = [each for each in space.recomputes(given.stages) if not each.given]
    found["setting"] = range(1, len(space.plain_settings))
    return found


def with_values(space: Space, values: dict[str, object]) -> Layout:
    """The layout of the launch with other values of some dimensions.

    Sequence parallelism comes with tensor parallelism, and experts are split over as many ranks as other layers unless their size
    is given.
    """
    given = space.given
    split = given.split._replace(**{name: value for name, value in values.items() if name in _OF_SPLIT})  # type: ignore[arg-type]
    if "tensor" in values:
        split = split._replace(sequence=space.sequences(split.tensor)[0])
    implied = space.problem.arguments.get("expert_tensor_parallel_size") is None
    if "tensor" in values and "expert_tensor" not in values and implied:
        split = split._replace(expert_tensor=split.tensor)
    stages, recompute, setting = values.get("stages"), values.get("recompute"), values.get("setting")
    return Layout(
        setting if isinstance(setting, int) else given.setting,
        Split(*split),
        stages if isinstance(stages, Stages) else given.stages,
        recompute if isinstance(recompute, Recompute) else given.recompute,
    )
