"""The options of Megatron-LM core 0.3 to 0.11, each release as differences from the next newer one.

`make_catalogue.py` adds these releases to the catalogue. Sources: public copies of the parser (megatron/arguments.py up to 0.5,
megatron/training/arguments.py after it), compared with the fields of the configuration classes in the packages megatron-core
0.3.0 to 0.11.0, which say which copy belongs to which release:

    0.3    LumiOpen/Megatron-LM-lumi a2cca9d without its own options of RoPE, norms, tokenizers and wandb
    0.4    Edenzzzz/Megatron-LM d958014 without the options of zero bubble
    0.5    OSU-Nowlab/Megatron-LM 23a8426 without --distributed-engine
    0.6    JiwenJ/Megatron-LM 5c768cc without `_add_metee_args`, and PKU-YuanGroup/Open-Sora-Plan 7c98509
    0.7    JiwenJ/MegatronLM a51d71d, without options whose fields 0.7.0 lacks
    0.8    Charles2530/MindSpeed-LLM 0161d1c without --max-checkpoints and --mlp-mxfp-quant
    0.9    C-TC/Megatron-LM 58b3ae1, without its own options and those whose fields 0.9.0 lacks
    0.10   between 0.9 and 0.11, by the fields of 0.10.0
    0.11   AleHD/Megatron-LM 0104195 without its own options, with the options whose fields 0.11.0 adds

An option without effect on memory whose first release is not known belongs to both releases in question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.option_rows import flag, option

_LLAMA3 = ["BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
           "GPTSentencePieceTokenizer", "Llama2Tokenizer", "Llama3Tokenizer", "MistralTokenizer", "NullTokenizer"]  # fmt: skip


def _without(names: list[str], *removed: str) -> list[str]:
    """Return `names` without those in `removed`."""
    return [name for name in names if name not in removed]


_TOKENIZERS_0_11 = [*_LLAMA3[:5], "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer", "NullTokenizer"]


@dataclass(frozen=True)
class Difference:
    """How the options of a release differ from those of the next newer release."""

    release: str
    added_later: str
    """Names of options that only newer releases have, separated by blanks."""
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By flag: the fields of argparse that were different."""
    removed_later: tuple[dict[str, Any], ...] = ()
    """Options that newer releases do not have."""


DIFFERENCES = (
    Difference(
        "0.11.0",
        """
        mrope-section mtp-num-layers mtp-loss-scaling-factor check-for-large-grads recompute-modules iterations-to-skip
        result-rejected-tracker-filename disable-gloo-process-groups cross-entropy-fusion-impl optimizer-cpu-offload
        optimizer-offload-fraction use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads
        no-pin-cpu-params pipeline-model-parallel-comm-backend use-persistent-ckpt-worker
        disable-bf16-reduced-precision-matmul ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw use-custom-fsdp
        init-model-with-meta-device data-parallel-sharding-strategy no-gradient-reduce-div-fusion
        suggested-communication-unit-size keep-fp8-transpose-cache-when-using-custom-fsdp moe-router-dtype moe-enable-deepep
        mscale mscale-all-dim heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json
        run-workload-inspector-server external-cuda-graph cuda-graph-scope inference-max-requests inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-buffer-guaranteed-fraction
        inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-max-requests-override
        inference-dynamic-batching-max-tokens-override fp8-recipe first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16 mamba-state-dim mamba-head-dim mamba-num-groups is-hybrid-model
        """,
        {
            "--position-embedding-type": {"choices": ["learned_absolute", "rope", "relative", "none"]},
            "--ckpt-format": {"choices": ["torch", "torch_dist", "zarr"]},
            "--moe-token-dispatcher-type": {"choices": ["allgather", "alltoall", "alltoall_seq"]},
            "--tokenizer-type": {"choices": _TOKENIZERS_0_11},
        },
        (option("--moe-router-topk-limited-devices", type="int"),),
    ),
    Difference(
        "0.10.0",
        """
        attention-backend relative-attention-num-buckets relative-attention-max-distance rope-scaling-factor
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split inference-rng-tracker
        cuda-graph-warmup-steps moe-router-score-function moe-router-num-groups moe-router-group-topk
        moe-router-topk-scaling-factor moe-router-enable-expert-bias moe-router-bias-update-rate moe-use-legacy-grouped-gemm
        moe-permute-fusion moe-router-topk-limited-devices use-precision-aware-optimizer main-grads-dtype main-params-dtype
        exp-avg-dtype exp-avg-sq-dtype grad-reduce-in-bf16
        """,
        {
            "--position-embedding-type": {"choices": ["learned_absolute", "rope", "none"]},
            "--moe-router-load-balancing-type": {"choices": ["aux_loss", "sinkhorn", "none"]},
        },
        (flag("--standalone-embedding-stage"), flag("--renormalize-blend-weights")),
    ),
    Difference(
        "0.9.0",
        """
        multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor
        moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-layer-freq moe-ffn-hidden-size
        expert-tensor-parallel-size cp-comm-type hierarchical-context-parallel-sizes flash-decode enable-cuda-graph te-rng-tracker
        num-distributed-optimizer-instances use-torch-fsdp2 use-rope-scaling tp-comm-bootstrap-backend
        overlap-p2p-communication-warmup-flush microbatch-group-size-per-virtual-pipeline-stage
        num-virtual-stages-per-pipeline-rank check-for-spiky-loss error-injection-rate error-injection-type rerun-mode
        record-memory-history memory-snapshot-path data-args-path per-split-data-args-path use-mp-args-from-checkpoint-args
        no-use-tokenizer-model-from-checkpoint-args replication replication-jump replication-factor calc-ft-timeouts
        inference-max-seq-length
        """,
        {
            "--tokenizer-type": {"choices": _without(_TOKENIZERS_0_11, "MultimodalTokenizer")},
            "--inference-batch-times-seqlen-threshold": {"default": 512},
        },
    ),
    Difference(
        "0.8.0",
        """
        fp8-param-gather enable-ft-package config-logger-dir decrease-batch-size-if-needed use-pytorch-profiler
        train-sync-interval non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo ckpt-format ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers no-align-grad-reduce
        overlap-param-gather-with-optimizer-step no-align-param-gather renormalize-blend-weights moe-use-upcycling local-rank
        """,
        {
            "--save-interval": {"flags": ["--save-interval"]},
            "--use-dist-ckpt": {"dest": "use_dist_ckpt"},
            "--dist-ckpt-format": {
                "dest": "dist_ckpt_format",
                "default": "torch_dist",
                "type": "str",
                "choices": ["zarr", "torch_dist"],
            },
            "--moe-token-dispatcher-type": {"choices": ["allgather", "alltoall"]},
            "--tokenizer-type": {"choices": [*_LLAMA3[:5], "HuggingFaceTokenizer", *_LLAMA3[5:8], "TikTokenizer", "NullTokenizer"]},
        },
        (
            option("--local_rank", type="int"),
            flag("--no-delay-grad-reduce", "delay_grad_reduce", value=False),
            flag("--delay-param-gather"),
            flag("--log-batch-size-to-tensorboard"),
            flag("--no-log-learnig-rate-to-tensorboard", "log_learning_rate_to_tensorboard", value=False),
        ),
    ),
    Difference(
        "0.7.0",
        """
        rotary-base no-one-logger one-logger-async app-tag-run-name app-tag-run-version cross-entropy-loss-fusion
        defer-embedding-wgrad-compute wgrad-deferral-limit lr-wsd-decay-style lr-wsd-decay-samples lr-wsd-decay-iters
        use-legacy-models no-ckpt-fully-parallel-save dist-ckpt-strictness ckpt-assume-constant-structure
        ddp-average-in-collective hybrid-attention-ratio hybrid-mlp-ratio hybrid-override-pattern moe-router-pre-softmax
        s3-cache-path tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens deterministic-mode
        """,
        {
            "--position-embedding-type": {"choices": ["learned_absolute", "rope"]},
            "--lr-decay-style": {"choices": ["constant", "linear", "cosine", "inverse-square-root"]},
            "--use-mcore-models": {"dest": "use_mcore_models"},
            "--ckpt-fully-parallel-save": {"dest": "ckpt_fully_parallel_save"},
            "--one-logger-project": {"default": "e2e-tracking"},
            "--split": {"default": "969, 30, 1"},
            "--tokenizer-type": {"choices": _LLAMA3},
        },
        (flag("--enable-one-logger"), option("--one-logger-entity", default="hwinf_dcm")),
    ),
    Difference(
        "0.6.0",
        """
        log-straggler disable-straggler-on-startup straggler-ctrlr-port straggler-minmax-count logging-level
        tp-comm-overlap-rs-dgrad check-weight-hash-across-dp-replicas-interval calculate-per-token-loss async-save
        ckpt-fully-parallel-load ddp-bucket-size use-tp-pp-dp-mapping num-dataset-builder-threads moe-expert-capacity-factor
        moe-pad-expert-input-to-capacity moe-token-drop-policy moe-layer-recompute moe-extended-tp
        """,
        {"--tokenizer-type": {"choices": _without(_LLAMA3, "Llama3Tokenizer", "MistralTokenizer")}},
        (flag("--moe-token-dropping"),),
    ),
    Difference(
        "0.5.0",
        """
        retro-project-dir qk-layernorm disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs decoupled-lr decoupled-min-lr
        pretrained-checkpoint ckpt-step use-dist-ckpt auto-detect-ckpt-format dist-ckpt-format ckpt-fully-parallel-save
        test-mode no-mmap-bin-files no-create-attention-mask-in-dataloader moe-token-dispatcher-type moe-per-layer-logging
        yaml-cfg
        """,
        {
            "--transformer-impl": {"default": "local"},
            "--dataloader-type": {"choices": ["single", "cyclic"]},
        },
        (option("--retro-workdir"), flag("--retro-return-doc-ids")),
    ),
    Difference(
        "0.4.0",
        """
        rotary-interleaved no-bias-swiglu-fusion no-rope-fusion add-qkv-bias log-throughput log-progress enable-one-logger
        one-logger-project one-logger-entity one-logger-run-name mock-data retro-attention-gate
        moe-router-load-balancing-type moe-router-topk moe-grouped-gemm moe-aux-loss-coeff moe-z-loss-coeff
        moe-input-jitter-eps moe-token-dropping
        """,
        {"--spec": {"nargs": 2}},
    ),
    Difference(
        "0.3.0",
        """
        apply-query-key-layer-scaling context-parallel-size delay-param-gather overlap-param-gather expert-model-parallel-size
        manual-gc manual-gc-interval no-manual-gc-eval nccl-communicator-config-path no-overlap-p2p-communication
        retro-no-verify-neighbor-count spec use-mcore-models wandb-project wandb-exp-name wandb-save-dir tp-comm-overlap
        tp-comm-overlap-cfg disable-tp-comm-split-ag disable-tp-comm-split-rs disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad no-clone-scatter-output-in-embedding
        """,
        removed_later=(
            flag("--no-query-key-layer-scaling", "apply_query_key_layer_scaling", value=False),
            flag("--overlap-p2p-communication", "overlap_p2p_comm"),
            flag("--mmap-warmup"),
            option("--model-spec", nargs=2),
        ),
    ),
)
"""Newest first."""


def earlier_releases(oldest: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the options of each release before 0.12, oldest first; `oldest` are the options of 0.12. Raises KeyError."""
    releases: dict[str, list[dict[str, Any]]] = {}
    options = oldest
    for difference in DIFFERENCES:
        options = apply_difference(difference, options)
        releases[difference.release] = options
    return dict(reversed(releases.items()))


def apply_difference(difference: Difference, newer: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of a release from those of the next newer one. Raises KeyError for a flag that is not among them."""
    added = {"--" + name for name in difference.added_later.split()}
    unknown = (added | difference.changed.keys()) - {name for row in newer for name in row["flags"]}
    if unknown:
        raise KeyError(f"{difference.release}: {', '.join(sorted(unknown))}")
    kept = [
        {**row, **{key: value for name in row["flags"] for key, value in difference.changed.get(name, {}).items()}}
        for row in newer
        if not added.intersection(row["flags"])
    ]
    return [*kept, *difference.removed_later]
