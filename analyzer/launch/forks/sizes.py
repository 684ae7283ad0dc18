"""Options about attention, the FFN and the batch: BigCode, EPFL, MindSpeed, FlagScale, Pai-Megatron-Patch, slime and ms-swift.

Sources: the parsers of these projects (`Fork.repository`), and for ms-swift swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

from typing import Final

from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.launch.forks.tuning import PAIRED
from analyzer.specs.rules.quantized import BLOCKS

_NO_REFERENCE: Final = "the reference model is not counted, so the prediction is too low"


def attention_head_type(launch: LaunchOptions, flag: str) -> Reading:
    """`multiquery`: all heads share one key and value head."""
    return _ONE_GROUP if launch.word(flag) == "multiquery" else NOTHING


def multiquery(launch: LaunchOptions, flag: str) -> Reading:  # noqa: ARG001
    """One key and value head, unless their number is given."""
    return NOTHING if launch.has("--num_attention_heads_kv") else _ONE_GROUP


def gated_activation(launch: LaunchOptions, flag: str) -> Reading:
    """A gated FFN. All kinds have the same sizes; the default width is four times the hidden size."""
    width = launch.ffn_hidden_size
    given = launch.has("--ffn-hidden-size") or width is None
    words = ("--swiglu",) if given else ("--swiglu", "--ffn-hidden-size", str(width))
    kind = launch.word(flag) or ""
    return Reading(words=words) if kind == "swiglu" else Reading(words=words, notes=(f"{kind} is counted as SwiGLU.",))


def activation_function(launch: LaunchOptions, flag: str) -> Reading:
    """Gated activation functions are counted as SwiGLU, others as GELU."""
    return Reading(words=("--swiglu",)) if "glu" in (launch.word(flag) or "") else NOTHING


def normalization_function(launch: LaunchOptions, flag: str) -> Reading:
    """rmsnorm or layernorm."""
    return Reading(words=("--normalization", "RMSNorm")) if launch.word(flag) == "rmsnorm" else NOTHING


def sliding_window(launch: LaunchOptions, flag: str) -> Reading:
    """Attention to a number of earlier tokens."""
    size = launch.integer(flag, 0)
    return Reading(words=("--window-size", f"{size},0")) if size > 0 else NOTHING


def intermediate_size(launch: LaunchOptions, flag: str) -> Reading:
    """Width of the FFN."""
    return Reading(words=("--ffn-hidden-size", launch.word(flag) or ""), dropped=("--ffn-hidden-size",))


def multiple_of(launch: LaunchOptions, flag: str) -> Reading:
    """Width of a gated FFN as in Llama: 8·h/3, times `--hidden-dim-multiplier`, rounded up to a multiple."""
    hidden, multiple = launch.integer("--hidden-size", 0), launch.integer(flag, 1)
    if not hidden or launch.has("--ffn-hidden-size"):
        return NOTHING
    width = int(8 * hidden / 3)
    try:
        width = int(float(launch.word("--hidden-dim-multiplier") or 1) * width)
    except ValueError:
        return NOTHING
    return Reading(words=("--ffn-hidden-size", str(-(-width // multiple) * multiple)))


def context_parallel_algorithm(launch: LaunchOptions, flag: str) -> Reading:
    """Communication of context-parallel ranks in MindSpeed: a ring, all-to-all as in Ulysses (the default), or both."""
    size = launch.integer("--context-parallel-size", 1)
    algorithm = launch.word(flag) or "ulysses_cp_algo"
    if size == 1:
        return NOTHING
    if launch.has("--multi-head-latent-attention") or launch.has("--multi-latent-attention"):
        algorithm = "megatron_cp_algo"
    if algorithm == "ulysses_cp_algo":
        return Reading(words=("--cp-comm-type", "a2a"))
    inner = launch.integer("--ulysses-degree-in-cp", 1)
    if algorithm == "hybrid_cp_algo" and size % inner == 0:
        sizes = (str(inner), str(size // inner))
        return Reading(words=("--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", *sizes))
    if algorithm == "megatron_cp_algo":
        return Reading(words=("--cp-comm-type", "p2p"))
    return Reading(words=("--cp-comm-type", "p2p"), warnings=(f"{flag} {algorithm}: communication in a ring is counted.",))


def recompute_norm(launch: LaunchOptions, flag: str) -> Reading:
    """Norms are recomputed; Megatron combines that with no other granularity."""
    if launch.has("--recompute-granularity") or launch.has("--recompute-activations"):
        return Reading(warnings=(f"{flag}: norms are counted as saved, so the prediction may be too high.",))
    return Reading(words=("--recompute-granularity", "selective", "--recompute-modules", "layernorm"))


def recompute_layers_of_rank(launch: LaunchOptions, flag: str) -> Reading:
    """`--recompute-num-layers` is for all chunks of a rank together."""
    chunk = launch.integer("--num-layers-per-virtual-pipeline-stage", 0)
    given = launch.integer("--recompute-num-layers", 0)
    if not chunk or not given or launch.word("--recompute-method") != "block":
        return NOTHING
    chunks = max(launch.integer("--num-layers", 0) // launch.pipeline // chunk, 1)
    note = f"{flag} is read as --recompute-num-layers {given // chunks}."
    return Reading(
        words=("--recompute-num-layers", str(given // chunks)),
        dropped=("--recompute-num-layers",),
        notes=(note,),
    )


def training_stage(launch: LaunchOptions, flag: str) -> Reading:
    """Kind of training. Direct preference optimization and reinforcement learning have a second model."""
    kind = launch.word(flag) or ""
    if flag == "--rlhf_type":
        return _pairs(launch, flag, kind)
    if kind in ("dpo", "kto", "grpo", "gkd") or kind.startswith(("ray_", "trl_")):
        return Reading(warnings=(f"{flag} {kind}: {_NO_REFERENCE}.",))
    return NOTHING


def _pairs(launch: LaunchOptions, flag: str, kind: str) -> Reading:
    """Of ms-swift: samples that are two sequences. What is not counted is in `tuning`."""
    if kind not in PAIRED:
        return NOTHING
    micro, samples = launch.integer("--micro-batch-size", 1), launch.integer("--global-batch-size", 16)
    words = ("--micro-batch-size", str(2 * micro), "--global-batch-size", str(2 * samples))
    note = f"{flag} {kind}: a sample is two sequences, {2 * micro} in a microbatch of {micro}."
    return Reading(words=words, dropped=("--micro-batch-size", "--global-batch-size"), notes=(note,))


def max_length(launch: LaunchOptions, flag: str) -> Reading:
    """Length of a sequence in ms-swift."""
    length = launch.word(flag)
    if length is None or launch.has("--seq-length"):
        return NOTHING
    padded, notes = length, []
    most, multiple = launch.maybe_integer(flag), _padded_to(launch)
    if most is not None and most % multiple:
        padded = str(-(-most // multiple) * multiple)
        notes.append(
            f"{flag} {length}: sequences are padded to a multiple of {multiple} tokens, so that they have {padded} at most."
        )
    positions = () if launch.has("--max-position-embeddings") else ("--max-position-embeddings", padded)
    if (launch.word("--packing") or "false").lower() != "true":
        note = f"{flag} {length} is the longest sequence: each sample is counted with {padded} tokens, and shorter ones need less."
        notes.append(note)
    return Reading(words=("--seq-length", padded, *positions), notes=tuple(notes))


def _padded_to(launch: LaunchOptions) -> int:
    """The multiple of tokens that ms-swift pads sequences to (`get_padding_to`, swift/megatron/utils/utils.py)."""
    tensor = launch.integer("--tensor-model-parallel-size", 1) if launch.has("--sequence-parallel") else 1
    ranks = max(1, tensor) * max(1, launch.integer("--context-parallel-size", 1))
    quantized = launch.has("--fp8-format") or launch.has("--fp4-format")
    each = BLOCKS.get(launch.word("--fp8-recipe") or "", 16 if quantized else 1)
    return ranks * (max(each, 64) if launch.word("--attention-backend") == "fused" else each)


def tokens_of_microbatch(launch: LaunchOptions, flag: str) -> Reading:
    """Microbatches of slime are packed up to a number of tokens for each context-parallel rank."""
    tokens = launch.integer(flag, 0) * launch.integer("--context-parallel-size", 1)
    if not tokens or not launch.has("--use-dynamic-batch-size"):
        return NOTHING
    positions = str(max(tokens, launch.integer("--max-position-embeddings", 0)))
    words = ("--micro-batch-size", "1", "--seq-length", str(tokens), "--max-position-embeddings", positions)
    return Reading(
        words=words,
        dropped=("--micro-batch-size", "--seq-length", "--max-position-embeddings"),
        notes=(f"{flag} is read as packed sequences of {tokens} tokens.",),
    )


def steps_of_rollout(launch: LaunchOptions, flag: str) -> Reading:
    """Samples of a rollout are divided over a number of optimizer steps."""
    prompts = launch.integer("--rollout-batch-size", 0)
    steps = launch.integer(flag, 1)
    samples = prompts * launch.integer("--n-samples-per-prompt", 1)
    if not samples or steps < 1 or launch.has("--global-batch-size"):
        return NOTHING
    return Reading(words=("--global-batch-size", str(samples // steps)))


def fsdp2_configuration(launch: LaunchOptions, flag: str) -> Reading:
    """A file with the settings of torch FSDP2. Without `--use-torch-fsdp2` parameters are counted without sharding."""
    fault = "the settings in this file are not read, so the prediction may be too high or too low"
    if not launch.has("--use-torch-fsdp2"):
        fault = "parameters are counted without sharding, so the prediction is too high"
    return Reading(warnings=(f"{flag}: {fault}.",))


def recompute_default(launch: LaunchOptions) -> Reading:
    """One layer for each recomputed block, the default of the code of August 2023, which older scripts of these forks rely on."""
    if launch.word("--recompute-granularity") != "full" or launch.has("--recompute-num-layers"):
        return NOTHING
    words = ("--recompute-num-layers", "1")
    return Reading(words=words, notes=(f"{' '.join(words)} is assumed, the default of the code of August 2023.",))


def slime_defaults(launch: LaunchOptions) -> Reading:
    """What slime sets in every launch (`_set_default_megatron_args` in slime/backends/megatron_utils/arguments.py)."""
    words: tuple[str, ...] = () if launch.has("--use-distributed-optimizer") else ("--use-distributed-optimizer",)
    words += () if launch.has("--fp16") or launch.has("--bf16") else ("--bf16",)
    words += ("--no-create-attention-mask-in-dataloader",)  # packed sequences: attention_mask=None in model.py
    if not launch.has("--seq-length") and tokens_of_microbatch(launch, "--max-tokens-per-gpu") == NOTHING:
        words += ("--seq-length", "4096")
        words += () if launch.has("--max-position-embeddings") else ("--max-position-embeddings", "4096")
    return Reading(words=words, notes=(f"slime sets {' '.join(words)}.",) if words else ())


def npu_layers(launch: LaunchOptions) -> Reading:
    """MindSpeed's local layers have fused attention, context parallelism and latent attention, as those of Transformer Engine."""
    flag, value = "--transformer-impl", "transformer_engine"
    if launch.word(flag) != "local" or not launch.has("--use-flash-attn"):
        return NOTHING
    note = f"{flag} local is read as {flag} {value}: with --use-flash-attn MindSpeed's layers have fused attention."
    return Reading(words=(flag, value), dropped=(flag,), notes=(note,))


def wide_ffn(launch: LaunchOptions) -> Reading:
    """The FFN of Yuan is four times the hidden size wide, also if it is gated (`validate_args`)."""
    width = launch.ffn_hidden_size
    if width is None or launch.has("--ffn-hidden-size") or not launch.has("--swiglu"):
        return NOTHING
    return Reading(words=("--ffn-hidden-size", str(width)), notes=(f"The FFN of Yuan 2.0 is 4 × hidden size = {width} wide.",))


def local_attention(launch: LaunchOptions, flag: str) -> Reading:
    """Attention without fused kernels, in models that Model Optimizer builds."""
    if not launch.has("--modelopt-enabled"):
        return NOTHING
    return Reading(warnings=(f"{flag}: fused attention is counted, so the prediction may be too low.",))


_ONE_GROUP = Reading(words=("--group-query-attention", "--num-query-groups", "1"))
