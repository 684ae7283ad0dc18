"""Compare the formulas with the shadow engine on random launches: `python tools/random_layouts.py SEED NUMBER`.

Needs the shadow extra. Launches that the formulas reject, that Megatron fails to run according to a warning, or that the engine
does not support, are replaced. Each other launch is printed with its differences: tensors above 16 KiB that only one side has,
collectives, numbers of GEMMs and attention kernels, and totals that differ by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from allocator_hook.shadow.engine import enough_microbatches
from analyzer.cli.shadow_report import Compared, comparisons, recorded_ranks
from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.predict import predict
from analyzer.results import Report
from tests.fuzz.random_launches import FEATURES, PARTS, RandomLaunches
from tools.kept_sessions import KeptSessions

TOLERANCE: Final = 0.001
SMALL: Final = 16384
"""Bytes. Smaller tensors are not compared: sums and counters, which the formulas do not list."""

NOT_COMPARED: Final = ("Megatron fails in the first forward pass", "this release does not train MTP layers")
"""Parts of warnings about a launch that the shadow engine cannot run, or whose predicted peak is said to be too high."""


@dataclass(frozen=True)
class Difference:
    """One difference between the engines."""

    kind: str
    """total, tensor, collective or kernel; failure if the shadow engine gave an error."""
    stage: int
    text: str
    share: float = 0.0
    """Of a total: predicted minus recorded bytes, relative to the recorded."""


@dataclass(frozen=True)
class Result:
    """The comparison of one launch."""

    words: tuple[str, ...]
    differences: tuple[Difference, ...]
    seconds: float

    @property
    def kind(self) -> str:
        """agrees, or the most serious kind of difference."""
        kinds = {each.kind for each in self.differences}
        return next((kind for kind in ("failure", "total", "collective", "tensor", "kernel") if kind in kinds), "agrees")

    @property
    def largest(self) -> Difference | None:
        """The total with the largest relative difference; None if all totals agree."""
        totals = [each for each in self.differences if each.kind == "total"]
        return max(totals, key=lambda each: abs(each.share), default=None)


class Comparer:
    """Compares launches in this process. Packages are imported once."""

    def __init__(self) -> None:
        self._sessions = KeptSessions()

    def result(self, words: Sequence[str]) -> Result | None:
        """Return the comparison of a launch; None if the formulas reject it."""
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                report = _report(words, Path(folder))
            except InputError:
                return None
            if any(part in warning for part in NOT_COMPARED for warning in report.warnings):
                return None
            try:
                found = tuple(self._differences(report, Path(folder)))
            except InputError:  # the engine does not support an option
                return None
            except AnalyzerError as error:
                found = (Difference("failure", 0, f"the shadow engine failed: {error}"),)
        return Result(tuple(words), found, time.monotonic() - begin)

    def _differences(self, report: Report, folder: Path) -> Iterator[Difference]:
        job = report.job
        traces = self._sessions.record(job, recorded_ranks(report), folder)
        count = enough_microbatches(job)
        if count != job.batch.microbatches:
            report = predict(replace(job, batch=replace(job.batch, microbatches=count, first_microbatches=count)))
        for each in comparisons(report, traces, tolerance=TOLERANCE):
            yield from _of_rank(each)


def _report(words: Sequence[str], folder: Path) -> Report:
    arguments, world, options = parse(list(words), environ={}, folder=folder)
    gpu, _ = hardware(options.gpu, None)
    return predict(build(arguments, world, environ={}, gpu=gpu, folder=folder, moe_imbalance=options.moe_imbalance))


def _of_rank(compared: Compared) -> Iterator[Difference]:
    stage, comparison = compared.rank.pipeline_rank, compared.comparison
    for row in comparison.modules:
        predicted = [f"{tensor.name} {tensor.bytes:,}" for tensor in row.only_predicted if tensor.bytes > SMALL]
        recorded = [f"{size:,}" for size in row.only_recorded if size > SMALL]
        if predicted or recorded:
            yield Difference("tensor", stage, f"{row.module}: only predicted {predicted}, only recorded {recorded}")
    for collective in comparison.collectives:
        yield Difference("collective", stage, str(collective))
    for total in comparison.totals:
        if abs(total.error) > TOLERANCE:
            text = f"{total.name}: {total.predicted:,} predicted, {total.recorded:,} recorded ({total.error:+.2%})"
            yield Difference("total", stage, text, total.error)
    for kernel in comparison.kernels.rows if comparison.kernels is not None else ():
        yield Difference("kernel", stage, str(kernel))


def phrases(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the options of a launch after its script, each with its operands."""
    found: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word,))
        else:
            found[-1] += (word,)
    return found


def minimised(comparer: Comparer, result: Result) -> Result:
    """Leave out options as long as a total differs by more than the tolerance, or the kind of the difference stays."""
    entry = next(place for place, word in enumerate(result.words, start=1) if word.endswith(".py"))
    start, kept = result.words[:entry], phrases(result.words[entry:])
    for phrase in reversed(list(kept)):
        fewer = [each for each in kept if each is not phrase]
        found = comparer.result([*start, *(word for each in fewer for word in each)])
        if found is not None and found.kind == result.kind:
            kept, result = fewer, found
    return result


_COMPARERS: Final[list[Comparer]] = []
"""The comparer of this process."""


def _drawn(task: tuple[int, int, bool, str]) -> Result:
    """Compare the launch with this number of the launches of a seed, with this feature if it is not empty."""
    seed, index, minimise, wanted = task
    if not _COMPARERS:
        _COMPARERS.append(Comparer())
    launches = RandomLaunches(random.Random(f"{seed}:{index}").randrange)
    feature = wanted or launches.feature()
    while (result := _COMPARERS[0].result(launches.any_launch(feature))) is None:
        pass
    return minimised(_COMPARERS[0], result) if minimise and result.kind not in ("agrees", "kernel") else result


def results(seed: int, number: int, *, jobs: int, minimise: bool = False, feature: str = "") -> Iterator[Result]:
    """Yield the comparisons of the launches of a seed, in their order, computed by `jobs` processes."""
    tasks: Iterable[tuple[int, int, bool, str]] = ((seed, index, minimise, feature) for index in range(number))
    if jobs == 1:
        yield from map(_drawn, tasks)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(_drawn, tasks)


def summary(found: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of the summary: numbers of launches by result, and the launches with a differing total, highest first."""
    numbers = Counter(each.kind for each in found)
    yield f"{len(found)} launches, {sum(each.seconds for each in found) / max(1, len(found)):.1f} seconds for each"
    yield f"{numbers['agrees']} agree in every tensor, collective, kernel and total"
    yield f"{numbers['kernel']} differ in kernels only"
    yield f"{numbers['tensor'] + numbers['collective']} differ in tensors of modules or in collectives, not in totals"
    yield f"{numbers['failure']} fail in the shadow engine"
    yield f"{numbers['total']} differ in a total by more than {TOLERANCE:.1%}"
    ranked = [(each.largest, index, each) for index, each in enumerate(found) if each.largest is not None]
    for difference, index, _ in sorted(ranked, key=lambda each: -abs(each[0].share)):
        yield f"    launch {index}, stage {difference.stage}, {difference.text}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print NUMBER launches and their differences, and a summary."""
    parser = argparse.ArgumentParser(description="Compares the formulas with the shadow engine on random launches.")
    parser.add_argument("seed", type=int, help="seed of the random launches")
    parser.add_argument("number", type=int, help="number of launches that the formulas accept")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes; default: one for each core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write launches and differences to this file")
    parser.add_argument("--minimise", action="store_true", help="leave out options of a differing launch that do not matter")
    parser.add_argument("--feature", choices=sorted({*FEATURES, *PARTS}), default="", help="draw only launches with this feature")
    given = parser.parse_args(argv)
    found = []
    drawn = results(given.seed, given.number, jobs=given.jobs, minimise=given.minimise, feature=given.feature)
    for index, each in enumerate(drawn):
        found.append(each)
        print(f"{index} {each.kind}:", *each.words)
        print(*(f"    stage {row.stage}: {row.text}\n" for row in each.differences), sep="", end="", flush=True)
        if given.json:
            given.json.write_text(json.dumps([asdict(row) | {"kind": row.kind} for row in found], indent=1))
    print(*summary(found), sep="\n")


if __name__ == "__main__":
    main()
