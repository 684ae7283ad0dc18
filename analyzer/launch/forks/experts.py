"""Options of MoE layers: DeepSpeed, MegaBlocks, MindSpeed, and Pai-Megatron-Patch.

Sources: megatron/arguments.py and megatron/model/language_model.py of microsoft/Megatron-DeepSpeed,
deepspeed/moe/sharded_moe.py of DeepSpeed, megablocks/layers/arguments.py of MegaBlocks, mindspeed_llm/training/arguments.py and
mindspeed_llm/core/models/gpt of MindSpeed-LLM, megatron_patch/arguments.py of Pai-Megatron-Patch.
"""

from __future__ import annotations

from collections.abc import Iterable

from analyzer.errors import InputError
from analyzer.launch.forks.launch_options import NOTHING, LaunchOptions, Reading
from analyzer.launch.forks.stages import idle_layers
from analyzer.units import natural

_PROBABILITIES = ("--moe-router-pre-softmax",)
"""DeepSpeed and MegaBlocks take the softmax over all experts before they choose some."""
_ROUTER_BIAS = "--num-experts: a bias of the router is counted, which DeepSpeed lacks."
_TOKEN_DROPPING = ("--moe-token-dispatcher-type", "alltoall", "--moe-pad-expert-input-to-capacity")


def deepspeed_experts(launch: LaunchOptions) -> int:
    """Number of experts of a Megatron-DeepSpeed launch: the largest of the values; 1 for a dense model.

    Raises InputError for a value that is not a number.
    """
    counts = [1]
    for word in launch.megatron.get("--num-experts", ()):
        count = natural(word)
        if count is None:
            raise InputError("--num-experts", f"{word!r} is not a number of experts", "give one number, or one for each stage")
        counts.append(count)
    return max(counts)


def deepspeed_defaults(launch: LaunchOptions) -> Reading:
    """Megatron-DeepSpeed's defaults for MoE: one expert for each token, experts in every second layer, and a capacity of 1.0.

    `--num-experts 1` is a dense model.
    """
    counts = launch.megatron.get("--num-experts", ())
    if not counts:
        return NOTHING
    experts = deepspeed_experts(launch)
    if experts == 1:
        return Reading(dropped=("--num-experts",), notes=("--num-experts 1 is read as a dense model.",))
    words = list(_PROBABILITIES) if launch.has("--topk") else [*_PROBABILITIES, "--moe-router-topk", "1"]
    if not launch.has("--expert-interval"):
        words += _every(launch, 2)
    if not launch.has("--moe-train-capacity-factor"):
        words += _capacity(launch, "1.0")
    biases = () if launch.has("--disable-bias-linear") else (_ROUTER_BIAS,)
    if len(counts) == 1:
        return Reading(words=tuple(words), notes=biases)
    fault = f"every MoE layer is counted with {experts} experts, so the prediction is too high"
    return Reading(
        words=("--num-experts", str(experts), *words),
        dropped=("--num-experts",),
        notes=biases,
        warnings=(f"--num-experts: {fault}.",),
    )


def expert_interval(launch: LaunchOptions, flag: str) -> Reading:
    """Experts in every N-th layer, the N-th layer first."""
    if not launch.has("--num-experts"):
        return NOTHING
    return Reading(words=_every(launch, launch.integer(flag, 1)))


def train_capacity_factor(launch: LaunchOptions, flag: str) -> Reading:
    """Capacity of an expert, to which its input is padded. It belongs to another MoE layer in MindSpeed."""
    if "mindspeed" in launch.keys or deepspeed_experts(launch) == 1:
        return NOTHING
    return Reading(words=_capacity(launch, launch.word(flag) or "1.0"))


def no_token_dropping(launch: LaunchOptions, flag: str) -> Reading:
    """All experts are padded to the tokens of the one with the most."""
    if deepspeed_experts(launch) == 1:
        return NOTHING
    return Reading(warnings=(f"{flag}: padding of experts to the largest one is not counted, so the prediction may be too low.",))


def expert_parallel_size(launch: LaunchOptions, flag: str) -> Reading:
    """Expert-parallel ranks. DeepSpeed splits an expert over tensor-parallel ranks only with an option."""
    size = launch.integer(flag, 1)
    if deepspeed_experts(launch) == 1:
        return NOTHING
    split = launch.tensor == 1 or launch.has("--enable-expert-tensor-parallelism") or launch.has("--expert-tensor-parallelism")
    whole = () if split else ("--expert-tensor-parallel-size", "1")
    return Reading(words=("--expert-model-parallel-size", str(size), *whole))


def mlp_type(launch: LaunchOptions, flag: str) -> Reading:
    """`residual`: a dense FFN beside the experts of a layer. `glu`: a gated FFN."""
    kind = launch.word(flag)
    width = launch.ffn_hidden_size
    if kind == "glu":
        return Reading(words=("--swiglu",))
    if kind != "residual" or width is None or deepspeed_experts(launch) == 1:
        return NOTHING
    return Reading(
        words=("--moe-shared-expert-intermediate-size", str(width), "--disable-bias-linear"),
        warnings=(f"{flag} residual: biases and the weights of the sum are not counted, so the prediction is slightly too low.",),
    )


def shared_experts(launch: LaunchOptions, flag: str) -> Reading:
    """Total width of the shared experts."""
    count = launch.integer(flag, 0)
    width = launch.maybe_integer("--moe-intermediate-size") or launch.maybe_integer("--moe-ffn-hidden-size")
    width = width or launch.ffn_hidden_size
    if not count or width is None or launch.has("--moe-shared-expert-intermediate-size"):
        return NOTHING
    return Reading(words=("--moe-shared-expert-intermediate-size", str(count * width)))


def groups_of_token(launch: LaunchOptions, flag: str) -> Reading:
    """Groups of experts that a token may be sent to. It has no effect without a number of groups (`--n-group`)."""
    if not (launch.has("--n-group") or launch.has("--moe-router-num-groups")):
        return NOTHING
    return Reading(words=("--moe-router-group-topk", launch.word(flag) or ""))


def first_dense_layers(launch: LaunchOptions, flag: str) -> Reading:
    """The first layers are dense; of the others, those with an index that `--moe-layer-freq` divides have experts."""
    dense = max(launch.integer(flag, 0), 0)
    every = launch.integer("--moe-layer-freq", 1)
    layers = launch.integer("--num-layers", 0)
    if not launch.has("--num-experts") or dense > layers or every < 1:
        return NOTHING
    idle = idle_layers(launch)
    pattern = _pattern(index >= dense and index % every == 0 for index in range(layers) if index not in idle)
    return Reading(words=("--moe-layer-freq", pattern), dropped=("--moe-layer-freq",))


def experts_over_tensor_ranks(launch: LaunchOptions, flag: str) -> Reading:
    """Tensor-parallel ranks hold different experts instead of parts of each expert."""
    if launch.tensor == 1 or not launch.has("--num-experts"):
        return NOTHING
    size = launch.integer("--expert-model-parallel-size", 1) * launch.tensor
    return Reading(
        words=("--expert-model-parallel-size", str(size), "--expert-tensor-parallel-size", "1"),
        dropped=("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
        notes=(f"{flag} is read as --expert-model-parallel-size {size} --expert-tensor-parallel-size 1.",),
    )


def megablocks_experts(launch: LaunchOptions, flag: str) -> Reading:
    """Experts of MegaBlocks, without a capacity unless one is given; 1 is a dense model."""
    count = launch.integer(flag, 1)
    if count == 1:
        return NOTHING
    words = ["--num-experts", str(count), *_PROBABILITIES]
    if not launch.has("--moe-top-k"):
        words += ["--moe-router-topk", "1"]
    if launch.word("--moe-capacity-factor") in (None, "0"):
        words += ["--moe-token-dispatcher-type", "alltoall"]
    if launch.has("--disable-bias-linear"):
        return Reading(words=tuple(words))
    fault = "biases of each expert and of the router are counted instead of one bias for all experts"
    return Reading(words=tuple(words), warnings=(f"{flag}: {fault}, so the prediction is slightly too high.",))


def megablocks_capacity(launch: LaunchOptions, flag: str) -> Reading:
    """Capacity of an expert; 0 is no limit."""
    factor = launch.word(flag) or "0"
    if launch.integer("--moe-num-experts", 1) == 1 or factor in ("0", "0.0"):
        return NOTHING
    return Reading(words=("--moe-expert-capacity-factor", factor, *_TOKEN_DROPPING))


def megablocks_parallelism(launch: LaunchOptions, flag: str) -> Reading:
    """Experts are spread over the data-parallel ranks, and split if there are more ranks than experts."""
    count = launch.integer("--moe-num-experts", 1)
    if count == 1:
        return NOTHING
    if launch.world is None:
        return Reading(warnings=(f"{flag}: the number of GPUs is unknown, and every rank is counted with all experts.",))
    ranks = max(launch.world // (launch.tensor * launch.pipeline), 1)
    parallel = min(count, ranks)
    words = ("--expert-model-parallel-size", str(parallel))
    return Reading(words=(*words, "--expert-tensor-parallel-size", str(ranks // parallel)))


def _every(launch: LaunchOptions, interval: int) -> tuple[str, ...]:
    """Words for experts in every layer whose number, from 1 on, is a multiple of `interval`."""
    layers = launch.integer("--num-layers", 0)
    if interval <= 1 or not layers:
        return ()
    if layers % interval == 0:
        return ("--moe-layer-freq", f"([0]*{interval - 1}+[1])*{layers // interval}")
    return ("--moe-layer-freq", _pattern((index + 1) % interval == 0 for index in range(layers)))


def _pattern(layers: Iterable[bool]) -> str:
    """Megatron's notation of which layers have experts: runs of equal layers, as [0]*1+[1]*26."""
    runs: list[list[int]] = []
    for layer in layers:
        if not runs or runs[-1][0] != layer:
            runs.append([int(layer), 0])
        runs[-1][1] += 1
    return "+".join(f"[{value}]*{count}" for value, count in runs)


def _capacity(launch: LaunchOptions, factor: str) -> tuple[str, ...]:
    """Words for a token capacity of an expert, unless tokens are not dropped."""
    if launch.has("--disable-moe-token-dropping"):
        return ("--moe-token-dispatcher-type", "alltoall")
    return ("--moe-expert-capacity-factor", factor, *_TOKEN_DROPPING)
