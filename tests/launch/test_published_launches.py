"""Launch scripts of Megatron-LM: they are accepted or refused as by its own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analyzer.errors import InputError
from analyzer.launch.parse import parse
from tests.data_files import measured_records, truth_records


def records() -> list[dict[str, Any]]:
    return truth_records("launches.json")


@pytest.mark.parametrize("index", range(52))
def test_the_outcome_is_that_of_megatrons_parser(index: int) -> None:
    record = records()[index]
    argv = [*record["launcher_argv"], record["entry"], *record["entry_argv"]]
    outcome = record["megatron"]["parse"]
    if outcome == "ok":
        arguments, world, _ = parse(argv, environ={}, folder=Path("/nowhere"))
        assert arguments.entry == "pretrain_gpt.py"
        if record["launcher"] == "torchrun":
            assert world is not None
            assert world.size == record["stated"]["world_size"]
        given = [word for word in record["entry_argv"] if word.startswith("--")]
        assert set(arguments.spelled.values()) <= set(given)
        assert len(arguments.given) == len(set(given))
    elif "--activations-checkpoint-method" in outcome:
        arguments, _, _ = parse(argv, environ={}, folder=Path("/nowhere"))
        assert arguments.release == "2023"
        assert (arguments.values["recompute_granularity"], arguments.values["recompute_method"]) == ("full", "uniform")
        with pytest.raises(InputError, match=r"^--activations-checkpoint-method"):
            parse([*argv, "--info-megatron", "0.16.1"], environ={}, folder=Path("/nowhere"))
    else:
        refused = outcome.partition("unrecognized arguments: ")[2].split()
        with pytest.raises(InputError) as error:
            parse([*argv, "--info-strict"], environ={}, folder=Path("/nowhere"))
        assert refused[0] in error.value.option.split(", ") or repr(refused[0]) in error.value.fault


def test_every_measured_launch_is_parsed() -> None:
    for name in ("megatron_ci", "b200"):
        for record in measured_records(f"{name}.json"):
            argv = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"]), *record["argv"]]
            _, world, _ = parse(argv, environ={}, folder=Path("/nowhere"))
            assert world is not None
            assert world.size == record["nodes"] * record["gpus_per_node"]
