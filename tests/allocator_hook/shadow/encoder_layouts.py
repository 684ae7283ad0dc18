"""Layouts of BERT and T5 that are compared with runs of the real models."""

from __future__ import annotations

from typing import Final

_COMMON: Final = (
    "--hidden-size 512 --num-attention-heads 8 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 "
    "--train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9999 --info-gpu H100-80GB "
)
BASES: Final = {
    "bert": f"--nproc-per-node 8 pretrain_bert.py --num-layers 4 --seq-length 512 {_COMMON}",
    "t5": "--nproc-per-node 8 pretrain_t5.py --encoder-num-layers 3 --decoder-num-layers 3 --kv-channels 64 "
    f"--encoder-seq-length 512 --decoder-seq-length 128 {_COMMON}",
}
"""The beginning of a launch, by the first word of the name of a layout."""
_UNFUSED: Final = "--bf16 --attention-backend unfused"
_SPLIT: Final = "--tensor-model-parallel-size 2 --sequence-parallel"
_OVERLAPPED: Final = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_NO_DROPOUT: Final = "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
ENCODERS: Final = {
    "bert, unfused": _UNFUSED,
    "bert, local": "--bf16 --spec local --no-gradient-accumulation-fusion",
    "bert, tp2, distributed optimizer": f"{_UNFUSED} --tensor-model-parallel-size 2 {_OVERLAPPED}",
    "bert, tp2 sp": f"{_UNFUSED} {_SPLIT}",
    "bert, tp2 pp2": f"{_UNFUSED} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--no-gradient-accumulation-fusion",
    "bert, fused, pp4": "--bf16 --attention-backend fused --pipeline-model-parallel-size 4",
    "bert, interleaved": f"{_UNFUSED} --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "bert, no binary head, tp2": f"{_UNFUSED} --bert-no-binary-head --tensor-model-parallel-size 2",
    "bert, local, fp32": "--spec local --no-gradient-accumulation-fusion",
    "bert, fp32": "--attention-backend unfused",
    "bert, fp16, no dropout": f"--fp16 --attention-backend unfused {_NO_DROPOUT}",
    "bert, full recompute": f"{_UNFUSED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "bert, local, selective recompute, tp2": "--bf16 --spec local --recompute-activations --tensor-model-parallel-size 2",
    "bert, selective recompute": f"{_UNFUSED} --recompute-activations",
    "bert, two heads, tp4": f"{_UNFUSED} --tensor-model-parallel-size 4",
    "bert, deterministic, tp2": f"{_UNFUSED} --deterministic-mode --tensor-model-parallel-size 2",
    "t5, unfused": _UNFUSED,
    "t5, fused": "--bf16 --attention-backend fused",
    "t5, local": "--bf16 --transformer-impl local --no-gradient-accumulation-fusion",
    "t5, tp2, loss per token": f"{_UNFUSED} --tensor-model-parallel-size 2 --calculate-per-token-loss",
    "t5, tp2 sp": f"{_UNFUSED} {_SPLIT} --attention-softmax-in-fp32",
    "t5, local, tp2 sp": f"--bf16 --transformer-impl local {_SPLIT} {_OVERLAPPED}",
    "t5, local, fp32": "--transformer-impl local --no-gradient-accumulation-fusion",
    "t5, fp32": "--attention-backend unfused",
    "t5, fp16, no dropout": f"--fp16 --attention-backend unfused {_NO_DROPOUT}",
    "t5, local, block recompute": "--bf16 --transformer-impl local --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1",
    "t5, local, uniform recompute": "--bf16 --transformer-impl local --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 3",
    "t5, local, selective recompute": "--bf16 --transformer-impl local --recompute-activations",
    "t5, fused attention, deterministic": "--bf16 --attention-backend fused --deterministic-mode",
    "t5, deterministic, tp4": f"{_UNFUSED} --deterministic-mode --tensor-model-parallel-size 4",
}
