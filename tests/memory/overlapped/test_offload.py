"""Groups of modules on the GPU while microbatches overlap: `ChunkOffloadHandler` of megatron-core 0.16.1, step by step."""

from __future__ import annotations

import pytest

from analyzer.memory.overlapped.offload import Member, OffloadedGroups
from analyzer.modules.inputs import module_inputs
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.models.gpt import full_model
from analyzer.program.schedule.pipeline import Step
from tests.job_of import job_of

BYTES = 1000
LAYERS = 3


def groups(microbatches: int) -> OffloadedGroups:
    """One chunk with one group in each layer, and one forward before each backward."""
    members = tuple(Member(layer, "core_attn", "layers.core_attention", BYTES, BYTES, BYTES) for layer in range(LAYERS))
    order = [Step(kind, number, 0) for number in range(microbatches) for kind in ("forward", "backward")]
    return OffloadedGroups([members], order)


def test_the_last_group_stays_if_its_backward_is_next() -> None:
    """`should_bulk_offload`: the next backward is that of this chunk, and no later group has the name."""
    found = groups(2)
    found.run(Step("forward", 0, 0))
    assert found.bytes == BYTES
    found.run(Step("forward", 1, 0))
    assert found.bytes == BYTES  # the next backward is that of microbatch 0


def test_each_backward_copies_an_earlier_group_back() -> None:
    """`on_group_start_backward` runs at the end of the backward of a group, and `bulk_reload` takes the group offloaded last."""
    found = groups(1)
    found.run(Step("forward", 0, 0))
    for layer in reversed(range(LAYERS)):
        found.start_backward((0, 0))
        found.use((0, 0), Member(layer, "core_attn", "layers.core_attention", BYTES, BYTES, BYTES))
        assert found.bytes == 0
        found.end_backward((0, 0))
        assert found.bytes == (BYTES if layer else 0)


def test_the_next_microbatch_is_copied_back_if_nothing_else_waits() -> None:
    """`bulk_reload`: the last group of the next chunk in the backward order, if its forward has finished."""
    found = groups(2)
    found.run(Step("forward", 0, 0))
    found.run(Step("forward", 1, 0))
    found.run(Step("backward", 0, 0))
    assert found.bytes == BYTES


@pytest.mark.parametrize("latent", ["", "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --rotary-percent 1.0"])
def test_offloading_copies_the_softmax_twice_without_dropout(latent: str) -> None:
    """The softmax saves its output, and the product with the values saves it again (transformer_engine unfused attention, 2.11)."""
    job = job_of(f"--attention-backend unfused --attention-dropout 0 {latent}")
    kernels = [child for _, child in full_model(module_inputs(job)).walk() if child.kind is ModuleKind.ATTENTION_KERNEL]
    sizes = {tensor.name: tensor.bytes for tensor in kernels[0].saved}
    assert sizes["softmax"] > 0
    assert sizes["probabilities"] == 0
    assert (
        next(tensor for tensor in kernels[0].saved if tensor.name == "probabilities").shape
        == next(tensor for tensor in kernels[0].saved if tensor.name == "softmax").shape
    )
