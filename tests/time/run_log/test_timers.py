"""Predictions of Megatron's timers, as parts of the predicted iteration."""

from __future__ import annotations

import pytest

from analyzer.communication.table import communication_rows
from analyzer.passes.stages import stage_models
from analyzer.time.efficiencies import efficiencies_of
from analyzer.time.iteration import IterationTime, iteration_time
from analyzer.time.run_log.timers import Predicted, predicted_timers
from tests.job_of import job_of
from tests.time.speeds import known

H100 = known("H100-80GB")
MOE = "--num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def predicted(line: str) -> tuple[IterationTime, dict[str, Predicted]]:
    job = job_of(f"{line} --global-batch-size 64", gpus=16)
    stages, rates = stage_models(job), efficiencies_of(H100)
    time = iteration_time(job, stages, communication_rows(job, stages), H100, rates)
    return time, predicted_timers(job, time)


@pytest.mark.parametrize("options", ["", "--use-distributed-optimizer", OVERLAPPED, "--pipeline-model-parallel-size 2"])
def test_passes_optimizer_step_and_the_rest_are_an_iteration(options: str) -> None:
    time, found = predicted(options)
    total = found["forward-backward"].most + found["optimizer"].most + time.host_of_iteration
    assert total == pytest.approx(time.seconds, rel=1e-9)


def test_the_gather_of_parameters_is_in_the_optimizer_step_unless_it_overlaps() -> None:
    time, found = predicted("--use-distributed-optimizer")
    gathered = found["params-all-gather"].most
    assert gathered > 0
    assert found["optimizer"].most > gathered + time.parts["optimizer"]
    assert found["all-grads-sync"].most + gathered == pytest.approx(time.exposed_dp[0])
    time, found = predicted(OVERLAPPED)
    assert "params-all-gather" not in found
    assert found["optimizer"].most < time.parts["optimizer"] + gathered


def test_passes_of_a_stage() -> None:
    time, found = predicted("--pipeline-model-parallel-size 2")
    assert found["forward-compute"].most + found["backward-compute"].most == pytest.approx(max(each.busy for each in time.ranks))
    assert found["forward-compute"].least < found["forward-compute"].most  # the last stage has the output layer
    assert "forward-compute" not in predicted(f"{MOE} --overlap-moe-expert-parallel-comm")[1]
