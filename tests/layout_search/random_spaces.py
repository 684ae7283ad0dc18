"""Random small launches, and small spaces of their layouts. Equal seeds give equal spaces."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from analyzer.api import Launch, problem_of, read_launch
from analyzer.errors import AnalyzerError, InputError
from analyzer.layout_search.dimensions import DESTS, DIMENSIONS, Space, space_of
from analyzer.layout_search.overlaps import OVERLAPS
from analyzer.memory.ranks import highest_rank
from analyzer.specs.option_names import flag_of
from tests.fuzz.random_launches import RandomLaunches

NOWHERE: Final = Path("/nowhere")
MOST_LAYOUTS: Final = 30
"""Layouts of a space, so that all of them can be evaluated."""
SHARDED: Final = "--use-distributed-optimizer"
LARGE: Final = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096"
"""Sizes with which GEMMs take most of the time, so that the bounds of the time are high."""
FEATURES: Final = (
    "--optimizer sgd",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 " + SHARDED,
    "--optimizer-cpu-offload --use-precision-aware-optimizer " + SHARDED,
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    "--ckpt-format fsdp_dtensor " + SHARDED,
    "--num-distributed-optimizer-instances 2 " + SHARDED,
    "--overlap-grad-reduce --overlap-param-gather " + SHARDED,
    "--overlap-grad-reduce",
    "--cuda-graph-impl local",
    "--cuda-graph-impl transformer_engine --cuda-graph-scope attn",
    "--enable-cuda-graph",
    "--fine-grained-activation-offloading --offload-modules core_attn",
    "--cpu-offloading --cpu-offloading-num-layers 1",
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "--transformer-impl local",
    "--use-tp-pp-dp-mapping",
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 2",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*2|t*2L --num-layers 4",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL --num-layers 4",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication --num-layers 8",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --overlap-p2p-communication-warmup-flush",
    "--window-size 128,0",
    "--softmax-type learnable",
    "--moe-expert-capacity-factor 1 --moe-token-drop-policy probs",
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --moe-router-dtype fp32",
    "--moe-layer-freq ([0]*2+[1]*2)*1 --num-layers 4",
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "--moe-layer-recompute",
    "--fp8-format hybrid",
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
    "--fp8-format hybrid --fp8-param-gather " + SHARDED,
    "--cp-comm-type a2a",
    "--tensor-model-parallel-size 2 --tp-comm-overlap --sequence-parallel",
    "--tensor-model-parallel-size 2 --tp-comm-overlap --sequence-parallel --tp-comm-overlap-ag",
    "--recompute-activations",
    "--tensor-model-parallel-size 2 --distribute-saved-activations --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "--mtp-num-layers 2",
    "--mtp-num-layers 1",
    "--defer-embedding-wgrad-compute --pipeline-model-parallel-size 2",
    "--rampup-batch-size 16 16 1000 --train-samples 4000",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--expert-tensor-parallel-size 1",
    "--global-batch-size 64 --make-vocab-size-divisible-by 7",
    "--info-moe-imbalance 1.5 --expert-model-parallel-size 2",
    "--info-margin 5%",
    "--info-megatron 0.12",
    "--info-megatron 0.14",
    "--info-lora 8",
    "--info-lora 6:linear_qkv,linear_fc2",
    "--info-lora 8 --info-lora-regather",
)
MEMORY: Final = (0.6, 0.85, 1.0, 1.1, 1.3, 2.0, 8.0)
"""Memory of the GPU, relative to what the launch needs."""


@dataclass(frozen=True)
class Case:
    """A launch, and the dimensions of a search."""

    words: tuple[str, ...]
    over: tuple[str, ...]
    keep: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        return read_launch(self.words, environ={}, folder=NOWHERE)

    @property
    def space(self) -> Space:
        return space_of(problem_of(self.launch), over=self.over, keep=self.keep)


PLAIN: Final = (
    f"--nproc-per-node 8 pretrain_gpt.py --num-layers 4 {LARGE} --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --bf16 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9999 "
    "--info-gpu H100-80GB --micro-batch-size 1 "
)
MOE: Final = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 2048 "
    "--sequence-parallel "
)
OVERLAPPED: Final = MOE + "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --delay-wgrad-compute"


def _fixed(line: str, over: str, *keep: str, batch: str = "--global-batch-size 32") -> Case:
    return Case(tuple(f"{PLAIN} {batch} {line}".split()), tuple(over.split()), keep)


def _hybrid(pattern: str) -> Case:
    case = _fixed(f"--info-megatron 0.19.0 --hybrid-layer-pattern {pattern}", "pp vpp layers")
    return replace(case, words=tuple("pretrain_hybrid.py" if word == "pretrain_gpt.py" else word for word in case.words))


FIXED: Final = {
    "dense": _fixed("", "tp pp"),
    "overlap": _fixed("", "tp optimizer overlap"),
    "overlap-experts": _fixed(MOE + "--expert-model-parallel-size 2", "ep tp overlap"),
    "overlap-little-memory": _fixed("--info-gpu-memory 17GiB " + SHARDED, "pp micro-batch overlap"),
    "overlap-virtual": _fixed(MOE + "--expert-model-parallel-size 2 --num-layers 8", "pp vpp overlap"),
    "recomputation": _fixed("--info-gpu-memory 20GiB", "recompute micro-batch"),
    "fp8": _fixed("--fp8-format hybrid", "pp micro-batch"),
    "overlapped-tensor": _fixed("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "tp"),
    "overlap-few-experts": _fixed(MOE + "--expert-model-parallel-size 2", "ep overlap"),
    "overlapped-experts": _fixed(f"{OVERLAPPED} --num-layers 8", "ep pp vpp"),
    "overlapped-stages": _fixed(OVERLAPPED, "pp vpp"),
    "experts": _fixed(MOE, "tp ep etp"),
    "few-experts": _fixed(MOE + "--tensor-model-parallel-size 2", "ep etp"),
    "uneven": _fixed("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --num-layers 8", "layers"),
    "vocabulary": _fixed("--make-vocab-size-divisible-by 7", "tp"),
    "order": _fixed(MOE + "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping", "tp order etp"),
    "deferred": _fixed("--pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute --num-layers 8", "pp micro-batch"),
    "kept-sequence": _fixed("", "tp", "--sequence-parallel"),
    "kept-optimizer": _fixed("", "fsdp offload", "--use-distributed-optimizer"),
    "kept-overlap": _fixed("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "tp", "--tp-comm-overlap"),
    "hybrid": _hybrid("MM-M*-M-"),
    "hybrid-stages": _hybrid("MM-|M*|-M|- --pipeline-model-parallel-size 2"),
    "no-batch": _fixed("", "tp micro-batch", batch=""),
    "no-sequence": _fixed("--tensor-model-parallel-size 2", "tp micro-batch"),
}
"""Spaces with many layouts of a kind that random ones seldom have."""


def case_of(name: int | str) -> Case:
    """A random case for a seed, or a fixed one for a name."""
    return FIXED[name] if isinstance(name, str) else random_case(random.Random(name))


def random_case(source: random.Random, *, most: int = MOST_LAYOUTS) -> Case:
    """A launch that Megatron accepts, and dimensions that give a few layouts up to `most`."""
    while True:
        words = _memory_limited(random_words(source), source)
        over = tuple(source.sample(DIMENSIONS, source.choice((2, 3, 4, 5))))
        while words is not None and over:
            keep = () if source.random() < 0.8 else (flag_of((DESTS[source.choice(DIMENSIONS)] or OVERLAPS)[0]),)
            case = Case(words, over, tuple(each for each in keep if each != "--num-virtual-stages-per-pipeline-rank"))
            with suppress(InputError):  # a release may have no option for a dimension
                if 3 <= case.space.candidates <= most:
                    return case
            over = over[1:]


def random_words(source: random.Random) -> list[str]:
    """The words of a random launch of a small model. Megatron may refuse it."""
    if source.random() < 0.06:
        words = _heterogeneous(source)
    else:
        words = [*RandomLaunches(source.randrange).launch(), *(LARGE.split() if source.random() < 0.5 else ())]
    if source.random() < 0.25:
        words = ["--nnodes", "2", *words]
    for feature in source.sample(FEATURES, source.choice((0, 1, 1, 2))):
        words += feature.split()
    if "--rampup-batch-size" in words:
        words = _without(words, "--train-iters")
    elif source.random() < 0.08:
        words = _without(words, "--global-batch-size")
    return words


def _without(words: list[str], flag: str) -> list[str]:
    """The words without an option of one operand."""
    while flag in words:
        place = words.index(flag)
        words = [*words[:place], *words[place + 2 :]]
    return words


def _memory_limited(words: list[str], source: random.Random) -> tuple[str, ...] | None:
    """The words with a memory of the GPU about as large as the launch needs; None if Megatron refuses the launch."""
    try:
        launch = read_launch(words, environ={}, folder=NOWHERE)
        problem_of(launch)
    except AnalyzerError:
        return None
    needed = highest_rank(launch.job).memory.device_bytes
    return (*words, "--info-gpu-memory", f"{int(needed * source.choice(MEMORY)) // 2**20 + 1}MiB")


def _heterogeneous(source: random.Random) -> list[str]:
    """A model whose layers differ (`--heterogeneous-layers-config-encoded-json`)."""
    attention = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
    without = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
    blocks = [
        {
            "attention": attention if source.random() < 0.8 else without,
            "ffn": {"ffn_mult": source.choice((1.0, 2.0, 4.0)), "no_op": False, "replace_with_linear": False},
        }
        for _ in range(4)
    ]
    config = {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "tie_word_embeddings": False,
        "rope_theta": 500000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": blocks,
    }
    line = (
        "--nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --group-query-attention "
        "--num-query-groups 4 --swiglu --normalization RMSNorm --position-embedding-type rope --use-rotary-position-embeddings "
        "--use-rope-scaling --rope-scaling-factor 8.0 --rotary-base 500000 --untie-embeddings-and-output-weights "
        "--disable-bias-linear --heterogeneous-layers-config-path config.json --seq-length 1024 --max-position-embeddings 1024 "
        "--micro-batch-size 1 --global-batch-size 32 --bf16 --lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer "
        "--vocab-size 9999 --info-gpu H100-80GB"
    )
    return [*line.split(), "--heterogeneous-layers-config-encoded-json", json.dumps(config)]
