"""The peak of overlapped microbatches: layers with known sizes, step by step through `TransformerLayerSchedulePlan.run`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzer.memory.overlapped.microbatches import GradientRules, overlapped_peak
from analyzer.memory.ranks import rank_classes
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import STREAM, Module, Tensor
from tests.job_of import job_of

LATE = GradientRules(early_attention=False, keeps_dispatched=True)

S, B, H, LAYERS = 1024, 1, 512, 4
HIDDEN = 2 * S * B * H
"""Bytes of [s, b, h] in bf16."""
A, E, W = 3 * HIDDEN, 5 * HIDDEN, 100 * HIDDEN
"""Bytes that attention saves, that experts save, and of the workspace at the peak."""


def tensors(name: str, size: int) -> tuple[Tensor, ...]:
    return (Tensor(name=name, shape=(size // HIDDEN, S, B, H), dtype="bf16", formula=""),) if size else ()


def chunk(layers: int, peak_at: str) -> Module:
    """Equal MoE layers; the workspace of attention or experts, in forward or backward, is W. The norm saves nothing."""

    def part(name: str, kind: ModuleKind, saved: int) -> Module:
        forward, backward = (W if peak_at == f"{name} {phase}" else 0 for phase in ("forward", "backward"))
        return Module(
            name=name,
            kind=kind,
            saved=tensors("saved", saved),
            forward_workspace=tensors("workspace", forward),
            backward_workspace=tensors("workspace", backward),
        )

    parts = (
        part("attention", ModuleKind.ATTENTION, A),
        part("norm", ModuleKind.FEED_FORWARD_NORM, 0),
        part("experts", ModuleKind.FEED_FORWARD, E),
    )
    layer = Module(name="layers", kind=ModuleKind.LAYER, children=parts)
    return Module(name="decoder", kind=ModuleKind.DECODER, children=(layer,) * layers)


ALL_LAYERS = LAYERS * (A + E)


@pytest.mark.parametrize(
    ("peak_at", "early", "saved"),
    [
        ("attention forward", False, ALL_LAYERS + A),  # the backward has freed nothing of its layer
        ("experts backward", False, ALL_LAYERS + A),  # the forward has saved A of its layer
        ("experts forward", False, ALL_LAYERS + A),  # + A + E of the forward, - E of the backward
        ("attention backward", False, ALL_LAYERS + A),  # the same
        ("attention forward", True, ALL_LAYERS + A),
        ("experts backward", True, ALL_LAYERS + A),
        ("attention backward", True, ALL_LAYERS + A - E),  # the forward has not saved E yet
        ("experts forward", True, ALL_LAYERS),  # the backward has freed A too
    ],
)
def test_every_half_of_a_layer_runs_beside_what_the_other_microbatch_has_saved(peak_at: str, early: bool, saved: int) -> None:
    """core/models/common/model_chunk_schedule_plan.py (0.16.1), L layers that save A in attention and E in experts.

    `TransformerModelChunkSchedulePlan.run` pairs the forward of layer i with the backward of layer L - 1 - i. When a pair starts,
    i layers of one microbatch and L - i of the other are saved, together L·(A + E). `TransformerLayerSchedulePlan.run` then runs
    attn.forward, mlp.backward, mlp.forward, attn.backward; with `ep_overlap_early_attn_memory_release` the last two are swapped.
    """
    tree = chunk(LAYERS, peak_at)
    peak = overlapped_peak(tree, tree, GradientRules(early, keeps_dispatched=True))
    assert peak.bytes == saved + W
    assert peak.path == f"decoder.layers.{peak_at.split()[0]}"
    assert peak.instant.backward == peak_at.endswith("backward")


@pytest.mark.parametrize(
    ("forward", "backward", "peak_at", "saved"),
    [
        (3, 1, "experts forward", 3 * (A + E)),  # in the third layer, after the backward is over
        (1, 3, "experts backward", 3 * (A + E) + A),  # of the last layer, beside attention of the only other one
        (1, 3, "attention backward", 3 * (A + E) + A),
    ],
)
def test_layers_without_a_partner_run_alone(forward: int, backward: int, peak_at: str, saved: int) -> None:
    """`TransformerModelChunkSchedulePlan.run`: min(forward layers, backward layers) pairs, then the rest of either."""
    assert overlapped_peak(chunk(forward, peak_at), chunk(backward, peak_at), LATE).bytes == saved + W


def test_the_backward_after_an_overlapped_forward_is_part_of_it() -> None:
    """While the forward saves a layer, the backward frees one: together they hold about one microbatch (combined_1f1b, 0.16.1)."""
    line = (
        "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --disable-bias-linear "
        "--expert-model-parallel-size 4 --global-batch-size 64 --swiglu --num-layers 32"
    )
    one, overlapped = (rank_classes(job_of(f"{line} {flag}"))[0].memory for flag in ("", "--overlap-moe-expert-parallel-comm"))
    assert one.activations_bytes < overlapped.activations_bytes < 1.2 * one.activations_bytes


def moe_layer(peak_at: str) -> Module:
    """One MoE layer in a chunk: attention saves A, of which HIDDEN is the residual stream, and experts save E."""

    def part(name: str, kind: ModuleKind, saved: tuple[Tensor, ...] = ()) -> Module:
        return Module(name=name, kind=kind, saved=saved, forward_workspace=tensors("workspace", W if peak_at == name else 0))

    stream = tuple(replace(each, made_in=STREAM) for each in tensors("input", HIDDEN))
    branch = (part("experts", ModuleKind.EXPERTS, tensors("saved", E)), part("combine", ModuleKind.COMBINE))
    parts = (
        part("attention", ModuleKind.ATTENTION, (*stream, *tensors("saved", A - HIDDEN))),
        part("norm", ModuleKind.FEED_FORWARD_NORM),
        Module(name="mlp", kind=ModuleKind.FEED_FORWARD, children=branch),
    )
    layer = Module(name="layers", kind=ModuleKind.LAYER, children=parts)
    return Module(name="decoder", kind=ModuleKind.DECODER, children=(layer,))


@pytest.mark.parametrize(
    ("peak_at", "early", "saved", "gradients"),
    [
        ("attention", False, A + E + A, 1),  # of the residual
        ("attention", True, A + E + A, 1),
        ("experts", False, A + A + E, 2),  # and of the tokens that are sent, which the backward of attention reads
        ("experts", True, A + E, 0),  # the backward of attention has read both
    ],
)
def test_the_gradient_of_the_residual_stays_until_the_backward_of_attention(
    peak_at: str, early: bool, saved: int, gradients: int
) -> None:
    """`TransformerLayerSchedulePlan.run` (0.16.1): combine.backward, attn.forward, mlp.backward, mlp.forward, attn.backward, which
    is before mlp.forward with `ep_overlap_early_attn_memory_release`. The backward of the combine returns the gradient of its
    first input only. That of the residual stays in `layer_state.residual.grad` until attn.backward (`submodule_combine_forward`).
    """
    tree = moe_layer(peak_at)
    assert overlapped_peak(tree, tree, GradientRules(early, keeps_dispatched=True)).bytes == saved + W + gradients * HIDDEN
