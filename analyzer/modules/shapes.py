"""Shapes that all formulas share: the part of an activation that one rank stores.

Symbols: s sequence on this context-parallel rank, b microbatch, h hidden, t tensor-parallel size, a heads,
g key/value groups, d elements of a head, f feed-forward width, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

from analyzer.modules.inputs import (
    EndInputs,
    EndSplit,
    ExpertInputs,
    ExpertSplit,
    LayerInputs,
    LayerSplit,
    ModuleInputs,
    Split,
    module_inputs,
)
from analyzer.modules.tree import Collective, Phase, Tensor
from analyzer.specs import Fp8Spec, ModelSpec, TrainingJob
from analyzer.units import DTYPE_BYTES

RECOMPUTED_OUTPUT: Final = "recomputed output"


@dataclass(frozen=True)
class Shapes:
    """Sizes of the modules of one rank. `t` is 1 and `sp` False for the model without parallelism.

    These are those of dense layers. Subclasses have what MoE layers, and modules outside layers, depend on besides.
    """

    inputs: LayerInputs

    @property
    def model(self) -> ModelSpec:
        """The model specification."""
        return self.inputs.model

    @property
    def split(self) -> LayerSplit:
        """The parallelism that shards modules."""
        return self.inputs.split

    @cached_property
    def t(self) -> int:
        """Tensor-parallel size."""
        return self.split.tensor

    @cached_property
    def sp(self) -> bool:
        """Whether sequence parallelism shards the activations between tensor-parallel regions."""
        return self.split.sequence_parallel

    @cached_property
    def s(self) -> int:
        """Tokens of a sample on this rank, before sequence parallelism shards them."""
        return self.inputs.sequence_length // self.split.context

    @cached_property
    def b(self) -> int:
        """Microbatch size in samples."""
        return self.inputs.micro_batch_size

    @cached_property
    def dtype(self) -> str:
        """Element type of parameters and activations."""
        return self.inputs.dtype

    @cached_property
    def residual_dtype(self) -> str:
        """Element type of the residual stream.

        With `--fp32-residual-connection` it is fp32 in legacy layers only. In others the first residual add converts it to 16 bit
        (`_bias_dropout_add_func`).
        """
        model = self.model
        return "fp32" if model.fp32_residual_connection and model.implementation == "legacy" else self.dtype

    @cached_property
    def fp8(self) -> Fp8Spec | None:
        """How the GEMMs of linear layers are quantized; None for 16 bit."""
        return self.inputs.fp8

    @cached_property
    def in_16_bit(self) -> Self:
        """The same shapes without FP8, for layers that stay in 16 bit and modules other than Transformer Engine's linear layers."""
        return self if self.fp8 is None else type(self)(replace(self.inputs, fp8=None))

    @property
    def quantizes_attention(self) -> bool:
        """Whether core attention reads queries, keys and values in FP8."""
        return self.fp8 is not None and self.fp8.attention

    @property
    def quantizes_output_layer(self) -> bool:
        """Whether the GEMMs of the output layer are quantized."""
        return self.fp8 is not None and self.fp8.output_layer

    @cached_property
    def windowed(self) -> Self:
        """The same shapes with the attention kernel of sliding-window layers, and all layers with a window."""
        backend = self.model.window_backend or self.model.attention_backend
        model = replace(self.model, attention_backend=backend, windowed=(True,) * len(self.model.windowed))
        return type(self)(replace(self.inputs, model=model))

    @property
    def of_global_heads(self) -> Self:
        """The same shapes with the heads of layers without a window."""
        heads = self.model.global_heads
        assert heads is not None, "layers without a window have other heads"
        model = replace(self.model, kv_channels=heads.head_dim, num_query_groups=heads.groups)
        return type(self)(replace(self.inputs, model=model))

    def of_width(self, ffn_hidden_size: int) -> Self:
        """The same shapes with another FFN width."""
        return type(self)(replace(self.inputs, model=replace(self.model, ffn_hidden_size=ffn_hidden_size)))

    @cached_property
    def s_split(self) -> int:
        """Tokens of the residual stream on this rank: s/t under sequence parallelism."""
        return self.s // self.t if self.sp else self.s

    @property
    def recompute_core_attention(self) -> bool:
        """Selective recompute of the attention kernel."""
        return self.recomputes("core_attn")

    def recomputes(self, module: str) -> bool:
        """Whether `--recompute-modules` lists this module and recompute is selective."""
        return self.inputs.recompute.granularity == "selective" and module in self.inputs.recompute.modules

    @property
    def userbuffers(self) -> bool:
        """Whether GEMMs of linear layers overlap with their tensor-parallel communication, in userbuffers."""
        return self.inputs.userbuffers and self.sp

    @property
    def exchanged_dtype(self) -> str:
        """Element type of the 16-bit tensors that linear layers exchange. Megatron names none to `initialize_ub`: bf16."""
        return "bf16" if self.userbuffers else self.dtype

    @property
    def dropped_norm_output(self) -> tuple[Tensor, ...]:
        """With `--recompute-modules layernorm`, the output of a standalone norm. It is freed after the block that reads it."""
        return (self.hidden("recomputed norm output"),) if self.recomputes("layernorm") else ()

    @property
    def referenced_norm_output(self) -> tuple[Tensor, ...]:
        """With FP8, the output of the norm before latent attention, of which only FP8 copies are saved.

        A local variable of `TransformerLayer._forward_attention` references it until the residual is added.
        """
        unsaved = self.model.mla is not None and self.fp8 is not None and not self.recomputes("layernorm")
        return (self.hidden("normalized input"),) if unsaved and not self.saves_norm_output else ()

    @property
    def saves_norm_output(self) -> bool:
        """Whether, with FP8, this output is saved in 16 bit, because queries are projected from it.

        A checkpoint around the up projections saves it, or the projection of the queries, which has a norm of its input.
        """
        return (self.quantizes_norm_output or (self.fp8 is not None and self.norms_queries)) and not self.recomputes("layernorm")

    @property
    def norms_queries(self) -> bool:
        """Whether the projection of queries that are not compressed has a norm of its input."""
        mla = self.model.mla
        without = mla is not None and mla.q_lora_rank is None
        return without and self.model.qk_layernorm and self.inputs.core.norms_input_of_queries

    @property
    def quantizes_norm_output(self) -> bool:
        """Whether the recomputed up projections include that of the queries, which saves an FP8 copy of this output."""
        mla = self.model.mla
        return mla is not None and mla.q_lora_rank is None and self.fp8 is not None and self.recomputes("mla_up_proj")

    @property
    def recomputed_norm_output(self) -> tuple[Tensor, ...]:
        """`dropped_norm_output` in backward: recomputed, and with `copies_recomputed` its copy (`CheckpointWithoutOutput`)."""
        recomputed = self.dropped_norm_output
        if not self.inputs.core.copies_recomputed:
            return recomputed
        return tuple(each for output in recomputed for each in (output, replace(output, name=f"copy of the {output.name}")))

    @property
    def owner_of_moe_input(self) -> str:
        """Name of the tensor that already stores the input of a MoE layer: the checkpoint input or a recomputed norm output."""
        if self.recomputes("moe"):
            return "MoE layer input"
        return "recomputed norm output" if self.recomputes("layernorm") else ""

    @property
    def branch_gradient(self) -> Tensor:
        """[s, b, h]: gradient of a branch's output. Without dropout, scaling and a norm it is that of the residual stream."""
        own = self.model.hidden_dropout > 0 or self.model.layer_scaling or self.model.branch_norms
        return self.hidden("output gradient", shares="" if own else "residual gradient")

    @property
    def recomputed_output(self) -> tuple[Tensor, ...]:
        """The recomputed output of a checkpoint: a local variable references it during the backward (`CheckpointFunction`)."""
        return (self.hidden(RECOMPUTED_OUTPUT, dtype=self.residual_dtype),)

    def hidden(self, name: str, *, gathered: bool = False, dtype: str | None = None, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, h], or its shard [s/t, b, h] under sequence parallelism unless `gathered`."""
        kind = dtype or self.dtype
        split = self.sp and not gathered
        return Tensor(
            name=name,
            shape=(self.s if not split else self.s_split, self.b, self.model.hidden_size),
            dtype=kind,
            formula=f"{DTYPE_BYTES[kind]}·s·b·h" + ("/t" if split else ""),
            shares=shares,
            made_in=made_in,
        )

    def stream(self, name: str, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """The residual stream, of which hyper-connections have several parts: [s, b, h], or [s, b, n·h]."""
        if self.model.hyper_connections is None:
            return self.hidden(name, dtype=dtype or self.residual_dtype, made_in=made_in)
        return self.wide(name, self.model.stream_width, "n·h", dtype=dtype, made_in=made_in)

    def wide(self, name: str, width: int, symbol: str, *, dtype: str | None = None, shares: str = "", made_in: str = "") -> Tensor:
        """[s, b, width]: an activation inside a tensor-parallel region, `width` already divided by t."""
        kind = dtype or self.dtype
        return Tensor(
            name=name,
            shape=(self.s, self.b, width),
            dtype=kind,
            formula=f"{DTYPE_BYTES[kind]}·s·b·{symbol}",
            shares=shares,
            made_in=made_in,
        )

    def statistics(self, name: str, rows: int, symbol: str = "4·s·b") -> Tensor:
        """[rows] in fp32: one value per row that a norm or a softmax reduces."""
        return Tensor(name=name, shape=(rows,), dtype="fp32", formula=symbol)

    def tp(self, kind: str, phase: Phase, *, width: int | None = None, dtype: str | None = None) -> tuple[Collective, ...]:
        """A tensor-parallel collective over [s, b, h] (or `width`); none without tensor parallelism."""
        if self.t == 1:
            return ()
        return (
            Collective(
                kind=kind,  # type: ignore[arg-type]
                group="tp",
                shape=(self.s, self.b, width or self.model.hidden_size),
                dtype=dtype or self.dtype,
                phase=phase,
            ),
        )


class ExpertShapes(Shapes):
    """Sizes of the modules of MoE layers."""

    inputs: ExpertInputs

    @property
    def split(self) -> ExpertSplit:
        """The parallelism that shards MoE layers."""
        return self.inputs.split


class EndShapes(Shapes):
    """Sizes of the modules outside layers."""

    inputs: EndInputs

    @property
    def split(self) -> EndSplit:
        """The parallelism that shards modules outside layers."""
        return self.inputs.split


class AllShapes(ExpertShapes, EndShapes):
    """Sizes of all modules."""

    inputs: ModuleInputs

    @property
    def split(self) -> Split:
        """The parallelism that shards modules."""
        return self.inputs.split


def shapes_of(job: TrainingJob) -> AllShapes:
    """The shapes of a job, created once for each job object."""
    cache = job.__dict__
    if "_shapes" not in cache:
        cache["_shapes"] = AllShapes(module_inputs(job))
    return cache["_shapes"]  # type: ignore[no-any-return]
