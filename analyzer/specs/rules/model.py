"""Rules for the sizes of the model: what tensor, expert and context parallelism must divide.

Source: `validate_args`, `TransformerConfig.__post_init__` and the layers that call `divide`, 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from analyzer.specs.model import ModelSpec
from analyzer.specs.moe import MoeSpec
from analyzer.specs.option_names import flag_of
from analyzer.specs.parallel import ParallelSpec
from analyzer.specs.release_changes import core_behavior
from analyzer.specs.rules.violation import Violation, multiple_near


def model_violations(model: ModelSpec, parallel: ParallelSpec, *, megatron: str) -> Iterator[Violation]:
    """Sizes of the model that cannot be split over tensor- and expert-parallel ranks."""
    t = parallel.tensor
    yield from _divided("num_attention_heads", f"{model.num_attention_heads} heads", model.num_attention_heads, t)
    groups = model.num_query_groups
    few_allowed = core_behavior(megatron).few_query_groups
    if model.mla is None and groups % t and (t % groups or not few_allowed):
        best = max(size for size in range(1, t) if groups % size == 0 or (few_allowed and size % groups == 0))
        yield Violation(
            ("tensor_model_parallel_size",),
            f"{groups} query groups cannot be split over {t} tensor-parallel ranks (--num-query-groups)",
            f"use a divisor of {groups}{' or a multiple of it' if few_allowed else ''}, for example "
            f"--tensor-model-parallel-size {best}",
        )
    yield from _divided("ffn_hidden_size", str(model.ffn_hidden_size), model.ffn_hidden_size, t)
    if model.padded_vocab_size % t:
        yield Violation(
            ("padded_vocab_size",),
            f"{model.padded_vocab_size} vocabulary rows cannot be split over {t} tensor-parallel ranks",
            f"use a multiple of {t}",
        )
    for number, block in enumerate(model.blocks, 1):
        if block.ffn_hidden_size is not None and block.ffn_hidden_size % t:
            yield Violation(
                ("heterogeneous_layers_config_path",),
                f"the FFN width {block.ffn_hidden_size} of layer {number} cannot be split over {t} tensor-parallel ranks",
                "use --tensor-model-parallel-size with a divisor of it",
            )
        if parallel.sequence_parallel and "linear" in (block.attention, block.feed_forward):
            yield Violation(
                ("sequence_parallel",),
                f"fails at the linear layer in layer {number} of --heterogeneous-layers-config-path: Megatron pads the sequence "
                "dimension instead of the hidden dimension",
                "leave it out, or use --tensor-model-parallel-size 1",
            )
    if model.moe is not None:
        yield from _moe(model, model.moe, parallel)
    elif parallel.expert > 1:
        yield Violation(
            ("expert_model_parallel_size",),
            f"there are no experts to distribute over {parallel.expert} ranks",
            "add --num-experts, or leave it out",
        )


def _divided(dest: str, what: str, size: int, tensor: int) -> Iterator[Violation]:
    if size % tensor:
        best = max(divisor for divisor in range(1, tensor) if size % divisor == 0)
        yield Violation(
            ("tensor_model_parallel_size",),
            f"{what} cannot be split over {tensor} tensor-parallel ranks ({flag_of(dest)})",
            f"use a divisor of {size}, for example --tensor-model-parallel-size {best}",
        )


def _moe(model: ModelSpec, moe: MoeSpec, parallel: ParallelSpec) -> Iterator[Violation]:
    if moe.num_experts % parallel.expert:
        yield Violation(
            ("num_experts",),
            f"{moe.num_experts} experts cannot be distributed over {parallel.expert} ranks",
            f"use a multiple of {parallel.expert}",
        )
    if moe.rank_capacity is not None and parallel.expert_tensor > 1:  # it is relative to the tokens before they are gathered
        yield Violation(
            ("moe_expert_rank_capacity_factor",),
            "is not modelled with expert tensor parallelism",
            "add --expert-tensor-parallel-size 1, or leave it out",
        )
    if moe.ffn_hidden_size % parallel.expert_tensor:
        yield Violation(
            ("moe_ffn_hidden_size",),
            f"{moe.ffn_hidden_size} cannot be split over {parallel.expert_tensor} expert-tensor-parallel ranks",
            f"use a multiple of {parallel.expert_tensor}, for example {multiple_near(moe.ffn_hidden_size, parallel.expert_tensor)}",
        )
    if moe.shared_ffn_hidden_size is not None:
        yield from _divided(
            "moe_shared_expert_intermediate_size", str(moe.shared_ffn_hidden_size), moe.shared_ffn_hidden_size, parallel.tensor
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield Violation(
            ("num_experts",),
            f"with a tensor-parallel size of {parallel.tensor}, MoE layers need sequence parallelism",
            "add --sequence-parallel",
        )
    if model.bias_linear and parallel.expert_tensor != 1:
        yield Violation(
            ("expert_tensor_parallel_size",),
            f"experts with biases cannot be split over {parallel.expert_tensor} ranks",
            "use --expert-tensor-parallel-size 1, or --disable-bias-linear",
        )


def sequence_violations(seq_length: int, parallel: ParallelSpec) -> Iterator[Violation]:
    """A sequence that cannot be split over context- and tensor-parallel ranks."""
    c, t = parallel.context, parallel.tensor
    if c > 1 and seq_length % (2 * c):
        yield Violation(
            ("seq_length",),
            f"{seq_length} tokens cannot be split into 2 × {c} chunks for context parallelism",
            f"use a multiple of {2 * c}, for example {multiple_near(seq_length, 2 * c)}",
        )
    elif parallel.sequence_parallel and seq_length // c % t:
        yield Violation(
            ("seq_length",),
            f"{seq_length // c} tokens on a rank cannot be split over {t} ranks for --sequence-parallel",
            f"use a multiple of {t * c}, for example {multiple_near(seq_length, t * c)}",
        )
