"""Lower bounds for all ways to recompute activations in a layout, from a few of them.

Recomputation of more modules takes longer, and saves at most what each of them saves alone. Two modules save more together: core
attention keeps copies of what the up projections of latent attention compute, so both together are also looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import inf
from typing import NamedTuple

from analyzer.layout_search.bounds import BlockCache, Bounds, SplitFigures, least_seconds, parameters_of_rank, plan_of
from analyzer.layout_search.space import Recompute
from analyzer.memory.device_overhead import outside_allocator_bytes
from analyzer.memory.screen import has_known_flight, least_state_bytes, microbatches_in_flight
from analyzer.specs import TrainingJob
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies

TOGETHER = frozenset({"core_attn", "mla_up_proj"})
"""Modules that save more together than one by one."""
NONE = Recompute()


class Variants:
    """The ways to recompute activations, for jobs that differ only in their stages, batch and world."""

    def __init__(
        self, build: Callable[[Recompute], TrainingJob | None], speed: SpeedSpec, rates: Efficiencies, attention: BlockCache
    ) -> None:
        self._build, self._speed, self._rates = build, speed, rates
        self._figures: dict[Recompute, SplitFigures | None] = {}
        self._blocks: BlockCache = {}
        self._attention = attention

    def bounds(
        self, job: TrainingJob, recomputes: Iterable[Recompute], base: Bounds, *, capacity: float = inf, timed: bool = True
    ) -> Iterator[tuple[Recompute, Bounds]]:
        """The bounds of each recomputation of a job with at most `capacity` bytes.

        `base`: those of the job without, which are at most as high. If not `timed`, the bounds of the time are those of `base`.
        """
        of_job = _OfJob(job, self._of, base, self._speed, self._rates)
        for recompute in recomputes:
            device_bytes = base.device_bytes if recompute.given else of_job.device_bytes(recompute)
            if device_bytes <= capacity:
                seconds = base.seconds if recompute.given or not timed else of_job.seconds(recompute)
                yield recompute, Bounds(seconds, device_bytes)

    def _of(self, atom: Recompute) -> SplitFigures | None:
        if atom not in self._figures:
            job = self._build(atom)
            self._figures[atom] = (
                SplitFigures(job, self._speed, self._rates, blocks=self._blocks, attention=self._attention)
                if job is not None
                else None
            )
        return self._figures[atom]


class _Rank(NamedTuple):
    """A pipeline rank."""

    states: int
    """Bytes of the model states, and outside the allocator."""
    in_flight: tuple[tuple[int, int], ...]
    """Kinds of chunks, and how many microbatches keep activations in chunks of this kind."""


class _OfJob:
    """The bounds of one job."""

    def __init__(
        self,
        job: TrainingJob,
        figures: Callable[[Recompute], SplitFigures | None],
        base: Bounds,
        speed: SpeedSpec,
        rates: Efficiencies,
    ) -> None:
        self._job, self._figures, self._base, self._speed, self._rates = job, figures, base, speed, rates
        self._plan = plan_of(job)
        self._seconds: dict[Recompute, float] = {}
        self._savings: dict[Recompute, tuple[int, ...]] = {}
        plain = figures(NONE)
        self._kept = () if plain is None else tuple(plain.retained(kind) for kind in self._plan.kinds)
        self._ranks = self._of_ranks(plain) if plain is not None and has_known_flight(job) else ()

    def device_bytes(self, recompute: Recompute) -> int:
        """The bound of the memory of a recomputation."""
        if not self._ranks:
            return self._base.device_bytes
        saved = _saved([(atom, self._savings_of(atom)) for atom in _atoms(recompute)], len(self._kept))
        left = [max(0, kept - less) for kept, less in zip(self._kept, saved, strict=True)]
        memory = max(rank.states + sum(number * left[kind] for kind, number in rank.in_flight) for rank in self._ranks)
        return max(self._base.device_bytes, memory)

    def seconds(self, recompute: Recompute) -> float:
        """The bound of the time of a recomputation."""
        return max([self._base.seconds, *(self._seconds_of(atom) for atom in _atoms(recompute))])

    def _seconds_of(self, atom: Recompute) -> float:
        if atom not in self._seconds:
            figures = self._figures(atom)
            found = None if figures is None else least_seconds(self._job, figures, self._speed, self._rates)
            self._seconds[atom] = 0.0 if found is None else found
        return self._seconds[atom]

    def _savings_of(self, atom: Recompute) -> tuple[int, ...]:
        """Bytes that a recomputation saves in each kind of chunk: all, if the layout that figures are taken of refuses it."""
        if atom not in self._savings:
            figures = self._figures(atom)
            left = [0 if figures is None else figures.retained(kind) for kind in self._plan.kinds]
            self._savings[atom] = tuple(kept - rest for kept, rest in zip(self._kept, left, strict=True))
        return self._savings[atom]

    def _of_ranks(self, plain: SplitFigures) -> tuple[_Rank, ...]:
        job, plan = self._job, self._plan
        chunks = [parameters for kind in plan.kinds if (parameters := plain.parameters(kind)) is not None]
        if len(chunks) < len(plan.kinds):
            return ()
        found = []
        for rank in plan.first:
            of_rank = parameters_of_rank([chunks[place] for place in plan.ranks[rank]])
            states = least_state_bytes(job, **of_rank._asdict())
            numbers: Counter[int] = Counter()
            for place, number in zip(plan.ranks[rank], microbatches_in_flight(job, rank), strict=True):
                numbers[place] += number
            found.append(_Rank(states + outside_allocator_bytes(job), tuple(numbers.items())))
        return tuple(found)


@lru_cache(maxsize=1024)
def _atoms(recompute: Recompute) -> tuple[Recompute, ...]:
    """The recomputations whose figures bound those of another."""
    if recompute.granularity == "full":
        return (recompute,)
    modules = [(module,) for module in recompute.modules]
    pair = [tuple(module for module in recompute.modules if module in TOGETHER)]
    return tuple(Recompute("selective", modules=each) for each in chain(modules, (each for each in pair if len(each) > 1)))


def _saved(savings: Sequence[tuple[Recompute, tuple[int, ...]]], kinds: int) -> list[int]:
    """Most bytes that a recomputation can save in each kind of chunk. `savings`: those of its atoms."""
    found = []
    for kind in range(kinds):
        total = of_pair = pair = 0
        for atom, saved in savings:
            if len(atom.modules) > 1:
                pair = saved[kind]
                continue
            least = max(0, saved[kind]) if atom.modules else saved[kind]
            total += least
            of_pair += least if atom.modules and atom.modules[0] in TOGETHER else 0
        found.append(total + max(0, pair - of_pair))
    return found
