"""Layouts with the sparse attention of core 0.19, with kernels of cuDNN and with operations of PyTorch."""

from __future__ import annotations

from typing import Final

_MODEL: Final = (
    "--bf16 --position-embedding-type rope --no-rope-fusion --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --qk-layernorm --multi-latent-attention "
    "--q-lora-rank 192 --qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 64 --vocab-size 500 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 128 --dsa-indexer-topk 256 "
)
_LOSS: Final = "--dsa-indexer-loss-coeff 0.01 --dsa-indexer-use-sparse-loss"
_CUDNN: Final = f"{_MODEL} --kv-lora-rank 512 --num-attention-heads 64 --dsa-kernel-backend cudnn {_LOSS}"
_TORCH: Final = f"{_MODEL} --kv-lora-rank 64 {_LOSS}"
_SHARED: Final = "--dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 2"
_SPLIT: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_GATHERED: Final = "--context-parallel-size 2 --cp-comm-type all_gather"
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_UNMASKED: Final = "--no-create-attention-mask-in-dataloader"
_EXPERTS: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 256"
)
_NAMED: Final = {
    "cudnn": _CUDNN,
    "cudnn, one sample": f"{_CUDNN} --micro-batch-size 1",
    "cudnn, shared keys": f"{_CUDNN} {_SHARED}",
    "cudnn, shared keys, one sample": f"{_CUDNN} {_SHARED} --micro-batch-size 1",
    "cudnn, without a loss": f"{_CUDNN} --dsa-indexer-loss-coeff 0",
    "cudnn, shared keys, without a loss": f"{_CUDNN} {_SHARED} --dsa-indexer-loss-coeff 0 --micro-batch-size 1",
    "cudnn, shared keys, tp2 sp": f"{_CUDNN} {_SHARED} {_SPLIT}",
    "cudnn, shared keys, tp4 sp": f"{_CUDNN} {_SHARED} --tensor-model-parallel-size 4 --sequence-parallel",
    "cudnn, shared keys, cp2": f"{_CUDNN} {_SHARED} {_GATHERED}",
    "cudnn, shared keys, recomputed": f"{_CUDNN} {_SHARED} {_FULL} {_UNMASKED} --micro-batch-size 1",
    "cudnn, shared keys, recomputed, tp2 sp": f"{_CUDNN} {_SHARED} {_FULL} {_UNMASKED} {_SPLIT}",
    "cudnn, shared keys, experts, tp2 sp": f"{_CUDNN} {_SHARED} {_EXPERTS} {_SPLIT}",
    "cudnn, shared keys, mtp": f"{_CUDNN} {_SHARED} {_EXPERTS} --mtp-num-layers 1 --micro-batch-size 1",
    "cudnn, interleaved": f"{_CUDNN} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "cudnn, few heads": f"{_CUDNN} --num-attention-heads 16 --micro-batch-size 1",
    "cudnn, b200": f"{_CUDNN} {_SHARED} --dsa-indexer-n-heads 64 --num-attention-heads 128 --info-gpu B200",
    "cudnn, recomputed mlp, tp2 sp": f"{_CUDNN} {_SPLIT} --recompute-granularity selective --recompute-modules mlp",
    "cudnn, norm in fp32, not rotated": f"{_CUDNN} --dsa-indexer-k-norm-fp32 --no-dsa-indexer-rotate-activation",
    "cudnn, no query compression": _CUDNN.replace("--q-lora-rank 192 ", "").replace("--qk-layernorm ", ""),
    "torch": _TORCH,
    "torch, one sample": f"{_TORCH} --micro-batch-size 1",
    "torch, loss over all keys": _TORCH.replace("--dsa-indexer-use-sparse-loss", ""),
    "torch, without a loss": f"{_TORCH} --dsa-indexer-loss-coeff 0 --micro-batch-size 1",
    "torch, shared keys, tp2 sp": f"{_TORCH} {_SHARED} {_SPLIT}",
    "torch, recomputed": f"{_TORCH} {_FULL} --micro-batch-size 1",
    "torch, many index heads": f"{_TORCH} --dsa-indexer-n-heads 16",
    "torch, cp2": f"{_TORCH} {_GATHERED} --micro-batch-size 1",
    "torch, pp2": f"{_TORCH} --pipeline-model-parallel-size 2 --micro-batch-size 1",
}
ABSORBED: Final = {f"absorbed attention, {name}": options for name, options in _NAMED.items()}
SHARES_OF_PAIRS: Final = frozenset(name for name, options in ABSORBED.items() if _GATHERED in options and _CUDNN in options)
"""The formulas give each context-parallel rank an equal share of the pairs of queries and chosen keys. The recorded rank has the
last queries."""
