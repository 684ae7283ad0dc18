"""Time and memory of a search of the complete space, and rates of its two steps.

    python -m benchmarks.search [--check] [--models NAME ...] [--layouts 3000] [--calculon CHECKOUT] [--simumax CHECKOUT]

1. The search of two launches, each in a process of its own with two workers: wall and CPU time, memory, candidates, evaluated
   layouts, and the number of legal layouts. Memory is the largest resident set of the main process plus twice that of a worker:
   pages that processes share are counted several times, so that it is an upper bound.
2. Layouts a second of CPU time on one core, for a model of 70 billion parameters on 1,024 GPUs, with empty caches at the start:
   lower bounds of the memory and the time, and exact memory and time (`benchmarks.evaluations`).
3. With checkouts of other tools: their search next to the one of this program on the same question (`benchmarks.peers`).

With `--check` the exit status is 1 if a bound is missed. The bound of the wall time needs two free cores; CPU time shows whether
there were.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

from analyzer.layout_search.dimensions import Space, space_of
from analyzer.layout_search.executors import workers
from analyzer.layout_search.search import search_space
from analyzer.layout_search.space import Layout, Split, Stages
from analyzer.layout_search.split_jobs import job_of_layout, job_of_split, with_stages
from analyzer.specs.rules import first_violation
from benchmarks.evaluations import rate_in_process
from benchmarks.layouts import DEEPSEEK_V3_UNEVEN, LLAMA_31_405B, problem
from benchmarks.peers import CALCULON_GPUS, LLAMA_3_70B_4096, MEGATRON_22B, SIMUMAX_GPUS, Peer, calculon, simumax

WORKERS: Final = 2
SECONDS: Final = 60.0
"""Most seconds of a search."""
MEMORY: Final = 1_000_000_000
"""Most bytes of a search."""
RATES: Final = {"bounds": 1000.0, "memory and time": 50.0}
"""Fewest layouts a second, by the level of `benchmarks.evaluations`."""
LAYOUTS: Final = 3000
SAMPLE: Final = 500
"""Random candidates for which the rules are compared with a build of the complete job."""


class Launch(NamedTuple):
    """A launch whose layouts are searched."""

    line: str
    gpus: int
    fewest: int = 1
    """Legal layouts that its space has at least."""
    gpu: str = "H100-80GB"


LAUNCHES: Final = {
    "Llama-3.1-405B": Launch(LLAMA_31_405B, 16_384, 20_000),
    "DeepSeek-V3": Launch(DEEPSEEK_V3_UNEVEN, 2048, 20_000),
}
OF_PEERS: Final = {
    "Megatron-22B": Launch(MEGATRON_22B, CALCULON_GPUS),
    "Llama-3-70B": Launch(LLAMA_3_70B_4096, SIMUMAX_GPUS, gpu="A100-80GB"),
}
EVERY: Final = {**LAUNCHES, **OF_PEERS}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A search."""

    seconds: float
    """From the start of the search to its result."""
    cpu_seconds: float
    """Of the main process, including its start, and of its workers."""
    main_bytes: int
    worker_bytes: int
    """Largest resident sets of the main process and of a worker."""
    candidates: int
    evaluated: int
    fastest: float | None
    """Seconds of an iteration."""
    fastest_options: dict[str, object] | None

    @property
    def bytes(self) -> int:
        """An upper bound of the memory of all processes."""
        return self.main_bytes + WORKERS * self.worker_bytes


@dataclass(frozen=True, kw_only=True)
class Legal:
    """The legal layouts of a space."""

    layouts: int
    differences: int
    """Random candidates for which the rules and a build of the job disagree."""
    sampled: int


def searched(name: str) -> Measured:
    """Runs a search in this process."""
    space = _space(name)
    with workers(str(WORKERS)) as found:
        result = search_space(space, found)
    while multiprocessing.active_children():  # their resources count when they have ended
        time.sleep(0.01)
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    best = result.best[0] if result.best else None
    return Measured(
        seconds=result.seconds,
        cpu_seconds=sum(each.ru_utime + each.ru_stime for each in (own, children)),
        main_bytes=own.ru_maxrss * unit,
        worker_bytes=children.ru_maxrss * unit,
        candidates=result.candidates,
        evaluated=result.evaluated,
        fastest=None if best is None else best.iteration_seconds,
        fastest_options=None if best is None else best.options,
    )


def _space(name: str) -> Space:
    launch = EVERY[name]
    return space_of(problem(launch.line, gpus=launch.gpus, gpu=launch.gpu))


def legal(name: str) -> Legal:
    """Counts the legal layouts of a space: the distributions of layers that the rules accept, each with the ways to recompute
    activations that a build accepts in the launch."""
    space = _space(name)
    accepted = [
        each for each in space.recomputes(Stages()) if job_of_layout(space, space.given._replace(recompute=each)) is not None
    ]
    count = 0
    for split in space.splits():
        for setting in space.settings_of(split):
            for stages in _legal_stages(space, setting, split):
                count += sum(each in accepted for each in space.recomputes(stages))
    different, sampled = _differences(space)
    return Legal(layouts=count, differences=different, sampled=sampled)


def _legal_stages(space: Space, setting: int, split: Split) -> list[Stages]:
    found = job_of_split(space, setting, split)
    if found is None:
        return []
    return [each for each in space.stages(split) if first_violation(with_stages(space, setting, found.job, each)) is None]


def _differences(space: Space) -> tuple[int, int]:
    """Random candidates for which the rules and a build disagree, and their number."""
    chosen = random.Random(0)
    splits = list(space.splits())
    wrong = 0
    for _ in range(SAMPLE):
        split = chosen.choice(splits)
        setting = chosen.choice(list(space.settings_of(split)))
        stages = chosen.choice(list(space.stages(split)))
        recompute = chosen.choice(list(space.recomputes(stages)))
        built = job_of_layout(space, Layout(setting, split, stages, recompute)) is not None
        wrong += built != (stages in _legal_stages(space, setting, split))
    return wrong, SAMPLE


def _in_process(what: str, name: str) -> dict[str, object]:
    """A measurement in a new process, so that caches are empty and the memory is its own."""
    command = [sys.executable, "-m", "benchmarks.search", "--measure", what, "--models", name]
    found: dict[str, object] = json.loads(subprocess.check_output(command, text=True))
    return found


def _print_search(name: str) -> list[str]:
    """Prints a search. Returns the missed bounds."""
    found = Measured(**_in_process("search", name))  # type: ignore[arg-type]
    space = Legal(**_in_process("legal", name))  # type: ignore[arg-type]
    launch = EVERY[name]
    fewest, gpus = launch.fewest, launch.gpus
    print(f"{name} on {gpus:,} GPUs, {WORKERS} workers")
    print(f"  {found.seconds:.1f} s, CPU time {found.cpu_seconds:.1f} s")
    print(f"  {found.bytes / 1e6:.0f} MB: {found.main_bytes / 1e6:.0f}, and {WORKERS} times {found.worker_bytes / 1e6:.0f}")
    print(f"  {found.candidates:,} candidates, {space.layouts:,} legal, {found.evaluated:,} evaluated exactly")
    print(f"  {space.differences} of {space.sampled} random candidates are legal for the rules only, or for a build only")
    if found.fastest is not None:
        print(f"  fastest: {found.fastest:.3f} s, {found.fastest_options}")
    missed = []
    if found.seconds > SECONDS:
        missed.append(f"{name}: {found.seconds:.1f} s, bound {SECONDS:.0f}; CPU time {found.cpu_seconds:.1f} s")
    if found.bytes > MEMORY:
        missed.append(f"{name}: {found.bytes / 1e6:.0f} MB, bound {MEMORY / 1e6:.0f}")
    if space.layouts < fewest:
        missed.append(f"{name}: {space.layouts:,} legal layouts, bound {fewest:,}")
    if space.differences:
        missed.append(f"{name}: the rules and a build disagree on {space.differences} of {space.sampled} candidates")
    return missed


def _print_rates(count: int) -> list[str]:
    """Prints the rates of the steps. Returns the missed bounds."""
    missed = []
    for level, bound in RATES.items():
        rate = rate_in_process("Llama-3-70B", level, count)
        print(f"Llama-3-70B on 1,024 GPUs, {count:,} layouts, {level}: {rate:,.0f} a second on one core")
        if rate < bound:
            missed.append(f"{level}: {rate:,.0f} a second, bound {bound:,.0f}")
    return missed


def _print_peer(tool: str, name: str, found: Peer) -> None:
    """Prints a search of another tool and the one of this program."""
    own = Measured(**_in_process("search", name))  # type: ignore[arg-type]
    print(f"{name} on {OF_PEERS[name].gpus:,} GPUs, the same question")
    rate = found.layouts / found.seconds
    print(f"  {tool}: {found.seconds:.1f} s, {found.layouts:,} layouts, {rate:,.0f} a second; {found.fit:,} fit")
    rate = own.candidates / own.seconds
    print(f"  this program: {own.seconds:.1f} s, {own.candidates:,} layouts, {rate:,.0f} a second; {own.evaluated:,} exactly")
    print(f"  {found.seconds / own.seconds:.1f} times faster")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bound is missed")
    parser.add_argument("--models", nargs="*", choices=tuple(EVERY), default=tuple(LAUNCHES), help="launches to search")
    parser.add_argument("--layouts", type=int, default=LAYOUTS, help=f"layouts of the rates (default: {LAYOUTS}); 0: no rates")
    parser.add_argument("--calculon", type=Path, help="checkout of Calculon, to run its search as well")
    parser.add_argument("--simumax", type=Path, help="checkout of the first release of SimuMax, to run its search as well")
    parser.add_argument("--measure", choices=("search", "legal"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measured = (searched if options.measure == "search" else legal)(options.models[0])
        print(json.dumps(asdict(measured)))
        return 0
    missed = [fault for name in options.models for fault in _print_search(name)]
    try:
        if options.calculon is not None:
            _print_peer("Calculon", "Megatron-22B", calculon(options.calculon.resolve(), processes=WORKERS))
        if options.simumax is not None:
            _print_peer("SimuMax", "Llama-3-70B", simumax(options.simumax.resolve()))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.layouts:
        missed += _print_rates(options.layouts)
    for fault in missed:
        print(f"missed: {fault}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
