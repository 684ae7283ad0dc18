"""Layers of vision encoders that scale their branches, as examples/multimodal builds them: radio-g and InternViT.

megatron-core does not have them. If a checkout of Megatron-LM is on the Python path, its classes run, otherwise equal operations.
"""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Final

import torch

from analyzer.specs import ModelSpec, VisionSpec

_HEADS: Final = 25
"""Heads of InternViT-6B. Those beyond them fill up the last tensor-parallel ranks."""
_OF_CHECKOUT: Final = {
    "radio-g": ("examples.multimodal.radio.radio_g", "get_radio_g_layer_spec"),
    "internvit": ("examples.multimodal.nvlm.internvit", "get_internvit_layer_spec"),
    "internvit300M": ("examples.multimodal.nvlm.internvit", "get_internvit300M_layer_spec"),
}


def scaled_layer_spec(vision: VisionSpec, plain: Any) -> Any:
    """Return the spec of the layers of the encoder. `plain`: that of a layer without scaling, with its norms in linear layers."""
    te = vision.encoder.implementation == "transformer_engine"
    found = _spec_of_checkout(vision.kind, te=te)
    if found is not None:
        found.module = _reading_vectors(found.module)
        return found
    spec = deepcopy(plain)
    spec.module = _reading_vectors(_layer_class())
    modules = spec.submodules
    modules.self_attn_bda = modules.mlp_bda = _scaled_add
    if vision.encoder.norm_modules != "engine":
        _separate_norms(modules, vision.encoder)
    return spec


def _spec_of_checkout(kind: str, *, te: bool) -> Any:
    module, function = _OF_CHECKOUT[kind]
    try:
        found = import_module(module)
    except ImportError:
        return None
    if kind != "radio-g":
        return getattr(found, function)(te)
    return found.get_radio_g_layer_spec_te() if te else found.get_radio_g_layer_spec("LayerNorm")


def _separate_norms(modules: Any, encoder: ModelSpec) -> None:
    """Replace the linear layers with norms by those without, and add norms."""
    from megatron.core.models.vision.vit_layer_specs import LNImpl
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    column = ColumnParallelLinear
    if encoder.implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        column = TEColumnParallelLinear
    norm = LNImpl if encoder.norm_modules == "torch" else _norm_class()
    modules.input_layernorm = modules.pre_mlp_layernorm = norm
    mlp = modules.mlp.submodules if hasattr(modules.mlp, "submodules") else modules.mlp.keywords["submodules"]
    mlp.linear_fc1 = column
    modules.self_attention.submodules.linear_qkv = column
    if encoder.norm_modules == "unfused":
        modules.self_attention.module = _attention_class()
        modules.self_attention.submodules.q_layernorm = modules.self_attention.submodules.k_layernorm = norm


def _scaled_add(scale: Any, training: bool, fused: bool) -> Any:
    """Return the function that adds a branch to the residual stream."""
    assert not fused, "the scaled add is not fused"

    def add(branch: tuple[Any, Any], residual: Any, probability: float) -> Any:
        x, bias = branch
        x = x if bias is None else x + bias
        return residual + torch.nn.functional.dropout(x, p=probability, training=training) * scale

    return add


@lru_cache(maxsize=1)
def _reading_vectors(layer: Any) -> Any:
    """Return the class of the layer, whose functions read its vectors when they are called.

    `Module.cuda` replaces parameters on the meta device, which the functions would not notice.
    """

    class Reading(layer):  # type: ignore[misc]
        """The layer."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, vector in (("self_attn_bda", "ls1"), ("mlp_bda", "ls2")):
                setattr(self, name, partial(self._scaled, getattr(self, name).func, vector))

        def _scaled(self, function: Any, vector: str, *arguments: Any) -> Any:
            return function(getattr(self, vector), *arguments)

    return Reading


@lru_cache(maxsize=1)
def _layer_class() -> Any:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    class ScaledLayer(TransformerLayer):  # type: ignore[misc]
        """A layer with a vector for each branch."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.ls1 = torch.nn.Parameter(torch.ones(self.config.hidden_size))
            self.ls2 = torch.nn.Parameter(torch.ones(self.config.hidden_size))
            layer: Any = self
            layer.self_attn_bda = partial(layer.self_attn_bda, self.ls1)
            layer.mlp_bda = partial(layer.mlp_bda, self.ls2)

    return ScaledLayer


@lru_cache(maxsize=1)
def _norm_class() -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    class UnfusedNorm(MegatronModule):  # type: ignore[misc]
        """RMSNorm of separate operations. `gathers`: of all heads, whose squares are summed over tensor-parallel ranks."""

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, *, gathers: bool = False) -> None:
            super().__init__(config=config)
            self.eps, self.gathers = eps, gathers
            self.weight = torch.nn.Parameter(torch.ones(hidden_size))

        def forward(self, x: Any) -> Any:
            statistic, width = None, x.shape[-1]
            if self.gathers:
                x = x.reshape(x.size(0), x.size(1), -1)
                statistic = self._gathered(x.float().pow(2), width) / self.config.hidden_size
            output = self._normalized(x.float(), statistic).type_as(x)
            output = output * self.weight
            return output.reshape(output.size(0), output.size(1), -1, width) if self.gathers else output

        def _normalized(self, x: Any, statistic: Any) -> Any:
            if statistic is None:
                statistic = x.pow(2).mean(-1, keepdim=True)
            return x * torch.rsqrt(statistic + self.eps)

        def _gathered(self, squares: Any, width: int) -> Any:
            size, rank = (getattr(parallel_state, f"get_tensor_model_parallel_{each}")() for each in ("world_size", "rank"))
            of_rank = self.config.num_attention_heads // size
            full_ranks, left = (_HEADS - 1) // of_rank, _HEADS % of_rank or of_rank
            if rank == full_ranks:
                squares = squares[..., : width * left]
            own = squares.sum(-1, keepdim=True)
            if rank > full_ranks:
                own = own * 0.0
            sums = [torch.empty_like(own) for _ in range(size)]
            sums[rank] = own
            torch.distributed.all_gather(sums, own, group=parallel_state.get_tensor_model_parallel_group())
            return torch.cat(sums, dim=squares.dim() - 1).contiguous().sum(-1, keepdim=True)

    return UnfusedNorm


@lru_cache(maxsize=1)
def _attention_class() -> Any:
    from megatron.core.transformer.attention import SelfAttention

    class NormedAttention(SelfAttention):  # type: ignore[misc]
        """Attention without biases of queries, keys and values, and with norms of all heads of a rank."""

        def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, submodules, *args, **kwargs)
            self.linear_qkv = submodules.linear_qkv(
                config.hidden_size,
                self.query_projection_size + 2 * self.kv_projection_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
            )
            width = self.hidden_size_per_attention_head * self.num_attention_heads_per_partition
            for name in ("q_layernorm", "k_layernorm"):
                setattr(self, name, _norm_class()(config, width, config.layernorm_epsilon, gathers=True))

    return NormedAttention
