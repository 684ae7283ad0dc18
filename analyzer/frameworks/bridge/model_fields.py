"""The fields of a model in a container of Megatron-Bridge, by the names and values that options of Megatron-LM have.

A container that was written after the setup (`runtime_config_update`) has what `TransformerConfig.__post_init__` of megatron-core
and `finalize` of the provider made of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzer.errors import InputError
from analyzer.frameworks.containers import Tree
from analyzer.frameworks.options import is_true
from analyzer.frameworks.yaml_files import keys_of
from analyzer.launch.options.choose_release import LaterRelease
from analyzer.specs.precision import ONE_SCALE
from analyzer.specs.release_changes import core_behavior
from analyzer.units import natural


def flat(model: Tree) -> Tree:
    """The fields of a model. Its later configurations (BridgeGPTModelConfig) have those of TransformerConfig in `transformer`.

    MTP layers of a hybrid have a pattern of their own, which Megatron-LM appends for each of them (`MambaModelProvider`).
    """
    fields = {
        **keys_of(model.get("transformer"), "transformer"),
        **{name: value for name, value in model.items() if name != "transformer"},
    }
    main, own = fields.get("hybrid_layer_pattern"), fields.get("mtp_hybrid_override_pattern")
    if main and own:
        decoder, layers = str(main).partition("/")[0], natural(str(fields.get("mtp_num_layers"))) or 0
        fields["hybrid_layer_pattern"] = "/".join([decoder, *[str(own)] * layers])
        fields["mtp_hybrid_override_pattern"] = None
    if fields.get("expert_tensor_parallel_size") is None and (natural(str(fields.get("expert_model_parallel_size"))) or 1) > 1:
        fields["expert_tensor_parallel_size"] = 1  # `_set_moe_expert_tensor_parallel_default` of models/transformer_config.py
    if fields.get("moe_router_dtype") == "bf16":
        fields["moe_router_dtype"] = None  # `TopKRouter.routing` raises the type for fp32 and fp64 only
    fields["pipeline_model_parallel_layout"] = _layout(fields.get("pipeline_model_parallel_layout"))
    if fields.get("cuda_graph_impl") not in (None, "none"):
        fields |= dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), False)  # `__post_init__` set cuda_graph_impl by them
    scope = fields.get("cuda_graph_scope")  # the former name of cuda_graph_modules, whose default is "full"
    if scope is not None and fields.get("cuda_graph_modules") in (None, "full", []):
        fields["cuda_graph_modules"] = scope
    frequency = fields.get("linear_attention_freq")
    if isinstance(frequency, list) and 0 in frequency:
        every = frequency.index(0) + 1
        if frequency == [int(layer % every != 0) for layer in range(1, len(frequency) + 1)]:
            fields["linear_attention_freq"] = every
    return fields


def _layout(given: Any) -> Any:
    """The layers of stages. Raises InputError for an object without them, as a file has it that was written after the setup."""
    if not isinstance(given, Mapping):
        return given
    if given.get("input_data") is None:
        raise InputError(
            "model.pipeline_model_parallel_layout",
            "is an object without its layers, which Megatron-Bridge does not write",
            "write it on the command line, such as model.pipeline_model_parallel_layout='Ett|ttL'",
        )
    return given["input_data"]


def quantized_with_muon(model: Tree, ddp: Tree, optimizer: str) -> tuple[bool, list[str]]:
    """Whether parameters are in FP8 beside Muon, which Megatron-LM's own script refuses, and what is not modelled of them.

    The options of both are turned off. Transformer Engine cannot flatten parameters in mxfp8 (`MXFP8Tensor.view`).
    """
    given = [name for name in ("fp8_param", "fp8_param_gather") if is_true(model.get(name)) or is_true(ddp.get(name))]
    if "muon" not in optimizer or not given or not model.get("fp8"):
        return False, []
    stored = any(is_true(model.get(name)) for name in given)
    for section in (model, ddp):
        section |= dict.fromkeys((*given, "reuse_grad_buf_for_mxfp8_param_ag"), False)
    if not stored:
        return False, [f"ddp.fp8_param_gather with {optimizer}, without model.fp8_param"]
    modelled = model.get("fp8_recipe") in ONE_SCALE
    return modelled, ([] if modelled else [f"model.fp8_param with {optimizer}"])


def layout_of_muon(optimizer: str, release: LaterRelease | None) -> list[str]:
    """Megatron-Bridge wraps a model without a layout of its buffers for the layer-wise optimizer (models/model_provider.py)."""
    has_layout = release is not None and core_behavior(release.release).has_layer_wise_layout
    return ["--no-use-layer-wise-param-layout"] if "muon" in optimizer and has_layout else []


def size(model: Tree, name: str) -> int:
    """A number of 1 or more that has no default. Raises InputError if it is missing, or another value."""
    if model.get(name) is None:
        raise InputError(f"model.{name}", "is missing: the layers of the model need it", "give the complete ConfigContainer")
    return number(model, name, 1)


def number(model: Tree, name: str, default: int) -> int:
    """A number of 1 or more, or of 0 or more if the default is 0. Raises InputError for another value."""
    given, least = model.get(name), min(default, 1)
    value = default if given is None else natural(str(given))
    if value is None or value < least:
        raise InputError(f"model.{name}", f"{given!r} is not a number of {least} or more", "write that of the model")
    return value
