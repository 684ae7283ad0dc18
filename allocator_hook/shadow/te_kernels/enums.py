"""Enumerations of Transformer Engine's extension, with the values of its headers (2.11).

Source: transformer_engine.h, fused_attn.h, fused_router.h and comm_gemm_overlap.h in transformer_engine/common/include. Members
are ints, as with pybind11, because Python code compares them and uses them as indices. Those of releases up to 2.20 are here, as
their values are only compared with each other.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from allocator_hook.shadow.te_kernels.releases import is_before


def _numbered(name: str, members: str, *, prefix: str = "") -> type[IntEnum]:
    return IntEnum(name, {prefix + member: value for value, member in enumerate(members.split())})  # type: ignore[return-value]


DType = IntEnum(
    "DType",
    {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10},
)
"""The members that the extension has in Python (csrc/extensions/pybind.cpp); releases from 2.19 on compare the names."""

TORCH_DTYPES = {
    DType["kByte"]: torch.uint8,
    DType["kInt32"]: torch.int32,
    DType["kFloat32"]: torch.float32,
    DType["kFloat16"]: torch.float16,
    DType["kBFloat16"]: torch.bfloat16,
    DType["kFloat8E4M3"]: torch.uint8,
    DType["kFloat8E5M2"]: torch.uint8,
}

_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
if not is_before("2.20"):
    del _BACKENDS["NVTE_F16_max512_seqlen"]

ENUMS: dict[str, type[IntEnum]] = {
    "DType": DType,
    "NVTE_QKV_Layout": _numbered(
        "NVTE_QKV_Layout",
        "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
        "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
        "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
        "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
        prefix="NVTE_",
    ),
    "NVTE_QKV_Format": _numbered(
        "NVTE_QKV_Format", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET", prefix="NVTE_"
    ),
    "NVTE_Bias_Type": _numbered("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", prefix="NVTE_"),
    "NVTE_Mask_Type": _numbered(
        "NVTE_Mask_Type",
        "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
        prefix="NVTE_",
    ),
    "NVTE_Softmax_Type": _numbered("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", prefix="NVTE_"),
    "NVTE_Fused_Attn_Backend": IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS),  # type: ignore[dict-item]
    "NVTEScalingMode": _numbered(
        "NVTEScalingMode",
        "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING INVALID_SCALING",
        prefix="NVTE_",
    ),
    "NVTERoutingMapFormat": _numbered("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": _numbered("NVTEQBHistogramMode", "FUSED_ATOMIC TWO_KERNEL"),
    "Float8BlockScaleTensorFormat": _numbered("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT"),
    "CommOverlapType": _numbered("CommOverlapType", "RS AG"),
    "CommOverlapAlgo": _numbered(
        "CommOverlapAlgo",
        "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS "
        "ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    ),
    "FP8FwdTensors": _numbered(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": _numbered("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"),
}
