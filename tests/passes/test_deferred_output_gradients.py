"""Weight gradients of the output layer that the last stage defers (`--defer-embedding-wgrad-compute`)."""

from __future__ import annotations

import pytest

from analyzer.passes.deferred_output_gradients import deferral_of
from tests.job_of import job_of

HIDDEN = 2 * 2048 * 1024
"""Bytes of [s, b, h] in bf16."""


@pytest.mark.parametrize(("freed", "kept"), [(False, 2), (True, 1)])
def test_the_graph_of_a_deferred_call_keeps_the_received_input_and_its_gradient(freed: bool, kept: int) -> None:
    """`ColumnParallelLinear.forward` appends its input to `embedding_activation_buffer` (core/tensor_parallel/layers.py, 0.16.1).

    The graph of this input ends at the input that the stage has received, [s, b, h], whose `grad` has the same size. If activation
    offloading has freed the storage of the received input, only the gradient is left.
    """
    job = job_of("--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2 --global-batch-size 32")
    found = deferral_of(job, microbatches=4, freed=freed)
    assert found is not None
    assert found.graph_bytes == kept * HIDDEN
    assert found.input_bytes == HIDDEN
    assert found.calls == 4
