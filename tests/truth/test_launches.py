"""Launch scripts of Megatron-LM end to end: what Megatron takes is analysed or refused by name, what it refuses is refused.

The records hold what the parser (and for core 0.16.1 also `validate_args`) of the script's own release said.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.command import assert_refused, run
from tests.data_files import truth_records

FILE = "launches.json"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such a script sets, and nothing of the machine that runs the test."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def name(record: dict[str, Any]) -> str:
    return f"{record['script'].removeprefix('examples/')}-{record['variant']}"


def argv(record: dict[str, Any]) -> list[str]:
    """The launch with torchrun's options, or with those that stand for the tasks of a batch system."""
    stated = record["stated"]
    if record["launcher"] != "python":
        return [*record["launcher_argv"], record["entry"], *record["entry_argv"]]
    if stated["world_size"] is None:
        return [*record["launcher_argv"], record["entry"], *record["entry_argv"]]
    tasks = ["--nnodes", str(stated["nodes"]), "--nproc-per-node", str(stated["per_node"])]
    return [*tasks, *record["launcher_argv"], record["entry"], *record["entry_argv"]]


def value(record: dict[str, Any], option: str) -> int:
    words = record["entry_argv"]
    return int(words[words.index(option) + 1]) if option in words else 1


def unrecognised(record: dict[str, Any]) -> str | None:
    """The first word that Megatron's parser does not know."""
    return next(iter(record["megatron"]["parse"].partition("unrecognized arguments: ")[2].split()), None)


def refused_option(record: dict[str, Any]) -> str | None:
    """The option for which a launch that parses is refused: by Megatron, or because it is not modelled yet."""
    words = record["entry_argv"]
    model_size = value(record, "--tensor-model-parallel-size") * value(record, "--pipeline-model-parallel-size")
    if (record["stated"]["world_size"] or 1) % model_size:  # the larger of the two is named
        larger = value(record, "--tensor-model-parallel-size") > value(record, "--pipeline-model-parallel-size")
        return "--tensor-model-parallel-size" if larger else "--pipeline-model-parallel-size"
    expert_size = value(record, "--expert-model-parallel-size") * value(record, "--pipeline-model-parallel-size")
    if (record["stated"]["world_size"] or 1) % expert_size:
        return "--expert-model-parallel-size"
    if "--rampup-batch-size" in words and "--train-iters" in words:
        return "--rampup-batch-size"
    return None


TAKEN = [record for record in truth_records(FILE) if unrecognised(record) is None]


def test_the_records_are_at_hand() -> None:
    assert len(truth_records(FILE)) == 52
    assert sum(refused_option(record) is None for record in TAKEN) == 10


@pytest.mark.parametrize("record", [record for record in truth_records(FILE) if unrecognised(record)], ids=name)
def test_what_the_parser_refuses(record: dict[str, Any]) -> None:
    word = unrecognised(record) or ""
    outcome = run(*argv(record))
    named = word if word.startswith("--") else "--step-batch-size-schedule"
    assert_refused(outcome, named)
    assert word in outcome.err


@pytest.mark.parametrize("record", TAKEN, ids=name)
def test_what_the_parser_takes(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--use-megatron-fsdp" in record["entry_argv"]:  # which wants more connections than one
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    outcome = run(*argv(record), "--info-json", "-", "--info-gpu-memory", "80GiB")
    named = refused_option(record)
    if record["megatron"].get("validate", "ok") != "ok":
        assert named is not None
    if named is not None:
        assert_refused(outcome, named)
        return
    assert outcome.status in (0, 1), outcome.err
    report = outcome.report
    assert report["world"]["size"] == record["stated"]["world_size"]
    assert report["parallel"]["tensor"] == value(record, "--tensor-model-parallel-size")
    assert report["parallel"]["pipeline"] == value(record, "--pipeline-model-parallel-size")
    assert report["batch"]["micro"] == value(record, "--micro-batch-size")
    assert report["batch"]["global"] == value(record, "--global-batch-size")
    held = {layer for rank in report["ranks"] for chunk in rank["chunks"] for layer in chunk["layers"]}
    assert held == set(range(1, value(record, "--num-layers") + 1))
    assert outcome.status == (1 if report["verdict"]["fits"] is False else 0)
