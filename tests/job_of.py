"""Creates jobs for tests from a line of options, parsed with the catalogue of one release."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from analyzer.launch.arguments import Arguments
from analyzer.launch.argv_parser import is_option, read_words
from analyzer.launch.build import build
from analyzer.launch.coverage.legacy_options import refuse_retired
from analyzer.launch.derive.launch_input import LaunchInput
from analyzer.launch.launchers.world import World
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.options.option_table import OptionTable
from analyzer.layout.groups import RankRanges
from analyzer.modules.stage import StageModel
from analyzer.passes.stages import stage_models
from analyzer.specs import HardwareSpec, TrainingJob
from analyzer.states.buffers.of_stage import stage_buffers
from analyzer.states.of_rank import stage_states, states_by_ranks
from analyzer.states.record import States

BASE = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000"
)
BASE_2023 = BASE.replace("--tokenizer-type NullTokenizer --vocab-size 32000", "--tokenizer-type NullTokenizer --vocab-size 50256")
VOLTA = HardwareSpec(name="V100-32GB", compute_capability=(7, 0))
HOPPER = HardwareSpec(name="H100-80GB", compute_capability=(9, 0))
AMPERE = HardwareSpec(name="A100-80GB", compute_capability=(8, 0))
BLACKWELL = HardwareSpec(name="B200", compute_capability=(10, 0))
HARDWARE = {gpu.name: gpu for gpu in (HOPPER, VOLTA, AMPERE, BLACKWELL)}


@cache
def _table(release: str) -> OptionTable:
    return load_catalogue().table(release)


def arguments_of(line: str, *, release: str = "0.16.1") -> Arguments:
    """Return the arguments that `release` parses from a line of options."""
    table = _table(release)
    for word in line.split():
        if is_option(word):
            refuse_retired(word)
    reading = read_words(line.split(), table)
    return Arguments(
        values={**table.defaults, **reading.values},
        given=frozenset(reading.values),
        spelled=reading.spelled,
        release=release,
        source="test",
        entry=None,
        assumptions=(),
    )


def launch_of(
    line: str,
    *,
    release: str = "0.16.1",
    environ: Mapping[str, str] | None = None,
    gpu: HardwareSpec = HOPPER,
    folder: Path = Path("/nowhere"),
) -> LaunchInput:
    """Return the input from which specs are derived, for a line of options."""
    arguments = arguments_of(line, release=release)
    return LaunchInput(arguments=arguments, environ=environ or {}, folder=folder, gpu=gpu)


def job_of(
    line: str,
    *,
    base: str = BASE,
    gpus: int = 8,
    release: str = "0.16.1",
    environ: Mapping[str, str] | None = None,
    gpu: HardwareSpec = HOPPER,
    folder: Path = Path("/nowhere"),
) -> TrainingJob:
    """Return the job of `base` and `line` on nodes of at most eight GPUs."""
    world = World(1, gpus) if gpus < 8 else World(gpus // 8, 8)
    return build(arguments_of(f"{base} {line}", release=release), world, environ=environ or {}, gpu=gpu, folder=folder)


def states_of(job: TrainingJob, stage: StageModel | None = None) -> States:
    """Return the model states of one rank of a pipeline stage (default: the first stage)."""
    stage = stage or stage_models(job)[0]
    return stage_states(job, stage, stage_buffers(job, stage))


def states_by_ranks_of(job: TrainingJob, stage: StageModel | None = None) -> tuple[tuple[RankRanges, States], ...]:
    """Return the groups of ranks of a pipeline stage that have equal model states, and those states."""
    stage = stage or stage_models(job)[0]
    buffers = stage_buffers(job, stage)
    return states_by_ranks(job, stage, buffers, stage_states(job, stage, buffers))
