"""Layouts with small activations on many GPUs, whose highest peak is that of the parameter buffers (`StartPeak.BUFFERS`)."""

from __future__ import annotations

from typing import Final

CREATION_BASE: Final = (
    "--nnodes 16 --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 512 --train-iters 10 --lr 1e-4 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 999 --info-gpu H100-80GB --use-distributed-optimizer --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --no-gradient-accumulation-fusion "
)
_EXPERTS: Final = (
    "--num-experts 16 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 1024 --moe-token-dispatcher-type alltoall"
)
_OVERLAP: Final = "--overlap-grad-reduce --overlap-param-gather"
_STORED: Final = "--fp8-format e4m3 --fp8-param-gather --fp8-recipe"
_OFFLOAD: Final = "--manual-gc --optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction"
CREATION: Final = {
    f"creation of buffers, {name}": words
    for name, words in {
        "dense": "",
        "tied embeddings": "--vocab-size 50000",
        "untied, tp2 sp": "--untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel",
        "pp2": "--pipeline-model-parallel-size 2",
        "interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "buckets": _OVERLAP,
        "16-bit gradients": "--grad-reduce-in-bf16",
        "experts": _EXPERTS,
        "experts, ep8": f"{_EXPERTS} --expert-model-parallel-size 8",
        "experts, ep8, interleaved": f"{_EXPERTS} --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        "delayed": f"{_STORED} delayed",
        "tensorwise": f"{_STORED} tensorwise",
        "blockwise": f"{_STORED} blockwise",
        "mxfp8": f"--info-gpu B200 {_STORED} mxfp8 --reuse-grad-buf-for-mxfp8-param-ag {_OVERLAP}",
        "optimizer on the host": f"{_OFFLOAD} 1",
        "half of the optimizer on the host": f"{_OFFLOAD} 0.5",
        "adapters": "--info-lora 64",
    }.items()
}
