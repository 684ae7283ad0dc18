"""The answers of the commands, through the command line, are those of an enumeration of every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from analyzer.errors import AnalyzerError
from analyzer.layout_search.dimensions import space_of
from analyzer.layout_search.evaluation import evaluate
from analyzer.layout_search.problem import Problem, with_changes
from analyzer.layout_search.split_jobs import job_of_layout
from tests.command import run
from tests.layout_search.every_layout import layouts_of
from tests.layout_search.test_extremes import OVER, WORDS, least_bytes, least_on, problem

LIMIT = 10 * 2**30


def answer(name: str, memory: int, *more: str) -> dict[str, Any]:
    """The JSON document of a command about the launch, on a GPU with so many bytes."""
    launch = WORDS.replace("--info-gpu H100-80GB ", "").split()[:-1]
    words = ("--gpu", "H100-80GB", "--gpu-memory", f"{memory}B", "--workers", "1", "--over", ",".join(OVER), "--json", "-", *more)
    outcome = run(name, *words, "torchrun", *launch)
    assert outcome.status == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document


def changed(**changes: object) -> Problem:
    """The launch with other options."""
    found = problem(f"{LIMIT}B")
    found = replace(found, arguments=with_changes(found.arguments, changes), runs=False)
    return replace(found, given=found.job({}))


def test_a_launch_fits_a_gpu_with_as_much_memory_as_it_needs() -> None:
    launch = WORDS.replace("--info-gpu H100-80GB ", "").split()[:-1]

    def outcome(memory: int) -> tuple[int, dict[str, Any]]:
        found = run("fit", "--gpu", "H100-80GB", "--gpu-memory", f"{memory}B", "--json", "-", "torchrun", *launch)
        return found.status, json.loads(found.out)

    status, document = outcome(80 * 2**30)
    memory = max((rank["memory"] for rank in document["ranks"]), key=lambda each: each["device_bytes"])
    needed, unused = memory["device_bytes"], memory["peak_reserved_bytes"] - memory["peak_allocated_bytes"]
    assert (status, document["verdict"]["fits"]) == (0, True)
    for memory, fits in ((needed, True), (needed - unused - 1, False)):  # PyTorch frees segments that are not used
        status, document = outcome(memory)
        assert (status, document["verdict"]["fits"]) == (0 if fits else 1, fits)


def test_the_duration_and_the_cost_of_a_training() -> None:
    launch = WORDS.replace("--info-gpu H100-80GB ", "").split()[:-1]
    found = run("time", "--gpu", "H100-80GB", "--tokens", "10B", "--price", "2.5", "--json", "-", "torchrun", *launch)
    document = json.loads(found.out)
    training, batch = document["time"]["training"], document["batch"]
    iterations = 10**10 // (batch["global"] * problem("80GiB").given.batch.seq_length)  # as `update_train_iters` of Megatron-LM
    hours = iterations * document["time"]["iteration_seconds"] / 3600
    assert training["iterations"] == iterations
    assert training["days"] == pytest.approx(hours / 24)
    assert training["gpu_hours"] == pytest.approx(hours * document["world"]["size"])
    assert training["cost"] == pytest.approx(2.5 * training["gpu_hours"])


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_fewest_gpus(gpus: int) -> None:
    needed = {number: least_on(number) for number in (1, 2, 4, 8)}
    memory = needed[gpus] + 2**20
    (found,) = answer("gpus", memory)["extremes"]
    assert found["value"] == min(number for number, least in needed.items() if least <= memory)


@pytest.mark.slow
def test_the_fastest_layout() -> None:
    (space,) = [space_of(problem("80GiB"), over=OVER)]
    jobs = [(layout, job) for layout in layouts_of(space) if (job := job_of_layout(space, layout)) is not None]
    every = [evaluate(layout, {}, job, space.problem.speed, space.problem.rates) for layout, job in jobs]
    fastest = min(each.iteration_seconds for each in every if each is not None)
    assert answer("search", 80 * 2**30)["search"]["best"][0]["iteration_seconds"] == pytest.approx(fastest)


@pytest.mark.slow
def test_the_longest_sequence() -> None:
    (found,) = answer("context", LIMIT)["extremes"]
    for length, fits in ((found["value"], True), (found["not_enough"], False)):
        longer = changed(seq_length=length, max_position_embeddings=length, create_attention_mask_in_dataloader=False)
        assert (least_bytes(longer) <= LIMIT) is fits


@pytest.mark.slow
def test_the_largest_micro_batch() -> None:
    (found,) = answer("batch", LIMIT)["extremes"]
    fitting = []
    for size in (1, 2, 4, 8, 16):
        for tensor in (1, 8):  # more sequences than eight data-parallel ranks have need another layout to begin with
            try:
                if least_bytes(changed(micro_batch_size=size, tensor_model_parallel_size=tensor)) <= LIMIT:
                    fitting.append(size)
            except AnalyzerError:
                continue
    assert found["value"] == max(fitting)
