"""The options of Megatron-LM of August 2023 (core package 0.2.0), as differences from release 0.12.3.

`make_catalogue.py` adds them to the catalogue as the release "2023". There are three parts: the options of 0.12.3 that existed in
2023, the defaults that were different in 2023, and the options that were removed before 0.12.
"""

from __future__ import annotations

from typing import Any

from tools.option_rows import flag, option

_NAMES = """
num-layers encoder-num-layers decoder-num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
group-query-attention num-query-groups max-position-embeddings position-embedding-type use-rotary-position-embeddings
rotary-percent rotary-seq-len-interpolation-factor no-position-embedding make-vocab-size-divisible-by normalization
apply-layernorm-1p apply-residual-connection-post-layernorm openai-gelu squared-relu swiglu onnx-safe
bert-no-binary-head untie-embeddings-and-output-weights num-experts log-params-norm log-num-zeros-in-grad
timing-log-level no-barrier-with-level-1-timing timing-log-option tensorboard-log-interval tensorboard-queue-size
log-timers-to-tensorboard no-log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
log-world-size-to-tensorboard attention-dropout hidden-dropout weight-decay start-weight-decay end-weight-decay
weight-decay-incr-style clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum micro-batch-size batch-size
global-batch-size rampup-batch-size recompute-activations recompute-granularity distribute-saved-activations
recompute-method recompute-num-layers profile profile-step-start profile-step-end profile-ranks tp-comm-overlap
tp-comm-overlap-cfg disable-tp-comm-split-ag disable-tp-comm-split-rs disable-tp-comm-bulk-dgrad
disable-tp-comm-bulk-wgrad checkpoint-activations train-iters train-samples log-interval exit-interval
exit-duration-in-mins exit-signal-handler tensorboard-dir no-masked-softmax-fusion no-bias-gelu-fusion
no-bias-dropout-fusion use-flash-attn disable-bias-linear optimizer dataloader-type
no-async-tensor-model-parallel-allreduce no-persist-layer-norm sequence-parallel no-gradient-accumulation-fusion seed
data-parallel-random-init init-method-std init-method-xavier-uniform lr lr-decay-style lr-decay-iters lr-decay-samples
lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-init warmup min-lr override-opt_param-scheduler
use-checkpoint-opt_param-scheduler save save-interval no-save-optim no-save-rng load no-load-optim no-load-rng
finetune no-initialization use-checkpoint-args exit-on-missing-checkpoint fp16 bf16 loss-scale initial-loss-scale
min-loss-scale loss-scale-window hysteresis fp32-residual-connection attention-softmax-in-fp32
accumulate-allreduce-grads-in-fp32 fp16-lm-cross-entropy tensor-model-parallel-size pipeline-model-parallel-size
pipeline-model-parallel-split-rank model-parallel-size num-layers-per-virtual-pipeline-stage distributed-backend
distributed-timeout-minutes no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p lazy-mpu-init
use-cpu-initialization empty-unused-memory-level use-distributed-optimizer eval-iters eval-interval skip-train
data-path split train-data-path valid-data-path test-data-path data-cache-path vocab-size vocab-file merge-file
vocab-extra-ids seq-length encoder-seq-length decoder-seq-length retriever-seq-length sample-rate mask-prob
short-seq-prob num-workers tokenizer-type tokenizer-model reset-position-ids reset-attention-mask eod-mask-loss
adlr-autoresume adlr-autoresume-interval ict-head-size biencoder-projection-dim biencoder-shared-query-context-model
ict-load bert-load titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path
retriever-report-topk-accuracies retriever-score-scaling block-data-path embedding-path indexer-batch-size
indexer-log-interval num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
no-data-sharding head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type swin-backbone-type
mask-type mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size
dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
dino-warmup-teacher-temp-epochs inference-batch-times-seqlen-threshold max-tokens-to-oom output-bert-embeddings
bert-embedder-type no-fp8-wgrad fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo transformer-impl
retro-add-retriever retro-cyclic-train-iters retro-encoder-layers retro-encoder-hidden-dropout
retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks
"""
UNCHANGED = tuple("--" + name for name in _NAMES.split())
"""Options of 0.12.3 that existed in 2023."""

CHANGED_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "recompute_num_layers": 1,
    "apply_query_key_layer_scaling": True,
}

REMOVED: list[dict[str, Any]] = [
    option("--layernorm-epsilon", type="float", default=1e-5),
    flag("--embedding-weights-in-fp32"),
    flag("--no-query-key-layer-scaling", "apply_query_key_layer_scaling", value=False),
    flag("--overlap-p2p-communication", "overlap_p2p_comm"),
    flag("--overlap-grad-reduce"),
    flag("--delay-grad-reduce"),
    option("--DDP-impl", dest="DDP_impl", default="local", type=None, choices=["local", "torch"]),
    flag("--no-contiguous-buffers-in-local-ddp", "use_contiguous_buffers_in_local_ddp", value=False),
    flag("--standalone-embedding-stage"),
    option("--local_rank", dest="local_rank", type="int"),
    option("--data-impl", default="infer", choices=["lazy", "cached", "mmap", "infer"]),
    flag("--mmap-warmup"),
    flag("--log-batch-size-to-tensorboard"),
    flag("--no-log-learnig-rate-to-tensorboard", "log_learning_rate_to_tensorboard", value=False),
    flag("--fp8-e4m3"),
    flag("--fp8-hybrid"),
    flag("--no-clone-scatter-output-in-embedding", "clone_scatter_output_in_embedding", value=False),
    option("--retro-workdir"),
    flag("--retro-return-doc-ids"),
]
