"""A Mamba mixer: projection, convolution, scan, gated norm, projection back.

Source: core/ssm/mamba_mixer.py and mamba_context_parallel.py (0.16.1).
"""

from __future__ import annotations

from analyzer.modules.kinds import ModuleKind
from analyzer.modules.linear import column_parallel, row_parallel
from analyzer.modules.mamba.scan import scan
from analyzer.modules.mamba.sizes import MixerSizes
from analyzer.modules.shapes import Shapes
from analyzer.modules.tree import STREAM, Module, Parameter, Tensor
from analyzer.units import ceil_div, power_of_two


def mixer(shapes: Shapes, *, input_shares: str = "") -> Module:
    """[s, b, h] → [s, b, h], with the norm of its input.

    Its own parameters are a bias and a decay of each head, and the weight of the skip connection. `Float16Module` converts them.
    `MambaContextParallel` references them.
    """
    sizes = MixerSizes(shapes)
    width = sizes.hybrid.width
    full = 2 * width + 2 * sizes.hybrid.state_width + sizes.hybrid.heads
    projection = column_parallel(
        shapes,
        "in_proj",
        ModuleKind.MIXER_IN,
        width=sizes.projected,
        full_width=full,
        symbol="(2·d+2·g·n+a)/t",
        bias=False,
        fused_norm=True,
        input_made_in=STREAM,
        input_shares=input_shares,
    )
    output = row_parallel(
        shapes,
        "out_proj",
        ModuleKind.MIXER_OUT,
        width=sizes.width,
        full_width=width,
        symbol="d/t",
        bias=False,
        input_made_in="mixer.norm",
    )
    names = ("dt_bias", "A_log", "D")
    heads, all_heads = (sizes.heads,), (sizes.hybrid.heads,)
    return Module(
        name="mixer",
        kind=ModuleKind.MIXER,
        parameters=tuple(
            Parameter(name=name, shape=heads, dtype=shapes.dtype, sharding="tensor", full_shape=all_heads, read_by_reference=True)
            for name in names
        ),
        children=(projection, scan(sizes), _norm(sizes), output),
        source="megatron.core.ssm.MambaMixer",
    )


def _norm(sizes: MixerSizes) -> Module:
    """RMS norm of each group, with the gate if the scan does not apply it.

    Source: mamba_ssm/ops/triton/layernorm_gated.py (2.3.2), `_layer_norm_fwd` and `_layer_norm_bwd`. Its backward sums the gradient
    of the weight in parts, one for each thread block of a group.
    """
    shapes = sizes.shapes
    group = sizes.width // sizes.groups
    block = min(65536 // 2, power_of_two(group))
    warps = min(max(block // 256, 1), 8)
    gated = not sizes.hybrid.memory_efficient
    parts = ceil_div(shapes.inputs.multiprocessors * ceil_div(4, warps), sizes.groups)
    return Module(
        name="norm",
        kind=ModuleKind.MIXER_NORM,
        parameters=(
            Parameter(name="weight", shape=(sizes.width,), dtype=shapes.dtype, sharding="tensor", full_shape=(sizes.hybrid.width,)),
        ),
        saved=(
            shapes.wide("input", sizes.width, "d/t", made_in="mixer"),
            shapes.statistics("rstd", shapes.s * shapes.b * sizes.groups, "4·s·b·g/t"),
            *((shapes.wide("gate", sizes.width, "d/t", made_in="mixer"),) if gated else ()),
        ),
        forward_workspace=(shapes.wide("output", sizes.width, "d/t"),),
        backward_workspace=(
            shapes.wide("output gradient", sizes.width, "d/t"),
            shapes.wide("input gradient", sizes.width, "d/t"),
            *((shapes.wide("gradient of the gate", sizes.width, "d/t"),) if gated else ()),
            Tensor(name="partial sums of the weight gradient", shape=(parts, sizes.width), dtype="fp32", formula="4·blocks·d/t"),
        ),
        source="mamba_ssm RMSNorm",
    )
