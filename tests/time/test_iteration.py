"""An iteration put together: passes, data-parallel messages and the optimizer step, computed by hand at efficiencies of 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.communication.table import communication_rows
from analyzer.passes.stages import first_of_equal, stage_models
from analyzer.results import CommunicationRow
from analyzer.specs import TrainingJob
from analyzer.time.data_parallel import Traffic, exposed
from analyzer.time.iteration import IterationTime, iteration_time
from analyzer.time.optimizer_seconds import optimizer_seconds
from tests.job_of import job_of
from tests.time.speeds import ROUND, ideal

BASE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 2 --bf16 --tokenizer-type NullTokenizer --vocab-size 32767 --position-embedding-type rope "
    "--attention-backend flash"
)
PARAMETERS = 4 * (12 * 1024**2 + 13 * 1024) + 32768 * 1024 + 2 * 1024
"""Weights and biases of the layers (Narayanan et al. 2021), the tied embeddings, and the final norm."""


def job(line: str, *, gpus: int = 8) -> TrainingJob:
    return job_of(f"{line}", base=BASE, gpus=gpus, environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def time(found: TrainingJob, **rates: float) -> IterationTime:
    stages = stage_models(found)
    return iteration_time(found, stages, communication_rows(found, stages), ROUND, ideal(**rates))


def test_the_gradients_are_reduced_by_a_ring() -> None:
    """fp32 gradients of all parameters in an all-reduce over eight GPUs: 2·7/8 of their bytes at 400 GB/s."""
    parts = time(job("--global-batch-size 16")).parts
    assert parts["exposed_dp"] == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS / 400e9, rel=1e-4)


def test_the_distributed_optimizer_scatters_and_gathers() -> None:
    """Gradients in fp32 are scattered, and parameters in bf16 gathered; with bf16 gradients fewer bytes are scattered."""
    parts = time(job("--global-batch-size 16 --use-distributed-optimizer")).parts
    assert parts["exposed_dp"] == pytest.approx(7 / 8 * 6 * PARAMETERS / 400e9, rel=1e-3)
    parts = time(job("--global-batch-size 16 --use-distributed-optimizer --grad-reduce-in-bf16")).parts
    assert parts["exposed_dp"] == pytest.approx(7 / 8 * 4 * PARAMETERS / 400e9, rel=1e-3)


def test_gradients_between_nodes_use_the_network() -> None:
    """With TP of 8, each of the two ranks of a data-parallel group is alone in its node: half of an all-reduce at 50 GB/s."""
    parts = time(job("--global-batch-size 4 --tensor-model-parallel-size 8", gpus=16)).parts
    split = 4 * (12 * 1024**2 + 7 * 1024) / 8 + 32768 * 1024 / 8  # weights, and biases of the column-parallel layers
    whole = 4 * 6 * 1024 + 2 * 1024  # norms, and biases of the row-parallel layers
    assert parts["exposed_dp"] == pytest.approx(2 * 1 / 2 * 4 * (split + whole) / 50e9, rel=1e-3)


@pytest.mark.parametrize(
    "line",
    [
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size 4 --num-layers 16 --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer",
        "--pipeline-model-parallel-size 4 --num-layers 13 --decoder-first-pipeline-num-layers 1",
        "--pipeline-model-parallel-size 4 --num-layers 8 --num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear",
        "--pipeline-model-parallel-size 4 --num-layers 8 --mtp-num-layers 1 --fp8-format hybrid",
    ],
)
def test_equal_stages_make_the_same_calls(line: str) -> None:
    """So that their data-parallel messages are computed once."""
    found = job(f"{line} --global-batch-size 64 --overlap-grad-reduce", gpus=16)
    stages = stage_models(found)
    firsts = first_of_equal(stages)
    rows: dict[int, list[CommunicationRow]] = {stage.pipeline_rank: [] for stage in stages}
    for row in communication_rows(found, stages):
        rows[row.pipeline_rank].append(replace(row, pipeline_rank=0, peer=""))
    assert len({id(first) for first in firsts}) < len(stages)
    assert all(rows[stage.pipeline_rank] == rows[first.pipeline_rank] for stage, first in zip(stages, firsts, strict=True))


def test_overlapped_messages_hide_behind_the_passes() -> None:
    rates = ideal(window=0.5, slowdown=0.1)
    assert exposed(Traffic(10.0, 20), 8.0, rates, overlapped=False) == 10.0
    assert exposed(Traffic(10.0, 20), 8.0, rates, overlapped=True) == pytest.approx(6 + 0.1 * 4)  # half of the pass hides 4
    assert exposed(Traffic(10.0, 20), 80.0, rates, overlapped=True) == pytest.approx(0.5 + 0.1 * 9.5)  # the last bucket is seen
    assert exposed(Traffic(), 8.0, rates, overlapped=True) == 0


def test_an_adam_step_moves_its_states() -> None:
    """Each parameter: master weight and two moments in fp32 are read and written, and the bf16 weight written.

    Its fp32 gradient is cleared, scaled for the mean over data-parallel ranks, checked for NaN, read for the norm, and read and
    written by the step: 24 + 2 + 4 + 8 + 4 + 4 + 8 bytes.
    """
    found = job("--global-batch-size 16")
    [stage] = stage_models(found)
    assert optimizer_seconds(found, stage, ROUND, ideal()) == pytest.approx(54 * PARAMETERS / 4000e9)
    assert time(found).parts["optimizer"] == pytest.approx(54 * PARAMETERS / 4000e9)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ("--no-check-for-nan-in-loss-and-grad", 50),
        ("--ddp-average-in-collective", 46),
        ("--calculate-per-token-loss", 46),
        ("--tensor-model-parallel-size 8", 46),
    ],
)
def test_gradients_that_are_not_checked_or_scaled(options: str, number: int) -> None:
    """The bytes of a parameter with and without the check (4) and the factor 1/dp (8), which is 1 on a single rank."""
    found = job(f"--global-batch-size 16 {options}")
    [stage] = stage_models(found)
    parameters = sum(each.numel for tree in stage.trees for _, module in tree.walk() for each in module.parameters)
    assert optimizer_seconds(found, stage, ROUND, ideal()) == pytest.approx(number * parameters / 4000e9)


def test_the_distributed_optimizer_divides_the_step() -> None:
    """Each of eight ranks clears, scales and checks all gradients, and updates an eighth of the parameters."""
    found = job("--global-batch-size 16 --use-distributed-optimizer")
    [stage] = stage_models(found)
    assert optimizer_seconds(found, stage, ROUND, ideal()) == pytest.approx((38 / 8 + 16) * PARAMETERS / 4000e9)


def test_one_more_microbatch_adds_a_forward_and_a_backward() -> None:
    first, second = time(job("--global-batch-size 16")), time(job("--global-batch-size 32"))
    assert second.seconds - first.seconds == pytest.approx(first.microbatch_seconds)
    assert second.parts["optimizer"] == first.parts["optimizer"]
    assert second.parts["exposed_dp"] == first.parts["exposed_dp"]


def test_tensor_parallel_messages() -> None:
    """Four all-reduces of 2·s·b·h bytes for each layer and microbatch, one for the embedding and one for the logits' gradient.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3. The loss adds three of a value for each token: 12·s·b bytes.
    """
    launch = job("--global-batch-size 2 --tensor-model-parallel-size 8")
    size = 2 * 2048 * 2 * 1024
    loss = 3 * 4 * 2048 * 2
    seconds = 2 * 7 / 8 * ((4 * 4 + 2) * size + loss) / 400e9
    assert time(launch, window=0).parts["exposed_tp"] == pytest.approx(seconds, rel=1e-3)
    shown = time(launch, window=100, tp_backward_exposed=0).parts["exposed_tp"]
    hidden = 2 * 7 / 8 * (4 * 2 + 1) * size / 400e9  # those of the input gradients, beside weight gradients
    assert shown == pytest.approx(seconds - hidden, rel=1e-3)


def test_the_sender_of_a_pipeline_message() -> None:
    """2·s·b·h bytes between two nodes at 50 GB/s, and within a node at 400 GB/s; a tensor-parallel rank sends its part of s."""
    size = 2 * 2048 * 2 * 1024
    pipeline = "--global-batch-size 16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size"
    assert time(job(f"{pipeline} 8", gpus=16)).message == pytest.approx(size / 50e9)
    assert time(job(f"{pipeline} 8 --sequence-parallel", gpus=16)).message == pytest.approx(size / 8 / 50e9)
    assert time(job(f"{pipeline} 2")).message == pytest.approx(size / 400e9)


def test_the_host_is_waited_for_if_it_is_slower() -> None:
    """The parts of the GPU do not change, and the wait fills the rest."""
    slow, fast = time(job("--global-batch-size 16"), host_call=1e-3), time(job("--global-batch-size 16"))
    assert fast.parts["host"] == 0
    assert slow.parts["host"] > 0
    assert {name: value for name, value in slow.parts.items() if name != "host"} == pytest.approx(
        {name: value for name, value in fast.parts.items() if name != "host"}
    )
    assert time(job("--global-batch-size 16"), iteration=0.5).parts["host"] == 0.5
