"""Messages between pipeline stages: how they are sent."""

from __future__ import annotations

import pytest

from analyzer.communication.table import communication_rows
from analyzer.passes.stages import stage_models
from tests.job_of import job_of


@pytest.mark.parametrize(
    ("line", "batched"),
    [
        ("", True),
        ("--num-layers-per-virtual-pipeline-stage 1", False),
        ("--num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication", True),
    ],
)
def test_messages_are_batched_unless_they_overlap(line: str, batched: bool) -> None:
    """`validate_args` has no overlap without virtual stages, and `core_transformer_config_from_args` sets `batch_p2p_comm` to the
    opposite of `overlap_p2p_comm` (training/arguments.py). `P2PCommunicator._communicate` then chooses the calls (0.16.1).
    """
    job = job_of(f"--pipeline-model-parallel-size 4 --global-batch-size 32 {line}")
    sent = [row for row in communication_rows(job, stage_models(job)) if row.kind == "send"]
    assert {row.batched for row in sent} == {batched}
