"""Launch scripts of Megatron-LM, end to end.

A launch that Megatron accepts is analysed, or rejected with the name of an unsupported option. A launch that Megatron rejects
is rejected, except that options of the code before August 2023 are accepted together with other options of that code. A launch
without a number of GPUs is analysed for the smallest number that its layout allows.

The records have the result of the parser of the script's release, and for core 0.16.1 also of `validate_args`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.command import assert_refused, run
from tests.data_files import truth_records

FILE = "launches.json"
OLD_OPTIONS = ("--activations-checkpoint-method",)
"""Options that no parser since August 2023 has."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a launch script, independent of the host that runs the test."""
    for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def name(record: dict[str, Any]) -> str:
    return f"{record['script'].removeprefix('examples/')}-{record['variant']}"


def argv(record: dict[str, Any]) -> list[str]:
    """The launch with torchrun's options, or with equivalent options for the tasks of a batch system."""
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


def unrecognized(record: dict[str, Any]) -> str | None:
    """The first word that Megatron's parser does not recognize."""
    return next(iter(record["megatron"]["parse"].partition("unrecognized arguments: ")[2].split()), None)


def refused_option(record: dict[str, Any]) -> str | None:
    """The option for which a launch that parses is rejected: by Megatron, or because it is not supported."""
    words = record["entry_argv"]
    model_size = value(record, "--tensor-model-parallel-size") * value(record, "--pipeline-model-parallel-size")
    world = record["stated"]["world_size"]
    if world is not None and world % model_size:  # the error names the larger of the two
        larger = value(record, "--tensor-model-parallel-size") > value(record, "--pipeline-model-parallel-size")
        return "--tensor-model-parallel-size" if larger else "--pipeline-model-parallel-size"
    expert_size = value(record, "--expert-model-parallel-size") * value(record, "--pipeline-model-parallel-size")
    if world is not None and world % expert_size:
        return "--expert-model-parallel-size"
    if "--rampup-batch-size" in words and "--train-iters" in words:
        return "--rampup-batch-size"
    return None


LARGE = ("sbatch_mfsdp_deepseek_v3.sh", "train_llama3_8b_fsdp_h100_fp8.sh")
"""Scripts whose reports take a second each."""
MOST_GPUS = 256
"""GPUs of a launch in the quick tests."""


def parameters(records: Iterable[dict[str, Any]]) -> list[ParameterSet]:
    """The records as parameters of a test. Large ones, and those that differ in the release only, are slow."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for record in records:
        key = (record["script"].partition("@")[0], str(record["variant"]))
        slow = key in seen or any(large in record["script"] for large in LARGE) or (record["stated"]["world_size"] or 0) > MOST_GPUS
        seen.add(key)
        found.append(pytest.param(record, marks=[pytest.mark.slow] if slow else [], id=name(record)))
    return found


ACCEPTED = [record for record in truth_records(FILE) if unrecognized(record) is None]


def test_all_records_are_present() -> None:
    assert len(truth_records(FILE)) == 52
    assert sum(refused_option(record) is None for record in ACCEPTED) == 13


@pytest.mark.parametrize("record", [record for record in truth_records(FILE) if unrecognized(record)], ids=name)
def test_launches_that_the_parser_rejects(record: dict[str, Any]) -> None:
    word = unrecognized(record) or ""
    outcome = run(*argv(record), *(("--info-megatron", "0.16.1") if word in OLD_OPTIONS else ()))
    named = word if word.startswith("--") else "--step-batch-size-schedule"
    assert_refused(outcome, named)
    assert word in outcome.err


@pytest.mark.parametrize("record", parameters(record for record in truth_records(FILE) if unrecognized(record) in OLD_OPTIONS))
def test_launches_of_old_code_are_read_with_its_options(record: dict[str, Any]) -> None:
    """`--activations-checkpoint-method uniform` is full recomputation of every layer (megatron/arguments.py, 2022)."""
    outcome = run(*argv(record), "--info-json", "-", "--info-gpu-memory", "80GiB")
    if (named := refused_option(record)) is not None:
        assert_refused(outcome, named)
        return
    assert outcome.status in (0, 1), outcome.err
    assert outcome.report["megatron"] == "2023"
    assert any("--recompute-granularity full --recompute-method uniform" in each for each in outcome.report["assumptions"])


@pytest.mark.parametrize("record", parameters(ACCEPTED))
def test_launches_that_the_parser_accepts(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "--use-megatron-fsdp" in record["entry_argv"]:  # FSDP rejects a value of 1
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
    world = record["stated"]["world_size"]
    assert report["world"]["size"] == world or (world is None and "--info-world-size" in report["warnings"][0])
    assert report["parallel"]["tensor"] == value(record, "--tensor-model-parallel-size")
    assert report["parallel"]["pipeline"] == value(record, "--pipeline-model-parallel-size")
    assert report["batch"]["micro"] == value(record, "--micro-batch-size")
    assert report["batch"]["global"] == value(record, "--global-batch-size")
    layers = {layer for rank in report["ranks"] for chunk in rank["chunks"] for layer in chunk["layers"]}
    assert layers == set(range(1, value(record, "--num-layers") + 1))
    assert outcome.status == (1 if report["verdict"]["fits"] is False else 0)
