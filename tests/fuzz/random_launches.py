"""Random launches of small models. `tools/random_layouts.py` and the property-based tests draw from them.

What is drawn is decided by a function `below(n)` that returns an integer from 0 to n - 1: that of a random generator, or of
Hypothesis. 0 stands for the simplest alternative, so that Hypothesis can simplify a failing launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
Below = Callable[[int], int]

BASE: Final = (
    "--nproc-per-node 8 pretrain_gpt.py --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--global-batch-size 32 --train-iters 10 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 9999"
)
MLA: Final = "--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"
BALANCES: Final = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn")
MODULES: Final = ("core_attn", "attn_norm", "qkv_linear", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""What fine-grained offloading can offload."""
MTP_STAGES: Final = (
    "Ettttm|L --mtp-num-layers 1",
    "Ettt|tmL --mtp-num-layers 1",
    "Ettttmm|L --mtp-num-layers 2",
    "Et|t|ttm|L --mtp-num-layers 1",
    "Et|tt|tmm|L --mtp-num-layers 2",
)
"""Layouts of four layers with MTP layers before the last stage or in it."""
SELDOM: Final = (
    "--optimizer sgd",
    "--softmax-type learnable",
    "--window-size 128,0",
    "--apply-residual-connection-post-layernorm",
    "--accumulate-allreduce-grads-in-fp32",
    "--use-tp-pp-dp-mapping",
    "--ddp-num-buckets 3",
    "--cp-comm-type a2a",
    "--cp-comm-type all_gather",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--no-overlap-p2p-communication",
    "--decoder-first-pipeline-num-layers 1",
    "--decoder-last-pipeline-num-layers 1",
    "--num-distributed-optimizer-instances 2",
    "--make-vocab-size-divisible-by 7",
    "--moe-expert-capacity-factor 1",
    "--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
    "--moe-router-padding-for-quantization",
    "--moe-router-enable-expert-bias",
    "--moe-router-topk 8",
    "--moe-layer-freq ([0]*1+[1]*3)",
    "--fp8-param-gather",
    "--distribute-saved-activations",
    "--microbatch-group-size-per-virtual-pipeline-stage 4",
    "--optimizer-cpu-offload --use-precision-aware-optimizer --manual-gc",
    "--mtp-num-layers 2",
    "--vocab-size 120",
)
"""Options of any launch that are drawn seldom; those of experts only with experts."""
RARE: Final = (
    "--num-query-groups 1 --group-query-attention",
    "--num-query-groups 2 --group-query-attention",
    "--num-attention-heads 4",
    "--kv-channels 32",
    "--ffn-hidden-size 1536",
    "--seq-length 512 --max-position-embeddings 512",
    "--micro-batch-size 4",
    "--rotary-interleaved --no-rope-fusion --position-embedding-type rope",
    "--window-size 128,0 --window-attn-skip-freq 2",
    "--softmax-type off-by-one",
    "--apply-query-key-layer-scaling --fp16 --attention-backend unfused",
    "--attention-softmax-in-fp32 --attention-backend unfused",
    "--no-masked-softmax-fusion --attention-backend unfused",
    "--transformer-impl local --attention-backend unfused",
    "--fp32-residual-connection",
    "--activation-func-clamp-value 7.0",
    "--glu-linear-offset 1.0 --swiglu",
    "--fp16-lm-cross-entropy --fp16",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0",
    "--num-layers 6 --pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--microbatch-group-size-per-virtual-pipeline-stage 8",
    "--ddp-bucket-size 500000 --overlap-grad-reduce",
    "--use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16",
    "--use-distributed-optimizer --use-precision-aware-optimizer --main-params-dtype fp16",
    "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "--muon-num-ns-steps 3 --optimizer muon --bf16",
    "--init-model-with-meta-device",
    "--fsdp-double-buffer",
    "--moe-router-num-groups 4 --moe-router-group-topk 2",
    "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity",
)
"""Options that only launches of the part `rare` have: one or two of them beside all others."""
OFFLOADED: Final = "--min-offloaded-tensor-size 1024 --fine-grained-activation-offloading --offload-modules"
FSDP: Final = "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor"
FSDP2: Final = (
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 1 --bf16"
)
FEATURES: Final = (
    *("none", "none", "none", "none", "fsdp", "fsdp", "fsdp2", "offload", "offload", "layers", "overlap", "mtp"),
    *("deepep", "hybridep", "userbuffers", "deferred", "imbalance", "muon", "dist_muon", "fp8", "hybrid", "hybrid", "delta_net"),
)
"""Features of `any_launch`; one that is named twice is drawn more often."""
QUANTIZED: Final = ("none", "none", "fsdp", "offload", "overlap", "mtp", "hybridep", "userbuffers", "deferred", "dist_muon")
"""Features that are drawn with FP8 or FP4."""
PARTS: Final = ("mla", "recompute", "rare", "sparse")
"""What can be asked for beside features: multi-latent attention and recomputation, which `launch` draws itself, `RARE`, and sparse
attention, which the installed megatron-core may not have."""
OF_MLA: Final = tuple(word for word in f"{MLA} --q-lora-rank".split() if word.startswith("--"))
MAMBA_SIZES: Final = (
    "--mamba-num-groups 4",
    "--mamba-state-dim 64",
    "--mamba-head-dim 32",
    "--mamba-num-heads 32",
    "--disable-mamba-mem-eff-path",
)
DELTA_NET: Final = (
    "--experimental-attention-variant gated_delta_net --linear-num-key-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64 "
    "--swiglu --context-parallel-size 1 --linear-num-value-heads"
)
SPARSE: Final = (
    f"{MLA} --info-megatron 0.18.2 --position-embedding-type rope --no-rope-fusion --bf16 --context-parallel-size 1 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 256 "
    "--dsa-indexer-loss-coeff"
)
NEED_EXPERTS: Final = ("overlap", "deepep", "hybridep", "imbalance")
STAGES: Final = ("--num-layers-per-virtual-pipeline-stage", "--defer-embedding-wgrad-compute", "--wgrad-deferral-limit")
RECOMPUTE: Final = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules")
OPTIMIZER: Final = (
    *("--optimizer", "--muon-no-split-qkv", "--muon-use-nesterov", "--muon-fp32-matmul-prec", "--muon-tp-mode"),
    *("--use-precision-aware-optimizer", "--optimizer-cpu-offload", "--manual-gc"),
)


def without(words: list[str], *flags: str) -> list[str]:
    """Return the words without these options and their operands."""
    kept: list[str] = []
    drops = False
    for word in words:
        drops = word in flags if word.startswith("--") else drops
        kept += [] if drops else [word]
    return kept


class RandomLaunches:
    """Generates random launches with about 60 options that the formulas and the shadow engine support."""

    def __init__(self, below: Below) -> None:
        self._below = below

    def feature(self) -> str:
        """Return one of `FEATURES`."""
        return self._choice(FEATURES)

    def any_launch(self, feature: str) -> list[str]:
        """Return a launch like `launch` with this feature, and with seldom used options. Megatron may reject it."""
        if feature == "rare":
            words = self.any_launch(self.feature())
            return [*words, *self._choice(RARE).split(), *(self._choice(RARE).split() if self._probably(0.3) else ())]
        if feature == "fp8":
            return self._quantized(self.any_launch(self._choice(QUANTIZED)))
        words = self.launch(moe=True if feature in NEED_EXPERTS else None, part=feature)
        deep = "--num-layers-per-virtual-pipeline-stage" in words and "--pipeline-model-parallel-size 4" in " ".join(words)
        words += ["--num-layers", "8" if deep else "4"]
        words += self._maybe(*(each for each in SELDOM if "moe" not in each or "--num-experts" in words), share=0.04)
        if feature in ("hybrid", "delta_net", "sparse"):
            return self._of_family(feature, words)
        if feature in ("fsdp", "fsdp2"):
            return self._sharded(feature, words)
        if feature in ("offload", "layers"):
            return self._offloading(feature, words)
        if feature in ("mtp", "deferred", "overlap"):
            return self._in_stages(feature, words)
        if feature in ("muon", "dist_muon"):
            left = without(words, "--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce", *OPTIMIZER)
            return [*without(left, "--fp16"), "--bf16", "--optimizer", feature]
        if feature in ("deepep", "hybridep"):
            left = without(words, "--moe-enable-deepep", "--moe-shared-expert-overlap", "--info-moe-imbalance")
            return [*left, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", feature]
        if feature == "userbuffers":
            size = ["--tensor-model-parallel-size", self._one("2 4"), "--context-parallel-size", "1"]
            return [*without(words, "--mtp-num-layers"), *size, "--sequence-parallel", "--tp-comm-overlap"]
        return [*words, "--info-moe-imbalance", "1.5"] if feature == "imbalance" else words

    def _quantized(self, words: list[str]) -> list[str]:
        """The launch in FP8 or FP4, on a GPU with the recipe."""
        recipe = self._one("delayed delayed tensorwise tensorwise blockwise mxfp8 nvfp4")
        left = [*without(words, "--fp16", "--bf16", "--fp8-format", "--fp8-recipe", "--fp8-param-gather", "--info-gpu"), "--bf16"]
        left += ["--info-gpu", "B200" if recipe in ("mxfp8", "nvfp4") else self._one("H100-80GB B200")]
        left += [] if recipe == "delayed" else self._maybe("--first-last-layers-bf16")
        if recipe == "nvfp4":
            return [*left, "--fp4-format", "e2m1"]
        left += ["--fp8-format", self._one("e4m3 hybrid"), "--fp8-recipe", recipe]
        if "--use-distributed-optimizer" in left and self._probably(0.4):
            left += ["--fp8-param-gather", *(["--reuse-grad-buf-for-mxfp8-param-ag"] if recipe == "mxfp8" else [])]
        return left + self._maybe("--fp8-amax-history-len 64")

    def _of_family(self, feature: str, words: list[str]) -> list[str]:
        """A hybrid model with Mamba layers, or a GPT with linear or sparse attention."""
        unwanted = ("--mtp-num-layers", "--deterministic-mode", "--optimizer", "--window-size", "--softmax-type")
        if feature == "sparse":
            left = without(
                words, *unwanted, *OF_MLA, "--fp16", "--rotary-percent", "--position-embedding-type", "--tp-comm-overlap"
            )
            return [*left, *SPARSE.split(), self._one("0.01 0"), *self._maybe("--q-lora-rank 192", "--dsa-indexer-use-sparse-loss")]
        left = without(words, *unwanted, *OF_MLA)
        if feature == "delta_net":
            left = without(left, "--squared-relu", "--quick-geglu")
            frequency = ["--linear-attention-freq", self._one("4 2 3")]
            return [*left, *DELTA_NET.split(), self._one("8 16"), *frequency, *self._maybe("--attention-output-gate")]
        left = without(left, *STAGES, "--num-layers", "--moe-layer-freq", "--transformer-impl", "--qk-layernorm")
        script = "pretrain_mamba.py --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec".split()
        place = left.index("pretrain_gpt.py")
        kinds = "M M * - E" if "--num-experts" in left else "M M * -"
        letters = "M" + "".join(self._one(kinds) for _ in range(7))
        graphs = self._maybe("--cuda-graph-impl transformer_engine --cuda-graph-scope mamba attn", share=0.1)
        pattern = ["--num-layers", "8", "--hybrid-override-pattern", letters]
        return [*left[:place], *script, *left[place + 1 :], *pattern, *self._maybe(*MAMBA_SIZES), *graphs]

    def _sharded(self, feature: str, words: list[str]) -> list[str]:
        if feature == "fsdp":
            strategy = self._one("optim_grads_params optim_grads optim")
            left = without(words, *STAGES, *OPTIMIZER)  # in a pipeline, 0.16.1 fails to create its device mesh
            return [*left, *FSDP.split(), "--pipeline-model-parallel-size", "1", "--data-parallel-sharding-strategy", strategy]
        left = without(words, "--use-distributed-optimizer", "--fp16", "--overlap-param-gather", *STAGES, *OPTIMIZER)
        experts = "--expert-model-parallel-size 1".split() if "--num-experts" in words else []
        return [*left, *FSDP2.split(), *experts, *self._maybe("--torch-fsdp2-no-reshard-after-forward")]

    def _offloading(self, feature: str, words: list[str]) -> list[str]:
        if feature == "offload":
            picked = [each for each in MODULES if self._probably(0.4)] or [MODULES[0]]
            picked += ["core_attn"] if "attn_proj" in picked and "core_attn" not in picked else []
            return [*without(words, *RECOMPUTE), *OFFLOADED.split(), *picked]
        alone = "--pipeline-model-parallel-size 1 --cpu-offloading-num-layers"
        return [*without(words, *STAGES, *RECOMPUTE), *alone.split(), self._one("1 2 3")]

    def _in_stages(self, feature: str, words: list[str]) -> list[str]:
        if feature == "overlap":
            return self._overlapping(words)
        if feature == "deferred":
            left = without(words, "--no-gradient-accumulation-fusion", *STAGES[1:])
            deferred = ["--pipeline-model-parallel-size", self._one("2 4"), "--defer-embedding-wgrad-compute"]
            return [*left, *deferred, *self._maybe("--wgrad-deferral-limit 2", share=0.5)]
        layout = self._choice(MTP_STAGES)
        left = without(words, "--mtp-num-layers", "--tp-comm-overlap", *STAGES)
        sizes = ["--num-layers", "4", "--pipeline-model-parallel-size", str(layout.count("|") + 1), "--context-parallel-size", "1"]
        return [*left, *sizes, "--pipeline-model-parallel-layout", *layout.split()]

    def _overlapping(self, words: list[str]) -> list[str]:
        """Overlapped microbatches, which need expert parallelism, and virtual stages in a pipeline."""
        left = without(words, "--moe-shared-expert-overlap", "--tp-comm-overlap", "--mtp-num-layers")
        if "full" in words or "moe" in words:
            left = without(left, *RECOMPUTE)
        left += ["--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size", "2", "--global-batch-size", "64"]
        left += ["--moe-token-dispatcher-type", "alltoall"] if "allgather" in words else []
        split = words[words.index("--pipeline-model-parallel-size") + 1] != "1"
        left += ["--num-layers-per-virtual-pipeline-stage", "1"] if split else []
        return left + self._maybe("--delay-wgrad-compute", share=0.3)

    def launch(self, *, moe: bool | None = None, part: str = "") -> list[str]:
        """Return the words of a launch, with experts if `moe`, and with one of `PARTS`. Megatron may reject it."""
        moe, mla = self._probably(0.5) if moe is None else moe, self._probably(0.25) or part == "mla"
        words = [*BASE.split(), "--num-layers", self._one("4 8"), "--micro-batch-size", self._one("1 2")]
        words += ["--info-gpu", self._one("H100-80GB A100-80GB B200"), self._one("--bf16 --bf16 --bf16 --fp16")]
        for section in (self._parallel(moe), self._attention(mla), self._model(moe), self._step(words)):
            words += section
        if moe:
            words += self._experts(words)
        return [*words, *self._recompute(moe=moe, mla=mla, always=part == "recompute")]

    def _probably(self, share: float) -> bool:
        return self._below(100) >= 100 - round(100 * share)

    def _choice(self, values: Sequence[T]) -> T:
        return values[self._below(len(values))]

    def _one(self, words: str) -> str:
        return self._choice(words.split())

    def _maybe(self, *phrases: str, share: float = 0.2) -> list[str]:
        """Include each phrase with probability `share`. `|` separates alternatives."""
        return [word for phrase in phrases if self._probably(share) for word in self._choice(phrase.split("|")).split()]

    def _parallel(self, moe: bool) -> list[str]:
        tensor = int(self._one("1 1 2 4"))
        pipeline = int(self._one("1 1 2 4" if tensor < 4 else "1 2"))
        context = int(self._one("1 1 2")) if tensor * pipeline <= 4 else 1
        words = f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} --context-parallel-size {context}"
        if tensor > 1 and (moe or self._probably(0.6)):
            words += " --sequence-parallel" + (" --tp-comm-overlap" if self._probably(0.15) else "")
        if pipeline > 1 and self._probably(0.4):
            words += " --num-layers-per-virtual-pipeline-stage 1"
        if pipeline > 1 and self._probably(0.15):
            words += " --defer-embedding-wgrad-compute" + (" --wgrad-deferral-limit 2" if self._probably(0.5) else "")
        return words.split()

    def _attention(self, mla: bool) -> list[str]:
        backend = self._maybe("--attention-backend flash|--attention-backend fused|--attention-backend unfused")
        if mla:
            return [
                *MLA.split(),
                "--position-embedding-type",
                "rope",
                *self._maybe("--q-lora-rank 192", "--qk-layernorm"),
                *backend,
            ]
        position = self._one("learned_absolute rope none")
        rotary = self._maybe("--no-rope-fusion", "--rotary-percent 0.5") if position == "rope" else []
        return [
            *("--position-embedding-type", position, *rotary, *backend),
            *self._maybe("--group-query-attention --num-query-groups 4", share=0.4),
            *self._maybe("--qk-layernorm", "--kv-channels 128", "--add-qkv-bias"),
        ]

    def _model(self, moe: bool) -> list[str]:
        words = self._maybe("--swiglu|--swiglu|--squared-relu|--quick-geglu", share=0.8)
        words += self._maybe("--disable-bias-linear", share=0.9 if moe else 0.4)
        words += self._maybe("--normalization RMSNorm", "--untie-embeddings-and-output-weights", share=0.5)
        words += self._maybe("--attention-dropout 0 --hidden-dropout 0", share=0.5)
        return words + self._maybe(
            "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--mtp-num-layers 1"
        )

    def _step(self, words: list[str]) -> list[str]:
        found = self._maybe("--cross-entropy-loss-fusion|--deterministic-mode", share=0.4)
        found += self._maybe(
            "--calculate-per-token-loss", "--no-gradient-accumulation-fusion", "--no-create-attention-mask-in-dataloader"
        )
        if self._probably(0.5):
            found += ["--use-distributed-optimizer", *self._maybe("--overlap-grad-reduce --overlap-param-gather", share=0.4)]
            found += self._maybe("--use-precision-aware-optimizer")
        elif "--bf16" in words and self._probably(0.3):
            found += self._muon()
        if "--bf16" in words:
            found += self._maybe("--grad-reduce-in-bf16")
            recipes = "|".join(f"--fp8-format e4m3 --fp8-recipe {each}" for each in ("delayed", "tensorwise", "blockwise", "mxfp8"))
            found += self._maybe(recipes, share=0.1)
        return found

    def _muon(self) -> list[str]:
        words = self._maybe("--muon-no-split-qkv", "--muon-use-nesterov", "--muon-fp32-matmul-prec high")
        if self._probably(0.5):
            return ["--optimizer", "dist_muon", *words]
        return ["--optimizer", "muon", *words, *self._maybe("--muon-tp-mode duplicated|--muon-tp-mode distributed", share=0.5)]

    def _experts(self, words: list[str]) -> list[str]:
        balance = self._choice(BALANCES)
        found = [
            "--num-experts",
            "8",
            "--moe-router-topk",
            self._one("1 2 2 4"),
            "--expert-model-parallel-size",
            self._one("1 2 2 4"),
        ]
        found += [
            "--moe-token-dispatcher-type",
            self._one("alltoall alltoall allgather flex"),
            "--moe-ffn-hidden-size",
            self._one("256 512"),
        ]
        if "flex" in found:
            found += self._choice(("--moe-enable-deepep", "--moe-flex-dispatcher-backend hybridep")).split()
        else:
            found += self._maybe("--info-moe-imbalance 1.5", share=0.1)
        found += ["--moe-router-load-balancing-type", balance]
        found += ["--moe-aux-loss-coeff", "1e-2"] if balance.endswith("aux_loss") else []
        if balance != "sinkhorn":
            found += self._maybe("--moe-router-score-function sigmoid", "--moe-router-pre-softmax", share=0.3)
        found += self._maybe("--moe-grouped-gemm", "--moe-permute-fusion", share=0.6)
        found += self._maybe("--moe-router-dtype fp32", "--moe-layer-freq 2", "--moe-z-loss-coeff 1e-3", "--moe-latent-size 256")
        if self._probably(0.4):
            found += ["--moe-shared-expert-intermediate-size", "512"]
            found += self._maybe("--moe-shared-expert-overlap", "--moe-shared-expert-gate", share=0.3)
        unsharded = words[words.index("--tensor-model-parallel-size") + 1] == "1"
        return found if unsharded else found + self._maybe("--expert-tensor-parallel-size 1", share=0.5)

    def _recompute(self, *, moe: bool, mla: bool, always: bool) -> list[str]:
        if self._probably(0.15):
            method = self._one("uniform block")
            return ["--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", self._one("1 2")]
        modules = ["core_attn", "layernorm", self._one("moe_act shared_experts moe") if moe else "mlp"]
        modules += ["mla_up_proj"] if mla else []
        picked = [each for each in modules if self._probably(0.5)] or modules[:1]
        return ["--recompute-granularity", "selective", "--recompute-modules", *picked] if always or self._probably(0.3) else []
