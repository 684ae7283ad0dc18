"""Operations that the host issues for each sample of a packed sequence, in forward and backward.

They are short, and where the host reads a value from the GPU in between, the GPU idles. Many samples, such as the 64 of 512 tokens
in a sequence of 32,768, can so take many times the time of the layer itself. Numbers are those of operations that launch a kernel,
counted in the sources that each function names.
"""

from __future__ import annotations

from typing import Final

from analyzer.time.work.context import WorkContext
from analyzer.time.work.kernels import NO_WORK, HostLoop, Work

ROTATION_LOOP: Final = "rotation of each packed sample"
REORDER_LOOP: Final = "positions of packed samples"
_ROTATED_TENSORS: Final = 2
"""Queries and keys."""
_ROTATED: Final = 12, 8
"""`_apply_rotary_pos_emb_bshd` of one tensor. Forward: sine and cosine, each scaled and cast; the negation and the concatenation
of halves; two products, their sum and a concatenation. Backward: two products, the negation, the joined halves, two sums, and
zeros and a copy for the gradient of a slice."""
_WRITTEN: Final = 1, 4
"""The copy of a rotated sample to its place in the output. In backward the gradient of the output is copied, that of the sample is
cloned, and its place is filled with zeros (`CopySlices`, torch/csrc/autograd/functions/tensor.cpp)."""
_READS: Final = 2
"""The lengths of the samples (`tolist`), and from 0.15 on the number of all tokens, which is compared with that of the angles."""
_BEFORE: Final = 9
"""Operations for a part of a sample before attention: 8 of its ends, which are tensors of one element, and `arange`."""
_AFTER: Final = 5
"""The same after attention."""
_ENDS: Final = 2
"""Ends that `arange` reads from the GPU."""
_REMEDIES: Final = {
    ROTATION_LOOP: "Unfused RoPE rotates each packed sample alone; its fusion (without --no-rope-fusion) avoids that.",
    REORDER_LOOP: "--cp-comm-type a2a orders each packed sample alone; p2p or Transformer Engine 2.18 avoids that.",
}


def loops_over_samples(context: WorkContext) -> tuple[str, ...]:
    """What the host does for each packed sample, and what avoids it, as sentences."""
    found = (*rotation_loop(context).forward, *reordering(context).forward)
    return tuple(_REMEDIES[each.name] for each in found)


def samples(context: WorkContext) -> float:
    """Samples in a packed sequence; 0 if there is one, or if none is packed."""
    inputs = context.inputs
    length = inputs.model.sample_length
    return inputs.micro_batch_size * inputs.sequence_length / length if length else 0.0


def rotation_loop(context: WorkContext) -> Work:
    """Unfused RoPE of the queries and keys of each sample (`_apply_rotary_pos_emb_thd`, core 0.7 to 0.19)."""
    number = _ROTATED_TENSORS * samples(context)
    if not number or context.inputs.model.rope_fusion or context.inputs.model.position_embedding != "rope":
        return NO_WORK
    core = context.inputs.core
    angles = int(context.inputs.split.context > 1)  # the two slices of angles of a rank are concatenated
    forward, backward = _ROTATED if core.concatenates_rotated_samples or core.writes_rotated_samples else (0, 0)
    if core.writes_rotated_samples:
        forward, backward = forward + _WRITTEN[0], backward + _WRITTEN[1]
    before = HostLoop(ROTATION_LOOP, number * (forward + angles), float(_READS * _ROTATED_TENSORS))
    after = (HostLoop("gradients of rotated samples", number * backward),) if backward else ()
    return Work((before,), after, synchronizes=True)


def reordering(context: WorkContext) -> Work:
    """The order of tokens around attention with `--cp-comm-type a2a` (Transformer Engine 2.10 to 2.17).

    Three tensors are reordered before attention, and its output after it; in backward one before and three after it.
    """
    inputs = context.inputs
    parts = 2 * inputs.split.context * samples(context)
    exchanged = inputs.split.context > 1 and inputs.split.cp_comm_type == "a2a"
    if not parts or not exchanged or not inputs.engine.reorders_each_sample:
        return NO_WORK
    forward, backward = 3 * _BEFORE + _AFTER, _BEFORE + 3 * _AFTER
    reads = 4 * _ENDS * parts
    return Work((HostLoop(REORDER_LOOP, forward * parts, reads),), (HostLoop(REORDER_LOOP, backward * parts, reads),))
