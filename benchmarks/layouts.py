"""Layouts of a job for benchmarks: every legal combination of parallel sizes, microbatches, recomputation and sharding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

from analyzer.api import problem_of, read_launch
from analyzer.launch.tokenizer.vocabulary import pad_vocabulary
from analyzer.layout_search.problem import Problem
from analyzer.specs import PipelineSpec, RecomputeSpec, TrainingJob
from analyzer.specs.rules import first_violation

LLAMA_3_70B: Final = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization "
    "RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --sequence-parallel --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4 --micro-batch-size 1 --global-batch-size 1024 "
    "--tokenizer-type NullTokenizer --vocab-size 128255"
)
LLAMA_31_405B: Final = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention "
    "--num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072 --position-embedding-type rope --normalization "
    "RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --sequence-parallel --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7 "
    "--micro-batch-size 1 --global-batch-size 2048 --tokenizer-type NullTokenizer --vocab-size 128255"
)
DEEPSEEK_V3: Final = (
    "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 "
    "--qk-layernorm --seq-length 4096 --max-position-embeddings 163840 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--attention-dropout 0 --hidden-dropout 0 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--moe-permute-fusion --no-rope-fusion --sequence-parallel --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 64 --micro-batch-size 1 --global-batch-size 8192 --tokenizer-type NullTokenizer "
    "--vocab-size 129279"
)
DEEPSEEK_V3_UNEVEN: Final = (
    DEEPSEEK_V3.replace("--global-batch-size 8192", "--global-batch-size 15360")
    + " --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 2"
)
"""The same with a larger batch and a layout for 2,048 GPUs."""
GPUS: Final = 1024
_RECOMPUTE: Final = (
    RecomputeSpec(),
    RecomputeSpec(granularity="selective", modules=("core_attn",)),
    RecomputeSpec(granularity="full", method="uniform", num_layers=1),
)


def problem(line: str, *, gpus: int = GPUS, gpu: str = "H100-80GB") -> Problem:
    """Return the launch of a line of options on nodes of eight GPUs, with the speeds of this GPU."""
    words = ["--nnodes", str(gpus // 8), "--nproc-per-node", "8", "pretrain_gpt.py", *line.split(), "--info-gpu", gpu]
    return problem_of(read_launch(words, environ={}, folder=Path("/nowhere")))


def layouts(job: TrainingJob, *, order: random.Random | None = None) -> Iterator[TrainingJob]:
    """Yield every legal layout of the job on `GPUS` GPUs with the same global batch size; with `order` in a random order."""
    layers = job.model.num_layers
    experts = (1, 2, 4, 8, 16, 32, 64) if job.model.moe is not None else (1,)
    sizes = [*product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 5, 10), (1, 2, 4), experts, (1, 2, 4), _RECOMPUTE, (True, False))]
    if order is not None:
        order.shuffle(sizes)
    for tensor, pipeline, virtual, context, expert, micro, recompute, distributed in sizes:
        data, rest = divmod(GPUS, tensor * pipeline * context)
        microbatches, left = divmod(job.batch.global_batch_size, micro * max(1, data))
        if rest or left or not microbatches or (virtual > 1 and pipeline == 1):
            continue
        parallel = replace(
            job.parallel,
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual if virtual > 1 else None,
            overlap_p2p=virtual > 1,
            context=context,
            expert=expert,
            expert_tensor=tensor if job.model.moe is None else 1,
            sequence_parallel=tensor > 1,
            pipeline_layout=_split(layers, pipeline, virtual),
        )
        batch = replace(job.batch, micro_batch_size=micro, microbatches=microbatches, first_microbatches=microbatches)
        padded = pad_vocabulary(job.model.vocab_size, divisible_by=128, tensor=tensor)
        changed = replace(
            job,
            parallel=parallel,
            batch=batch,
            recompute=recompute,
            model=replace(job.model, padded_vocab_size=padded),
            optimizer=replace(job.optimizer, distributed=distributed),
        )
        if first_violation(changed) is None:
            yield changed


def _split(layers: int, pipeline: int, virtual: int) -> PipelineSpec:
    """Return equal stages if the number of layers is divisible; otherwise the last pipeline rank has fewer layers."""
    per_stage = -(-layers // (pipeline * virtual)) * virtual
    last = layers - per_stage * (pipeline - 1)
    return PipelineSpec() if last == per_stage else PipelineSpec(num_layers_in_last=last)
