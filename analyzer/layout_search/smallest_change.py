"""The smallest change with which a launch that does not fit does: of one dimension if possible, otherwise of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Final

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import Space
from analyzer.layout_search.evaluation import Evaluation, evaluate
from analyzer.layout_search.options import by_flag
from analyzer.layout_search.result import order
from analyzer.layout_search.space import Layout, Recompute, Split, Stages, distributions
from analyzer.layout_search.split_jobs import job_of_layout, layout_changes
from analyzer.memory.screen import screen

MOST: Final = 2
"""Dimensions that are changed together."""
_OF_SPLIT: Final = ("tensor", "context", "expert", "expert_tensor", "micro_batch")


def smallest_change(space: Space) -> Evaluation | None:
    """The fastest layout that fits among those that change the fewest dimensions; None if changes of two are not enough.

    The dimensions are the sizes of tensor, context, expert and expert-tensor parallelism, the micro-batch size, the distribution of
    layers over the pipeline, recomputation, and the other options that are changed together.
    """
    for count in range(1, MOST + 1):
        known: set[Layout] = set()
        found: list[Evaluation] = []
        for layout in _changed(space, count):
            if layout not in known:
                known.add(layout)
                evaluation = _evaluated(space, layout)
                if evaluation is not None:
                    found.append(evaluation)
        if found:
            return min(found, key=order)
    return None


def _evaluated(space: Space, layout: Layout) -> Evaluation | None:
    """The evaluation of a layout; None if it is not legal or does not fit."""
    problem = space.problem
    job = job_of_layout(space, layout)
    try:
        if job is None or screen(job).device_bytes > problem.capacity:
            return None
        options = by_flag(layout_changes(space, layout), problem.arguments)
        return evaluate(layout, options, job, problem.speed, problem.rates) if options else None
    except AnalyzerError:
        return None


def _changed(space: Space, count: int) -> Iterator[Layout]:
    """The layouts that differ from the launch in `count` dimensions."""
    values = _values(space)
    for names in combinations(values, count):
        for chosen in product(*(values[name] for name in names)):
            yield _with(space, dict(zip(names, chosen, strict=True)))


def _values(space: Space) -> dict[str, Sequence[object]]:
    """The other values of each dimension."""
    given, sizes = space.given, space.sizes
    of_split = {
        "tensor": sizes.tensor,
        "context": sizes.context,
        "expert": sizes.expert,
        "expert_tensor": sizes.expert_tensor or (),
        "micro_batch": sizes.micro_batch,
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
    found["setting"] = range(1, len(space.settings))
    return found


def _with(space: Space, values: dict[str, object]) -> Layout:
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
