"""Compare the formulas with the shadow engine on random launches: `python tools/random_layouts.py SEED NUMBER`.

Needs the shadow extra. Launches that the formulas reject are replaced. Each other launch is printed with its differences: tensors
above 16 KiB that only one side has, collectives, numbers of GEMMs and attention kernels, and totals that differ by more than 0.1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from analyzer.cli.shadow import run_engine
from analyzer.errors import AnalyzerError, InputError
from analyzer.hardware.gpus import hardware
from analyzer.launch.build import build
from analyzer.launch.parse import parse
from analyzer.predict import predict
from tests.fuzz.random_launches import RandomLaunches

TOLERANCE = 0.001
SMALL = 16384
"""Bytes. Smaller tensors are not compared: sums and counters, which the formulas do not list."""


def differences(words: list[str]) -> Iterator[str] | None:
    """Return one line for each difference between the two engines; None if the formulas reject the launch."""
    with tempfile.TemporaryDirectory() as cache:
        environ = {"XDG_CACHE_HOME": cache}
        try:
            arguments, world, options = parse(words, environ=environ, folder=Path(cache))
            gpu, _ = hardware(options.gpu, None)
            job = build(arguments, world, environ=environ, gpu=gpu, folder=Path(cache), moe_imbalance=options.moe_imbalance)
            report = predict(job)
        except InputError:
            return None
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                _, compared = run_engine(report, engine="both", argv=words, environ=environ, tolerance=TOLERANCE)
        except AnalyzerError as error:
            return iter([f"the shadow engine failed: {error}"])
    found = []
    for each in compared:
        stage = f"stage {each.rank.pipeline_rank}"
        for row in each.comparison.modules:
            predicted = [f"{tensor.name} {tensor.bytes:,}" for tensor in row.only_predicted if tensor.bytes > SMALL]
            recorded = [f"{size:,}" for size in row.only_recorded if size > SMALL]
            if predicted or recorded:
                found.append(f"{stage}, {row.module}: only predicted {predicted}, only recorded {recorded}")
        found += [f"{stage}: {row}" for row in each.comparison.collectives]
        found += [
            f"{stage}, {total.name}: {total.predicted:,} predicted, {total.recorded:,} recorded ({total.error:+.2%})"
            for total in each.comparison.totals
            if abs(total.error) > TOLERANCE
        ]
        if each.comparison.kernels is not None:
            found += [f"{stage}: {row}" for row in each.comparison.kernels.rows]
    return iter(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Print NUMBER launches and their differences."""
    parser = argparse.ArgumentParser(description="Compares the formulas with the shadow engine on random launches.")
    parser.add_argument("seed", type=int, help="seed of the random launches")
    parser.add_argument("number", type=int, help="number of launches that the formulas accept")
    given = parser.parse_args(argv)
    launches = RandomLaunches(random.Random(given.seed).randrange)
    agreeing = done = 0
    while done < given.number:
        words = launches.launch()
        found = differences(words)
        if found is None:
            continue
        lines = list(found)
        done += 1
        agreeing += not lines
        print("differs:" if lines else "agrees:", *words)
        print(*(f"    {line}" for line in lines), sep="\n" if lines else "", end="\n" if lines else "", flush=True)
    print(f"{agreeing} of {given.number} agree in every tensor, collective, kernel and total")


if __name__ == "__main__":
    main()
