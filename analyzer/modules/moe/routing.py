"""Sizes of routed tokens, and tensors common to all dispatchers.

Legend: T tokens of this rank (s·b, or s·b/t under sequence parallelism), k experts of a token, E experts, P ranks of
the tp_ep group (expert-tensor size times expert size), hx width of a row (h, or the latent size).

Source: core/transformer/moe/moe_layer.py and moe_utils.py (0.16.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.modules.quantized import align_size
from analyzer.modules.shapes import ExpertShapes
from analyzer.modules.tree import Collective, Module, Tensor
from analyzer.specs import FlexSpec, MoeSpec
from analyzer.units import round_up

SENT_ROWS: Final = "permuted tokens"
"""Name of the rows that a rank sends with an all-to-all."""
RECEIVED_ROWS: Final = "received tokens"
"""Name of the rows that a rank receives with an all-to-all."""
EXPERT_INPUT: Final = "received rows"
"""Name of the copy that the experts read of rows that they pad, or quantize."""
LOCAL_ROWS: Final = "rows of the local experts"
"""Name of the rows that the experts read."""
ROW_GRADIENTS: Final = "gradients of all experts"
"""Name of the gradient that the combine returns, of which sequential experts read views."""
ARRIVED_ROWS: Final = "arrived tokens"
"""Name of the tokens that a rank receives from DeepEP."""
LATENT_ROWS: Final = "tokens of the latent size"
"""Name of the projected tokens that the all-gather and flex dispatchers send."""
PERMUTED_PROBABILITIES: Final = "permuted probabilities"
"""Name of the probability of each row that the experts read."""
ROW_ID_MAP: Final = "row id map"
"""Name of the map with which a fused kernel permutes rows."""
_FUSED_MULTIPLE: Final = 256
"""The allocated rows are a multiple of this (`get_align_size_for_quantization` with fused operations, core 0.18)."""
_IN_16_BIT: Final = 16
"""That of `get_align_size_for_quantization` without FP8 in core 0.17."""
SHARED_OUTPUT: Final = "output of the shared experts"
SHARED_GRADIENT: Final = "gradient for the shared experts"
"""Name of the gradient of the layer's output, which the shared experts need later than the routed ones."""


@dataclass(frozen=True)
class Routing:
    """Sizes of routed tokens. Routing is balanced except for `--info-moe-imbalance`, which scales the rows of the experts."""

    shapes: ExpertShapes

    @property
    def moe(self) -> MoeSpec:
        """The MoE specification; valid only if the model has MoE layers."""
        assert self.shapes.model.moe is not None
        return self.shapes.model.moe

    @property
    def flex(self) -> FlexSpec:
        """Settings of the flex dispatcher; valid only if it is used."""
        assert self.moe.flex is not None
        return self.moe.flex

    @cached_property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self.shapes.split.expert

    @cached_property
    def etp(self) -> int:
        """Expert-tensor-parallel size."""
        return self.shapes.split.expert_tensor

    @cached_property
    def local_experts(self) -> int:
        """E/ep."""
        return self.moe.num_experts // self.ep

    @cached_property
    def tokens(self) -> int:
        """T."""
        return self.shapes.s_split * self.shapes.b

    @cached_property
    def width(self) -> int:
        """hx."""
        return self.moe.latent_size or self.shapes.model.hidden_size

    @cached_property
    def sent(self) -> int:
        """Rows that this rank sends: T·k, or E times the capacity if inputs are padded to it.

        The all-gather dispatcher has no rows without a token, so that an expert gets at most T.
        """
        if self.moe.pad_to_capacity:
            capacity = self.moe.capacity(self.tokens)
            return self.moe.num_experts * (min(capacity, self.tokens) if self.moe.dispatcher == "allgather" else capacity)
        padding = self._padding(self.moe.num_experts) if self.moe.pad_for_quantization and self.moe.flex is None else 0
        return self.tokens * self.moe.topk + padding

    @cached_property
    def received(self) -> int:
        """Rows that this rank receives from expert-parallel ranks: those that it sends, times the imbalance."""
        return int(self.sent * self.moe.imbalance)

    @cached_property
    def rows(self) -> int:
        """Rows that this rank's experts process, including the padding that the flex dispatcher adds on arrival.

        With a capacity of the rank, as many as HybridEP allocates (`_HybridEPManager.setup_metadata`, core 0.18).
        """
        if self.moe.rank_capacity is not None:
            return round_up(int(self.tokens * self.moe.topk * self.moe.rank_capacity), _FUSED_MULTIPLE)
        return self.choices + (self._padding(self.local_experts) if self._padded_on_arrival else 0)

    @cached_property
    def choices(self) -> int:
        """Rows for this rank's experts, without the padding that the flex dispatcher adds on arrival.

        `_HybridEPManager.setup_metadata` counts each part of an expert as an expert where it computes the capacity.
        """
        if self.moe.pad_to_capacity and self.moe.flex is not None:
            return self.moe.num_experts * self.etp * self.moe.capacity(self.tokens, split=self.etp)
        return int(self.sent * self.etp * self.moe.imbalance)

    @property
    def _padded_on_arrival(self) -> bool:
        """Whether the flex dispatcher pads: HybridEP does, and DeepEP if the routing map is padded, or in a fused permutation."""
        moe = self.moe
        if moe.flex is None or moe.pad_to_capacity:
            return False
        return moe.flex.backend == "hybridep" or moe.pad_for_quantization or self._padded_in_permutation

    @property
    def _padded_in_permutation(self) -> bool:
        """Whether DeepEP's dispatcher permutes and pads in one kernel."""
        moe, inputs = self.moe, self.shapes.inputs
        of_releases = inputs.core.pads_in_permutation and inputs.engine.pads_in_permutation
        return of_releases and moe.permute_fusion and moe.flex is not None and moe.flex.backend == "deepep"

    def _padding(self, groups: int) -> int:
        """Padding of `groups` groups of rows to the multiple that FP8 GEMMs need: half a multiple per group on average.

        Sources: core/fp8_utils.py get_fp8_align_size (0.16.1), pytorch/module/fp8_padding.py (Transformer Engine).
        """
        return groups * (self.padded_to // 2)

    @cached_property
    def padded_to(self) -> int:
        """The rows of each expert are padded to a multiple of this; 1 without FP8, except in a permutation.

        In layers in 16 bit `Fp8Padding` of Transformer Engine takes the default recipe of the GPU (`get_default_fp8_recipe`).
        Fused operations: `get_align_size_for_quantization` (core/transformer/moe/moe_utils.py, 0.18).
        """
        inputs = self.shapes.inputs
        if inputs.padding_recipe is None:
            if not self._padded_in_permutation:
                return 1
            return _FUSED_MULTIPLE if self.moe.fused_operations else _IN_16_BIT if inputs.core.pads_16_bit_rows else 1
        if self.moe.fused_operations:
            return _FUSED_MULTIPLE
        by_megatron = self.moe.pad_for_quantization or self._padded_on_arrival or not self.moe.grouped_gemm
        if not by_megatron and self.shapes.fp8 is None:
            mxfp8 = inputs.compute_capability is not None and (10, 0) <= inputs.compute_capability < (12, 0)
            return align_size("mxfp8" if mxfp8 else "delayed")
        return align_size(inputs.padding_recipe, fp4=128 if by_megatron else inputs.engine.fp4_padding)

    @cached_property
    def pads(self) -> bool:
        """Whether the experts copy their rows to pad them for FP8. They do not if each expert already has a multiple."""
        if self.shapes.inputs.padding_recipe is None or self.moe.pad_for_quantization or self._padded_on_arrival:
            return False
        return not self.moe.pad_to_capacity or self.rows // self.local_experts % self.padded_to > 0

    @property
    def makes_output(self) -> str:
        """Where the output of the experts is allocated: in the last layer if it is not concatenated, changed or copied later."""
        changed = self.moe.grouped_gemm and (self.pads or self.shapes.model.bias_linear)
        return "mlp.experts" if changed or self.runs_sequentially else "mlp.experts.linear_fc2"

    @property
    def runs_sequentially(self) -> bool:
        """Whether several experts of a rank run one after the other (`SequentialMLP`), each on its part of the rows."""
        return not self.moe.grouped_gemm and self.local_experts > 1

    @cached_property
    def multiplied_rows(self) -> int:
        """Rows of the experts' GEMMs, including padding. Each expert has equally many if inputs are padded to the capacity."""
        if self.pads and self.moe.pad_to_capacity:
            return self.local_experts * round_up(self.rows // self.local_experts, self.padded_to)
        return self.rows + (self._padding(self.local_experts) if self.pads else 0)

    @cached_property
    def probability_dtype(self) -> str:
        """Element type of routing probabilities."""
        return {"fp32": "fp32", "fp64": "fp64"}.get(self.moe.router_dtype or "", self.shapes.dtype)

    @property
    def of_tokens(self) -> Routing:
        """The same with only the rows of tokens, which the GEMMs read: without a capacity of the rank, and without pages."""
        if self.moe.rank_capacity is None:
            return self
        inputs = self.shapes.inputs
        model = replace(inputs.model, moe=replace(self.moe, rank_capacity=None, page_factor=None))
        return Routing(type(self.shapes)(replace(inputs, model=model)))

    @property
    def arriving_dtype(self) -> str:
        """Element type of the probabilities that the experts receive. The flex dispatcher converts them to fp32."""
        return "fp32" if self.moe.flex is not None else self.probability_dtype

    def row_tensor(self, name: str, rows: int, width: int | None = None, *, dtype: str | None = None, made_in: str = "") -> Tensor:
        """[rows, width]."""
        return Tensor(
            name=name, shape=(rows, width or self.width), dtype=dtype or self.shapes.dtype, formula="T·k rows", made_in=made_in
        )

    def message(self, kind: str, group: str, shape: tuple[int, ...], dtype: str, phase: str) -> Collective:
        """A message of the dispatcher."""
        return Collective(kind=kind, group=group, shape=shape, dtype=dtype, phase=phase)  # type: ignore[arg-type]


def summed_rows(routing: Routing, rows: int, *, made_in: str = "") -> tuple[Tensor, ...]:
    """Expert rows that are summed for each token. Deterministic summation by `index_add_` saves them for backward.

    `unpermute` in moe_utils.py, from 0.15 on.
    """
    if not routing.moe.adds_by_index or routing.moe.permute_fusion:
        return ()
    return (routing.row_tensor("rows that are summed", rows, made_in=made_in),)


def _saves_received_rows(routing: Routing) -> bool:
    """Whether fc1 of the experts, or its adapter, saves the rows as the experts receive them: in 16 bit, and without padding."""
    model = routing.shapes.model
    if routing.pads:
        return False
    if model.adapters is not None:
        copied = model.adapters.dropout or (model.adapters.grouped and routing.local_experts > 1)
        return "linear_fc1" in model.adapters.targets and not copied
    return routing.shapes.fp8 is None and "language_model" not in model.frozen


def dispatched_rows(routing: Routing) -> tuple[Tensor, ...]:
    """The rows that the experts receive, if no layer saves them: fc1 saves quantized or padded rows instead, or is frozen.

    A local variable of `MoELayer.routed_experts_compute` references them until the rows of the experts are unpermuted.
    """
    return () if _saves_received_rows(routing) else (routing.row_tensor(EXPERT_INPUT, routing.rows),)


def shared_output(routing: Routing) -> tuple[Tensor, ...]:
    """The output of the shared experts, until it is added to the output of the routed experts."""
    if not routing.moe.shared_ffn_hidden_size or routing.moe.shared_overlap:
        return ()
    return (routing.shapes.hidden(SHARED_OUTPUT),)


def selection(routing: Routing, experts: int, tokens: int, *, dtype: str = "") -> tuple[Tensor, ...]:
    """Tensors that an unfused permutation of `tokens` saves to select the probabilities of `experts`, in this dtype.

    `permute` in moe_utils.py: positions in the sorted routing map from 0.17 on, and `masked_select` before.
    """
    shape = (experts, tokens)
    if routing.moe.sorts_positions:
        return (Tensor(name="sorted positions", shape=(experts * tokens,), dtype="int64", formula="8·E·T"),)
    return (
        Tensor(name="transposed probabilities", shape=shape, dtype=dtype or routing.probability_dtype, formula="E·T"),
        Tensor(name="transposed routing map", shape=shape, dtype="bool", formula="E·T"),
    )


def permuted_probabilities(routing: Routing, dtype: str, *, references: bool = False) -> tuple[Tensor, ...]:
    """The probability of each row, which the activation of the experts saves, with padding if the experts pad their rows.

    `references`: the dispatcher also references those without padding until the backward.
    """
    arrived = Tensor(name=PERMUTED_PROBABILITIES, shape=(routing.rows,), dtype=dtype, formula="T·k", lingers=references)
    if not routing.pads:
        return (arrived,)
    pieces = routing.local_experts if routing.runs_sequentially else 1
    shape = (routing.multiplied_rows,)
    padded = Tensor(name="padded probabilities", shape=shape, dtype=dtype, pieces=pieces, made_in="mlp.experts")
    return (arrived, padded) if references or routing.shapes.inputs.separate_graphs else (padded,)


def is_flex(dispatch: Module) -> bool:
    """Whether a dispatch module is that of the flex dispatcher, DeepEP or HybridEP."""
    return dispatch.source.startswith("MoEFlexTokenDispatcher")
