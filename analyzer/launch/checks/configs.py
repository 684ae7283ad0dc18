"""Checks of `TransformerConfig` and `ModelParallelConfig` (megatron/core), 0.16 to 0.19.

Those of `MLATransformerConfig` are in `analyzer.launch.derive.model.mla`. Those of graphs, offloading and experts are in the
other modules of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from analyzer.launch.checks.graph_options import graph_violations
from analyzer.launch.checks.moe_options import moe_violations, overlap_violations
from analyzer.launch.checks.offload_options import offload_violations
from analyzer.launch.derive.reading import integer, number, option, since, switched_on
from analyzer.specs.rules.quantized import BLOCKS
from analyzer.specs.rules.violation import Violation

if TYPE_CHECKING:
    from analyzer.launch.arguments import Arguments
    from analyzer.launch.derive.launch_input import LaunchInput
    from analyzer.specs import TrainingJob


def config_violations(launch: LaunchInput, job: TrainingJob) -> Iterator[Violation]:
    """The checks of the configs that a launch breaks."""
    arguments = launch.arguments
    return chain(
        _deferral_limit(arguments),
        _communication_types(arguments, job),
        _layers_without_rope(arguments, job),
        _glu_offset(arguments, job),
        _mup_width(arguments),
        _quantized_output_layer(arguments, job),
        graph_violations(arguments, job),
        offload_violations(arguments, job),
        overlap_violations(arguments, job),
        moe_violations(arguments),
    )


def _deferral_limit(arguments: Arguments) -> Iterator[Violation]:
    limit = integer(arguments, "wgrad_deferral_limit")
    deferred = switched_on(arguments, "defer_embedding_wgrad_compute") and since(arguments, "0.10")
    if deferred and limit is not None and limit < 0:
        yield Violation(("wgrad_deferral_limit",), f"{limit} is below 0", "give 0, for no limit, or more")


def _communication_types(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """One type of context-parallel communication, or one for each layer."""
    types = arguments.get("cp_comm_type")
    if job.parallel.context == 1 or not isinstance(types, list | tuple) or not since(arguments, "0.10"):
        return
    if len(types) in (1, job.model.num_layers):
        return
    yield Violation(
        ("cp_comm_type",),
        f"lists {len(types)} types for {job.model.num_layers} layers",
        "give one type for all layers, or one for each",
    )


def _layers_without_rope(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """`--no-rope-freq`: every N-th layer, or a list with one item for each layer."""
    value, layers = arguments.get("no_rope_freq"), job.model.num_layers
    if not value or not since(arguments, "0.14"):
        return
    named = ("no_rope_freq",)
    if isinstance(value, list | tuple):
        if len(value) != layers:
            yield Violation(named, f"lists {len(value)} layers, and the model has {layers}", f"give {layers} items")
    elif isinstance(value, int) and layers % value:
        yield Violation(named, f"{layers} layers are not a multiple of {value}", f"use a divisor of {layers}")


def _glu_offset(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """The kernel that fuses biases with an activation has an offset for quick GEGLU only."""
    model = job.model
    if not number(arguments, "glu_linear_offset", 0) or model.activation == "quick_geglu" or not since(arguments, "0.15"):
        return
    if model.bias_activation_fusion:
        flag = "--no-bias-swiglu-fusion" if model.activation == "swiglu" else "--no-bias-gelu-fusion"
        yield Violation(
            ("glu_linear_offset",), "the fusion of bias and activation supports it with --quick-geglu only", f"add {flag}"
        )


def _mup_width(arguments: Arguments) -> Iterator[Violation]:
    width = integer(arguments, "mup_base_hidden_size")
    if switched_on(arguments, "use_mup") and width is not None and width <= 0:
        fault = f"{width} is not above 0"
        yield Violation(
            ("mup_base_hidden_size",), fault, f"give the width of the base model, less than {option(arguments, 'hidden_size')}"
        )


def _quantized_output_layer(arguments: Arguments, job: TrainingJob) -> Iterator[Violation]:
    """An output layer in FP8: also asserts of `TELMHeadColumnParallelLinear` (core/extensions/transformer_engine.py)."""
    if not switched_on(arguments, "fp8_output_proj"):
        return
    named, fp8 = ("fp8_output_proj",), job.precision.fp8
    if fp8 is None or fp8.recipe == "nvfp4":
        yield Violation(named, "FP8 is not on", "add --fp8-format e4m3 --fp8-recipe mxfp8, or leave it out")
    elif fp8.recipe != "mxfp8":
        yield Violation(named, f"needs the recipe mxfp8, not {fp8.recipe}", "add --fp8-recipe mxfp8, or leave it out")
    if fp8 is None or not fp8.output_layer:
        return
    if job.model.tied_embeddings and job.parallel.pipeline == 1:  # the last of several stages has a copy of the weight
        yield Violation(named, "needs a weight of its own", "add --untie-embeddings-and-output-weights, or leave it out")
    if job.flags.defer_embedding_wgrad:
        yield Violation(named, "cannot be used with --defer-embedding-wgrad-compute", "keep one of the two")
    columns = job.model.padded_vocab_size // job.parallel.tensor
    block = BLOCKS["mxfp8"]
    if columns % block:  # `MXFP8Quantizer.is_quantizable`
        fault = f"needs a multiple of {block} rows of the vocabulary on each rank, not {columns}"
        yield Violation(named, fault, "use --make-vocab-size-divisible-by 128, or leave it out")
