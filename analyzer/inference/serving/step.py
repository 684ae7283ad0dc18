"""Seconds of one step of a serving engine: prompts, generated tokens, or both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

from analyzer.inference.results import StepSeconds
from analyzer.inference.serving import floors
from analyzer.inference.serving.engines import Engine
from analyzer.inference.serving.layout import ServingLayout
from analyzer.inference.serving.tables import Table, ratio
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies
from analyzer.time.kernels.seconds import attention_seconds
from analyzer.time.links import Span
from analyzer.time.message_seconds import message_seconds
from analyzer.time.work.kernels import Attention

STAND_INS: Final = {"8b": "8", "8": "8b", "w4m": "w4", "w4": "w4m", "w4a8": "4", "4": "8"}
"""The kind whose ratios are used for one without a table."""
ENGINES: Final = ("trtllm", "sglang", "vllm")
ATTENTION_OPERATIONS: Final = 6
"""Operations of attention: norm, projection, rotation, cache, kernel, projection."""
LATENT_OPERATIONS: Final = 12
"""The same of multi-latent attention: norm, products down and up with their norms, rotation and joining of the parts, cache,
kernel, projection."""
MLP_OPERATIONS: Final = 4
"""Of a dense MLP: norm or sum, two products and the activation between them."""
EXPERT_OPERATIONS: Final = 12
"""Of experts: norm, router, choice of experts, sorting and permuting of tokens, cast, two products, activation, weighted sum."""
CAPTURED_OPERATIONS: Final = 2
"""Of a layer whose operations are CUDA graphs, except for attention: the replay and attention."""
EXCHANGES: Final = 2
"""Exchanges of the outputs of attention and MLP with the other ranks."""
ELEMENT_BYTES: Final = {"16": 2.0, "8": 1.0}


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step computes, on the attention-parallel group that has the most."""

    prompt_tokens: int = 0
    """Tokens of prompts."""
    prompt_pairs: float = 0.0
    """Pairs of a query and a key of these."""
    prompts: int = 0
    requests: int = 0
    """Requests that generate."""
    length: int = 1
    """Mean tokens in the cache of one of them."""
    all_tokens: int = 0
    """Tokens of all groups together."""
    drafts: int = 0
    """Tokens that are proposed for each request."""
    captured: bool = False
    """A step with prompts is replayed as CUDA graphs, except for its attention. Steps without prompts are graphs as a whole."""

    @property
    def tokens(self) -> int:
        """All tokens of the group."""
        return self.prompt_tokens + self.requests * (1 + self.drafts)


class StepModel:
    """The seconds of the steps of a layout."""

    def __init__(self, layout: ServingLayout, engine: Engine, speed: SpeedSpec, rates: Efficiencies) -> None:
        self.layout, self.engine, self.speed = layout, engine, speed
        self.rates = replace(rates, kernel_gap=floors.START)

    def seconds(self, work: StepWork) -> StepSeconds:
        """Seconds of a step by their parts."""
        attention = gemm = memory = communication = 0.0
        for has_experts, window, number in self.layout.layers:
            layer = self._layer(work, has_experts, window)
            gemm += number * layer.gemm
            attention += number * layer.attention
            memory += number * layer.memory_bound
            communication += number * layer.communication
        rows = work.requests * (1 + work.drafts) + work.prompts
        model = self.layout.model
        gemm += self.gemm("16", rows, ceil(model.padded_vocab_size / self.layout.tensor), model.hidden_size)
        communication += self.all_reduce(2 * work.tokens * model.hidden_size)
        device = attention + gemm + memory + communication
        issued = self.issued(work) * self.engine.operation_seconds
        waits = self.engine.step_seconds + self.engine.request_seconds * (work.requests + work.prompts)
        host = waits + max(0.0, issued - device)
        return StepSeconds(gemm=gemm, attention=attention, memory_bound=memory, communication=communication, host=host)

    def issued(self, work: StepWork) -> int:
        """Operations that the host issues one by one: those of steps with prompts."""
        if not work.prompts and not work.prompt_tokens:
            return 0
        return CAPTURED_OPERATIONS * self.layout.model.num_layers if work.captured else self.operations

    @cached_property
    def operations(self) -> int:
        """Operations of a step with prompts, which the host issues one by one: of the layers, by what they consist of."""
        layout, model = self.layout, self.layout.model
        attention = LATENT_OPERATIONS if model.mla is not None else ATTENTION_OPERATIONS + model.qk_layernorm
        total = 0
        for has_experts, _, number in layout.layers:
            experts = EXPERT_OPERATIONS if has_experts else MLP_OPERATIONS
            if has_experts and model.moe is not None and model.moe.shared_ffn_hidden_size:
                experts += MLP_OPERATIONS
            total += number * (attention + experts + EXCHANGES)
        return total

    def _layer(self, work: StepWork, has_experts: bool, window: int | None) -> StepSeconds:
        model, tensor = self.layout.model, self.layout.tensor
        projections, memory = self._projections(work)
        attention = self._attention(work, window)
        communication = self.all_reduce(2 * work.tokens * model.hidden_size)
        memory += 2 * self.moved(4 * work.tokens * model.hidden_size)  # norms with the residual sum
        if has_experts:
            experts, further = self._experts(work)
            return StepSeconds(
                gemm=projections + experts, attention=attention, memory_bound=memory, communication=communication + further
            )
        width = ceil(model.ffn_hidden_size / tensor)
        mlp = self._mlp(work.tokens, width)
        memory += self.moved(6 * work.tokens * width)
        communication += self.all_reduce(2 * work.tokens * model.hidden_size)
        return StepSeconds(gemm=projections + mlp, attention=attention, memory_bound=memory, communication=communication)

    def _mlp(self, tokens: int, width: int) -> float:
        hidden, kind = self.layout.model.hidden_size, self.layout.linear_kind
        first = (2 if self.layout.model.gated else 1) * width
        return self.gemm(kind, tokens, first, hidden) + self.gemm(kind, tokens, hidden, width)

    def _projections(self, work: StepWork) -> tuple[float, float]:
        """Seconds of the projections of attention, and of norms and rotation of queries and keys and writing the cache."""
        model, tensor, kind = self.layout.model, self.layout.tensor, self.layout.attention_kind
        heads, hidden, tokens = model.num_attention_heads / tensor, model.hidden_size, work.tokens
        if model.mla is None:
            wide = heads * model.kv_channels + 2 * max(1, model.num_query_groups / tensor) * model.kv_channels
            gemms = self.gemm(kind, tokens, wide, hidden) + self.gemm(kind, tokens, hidden, heads * model.kv_channels)
            normed = self.moved(4 * tokens * wide) if model.qk_layernorm else 0.0
            return gemms, self.moved(4 * tokens * wide) + normed
        mla = model.mla
        down = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        queries = heads * mla.query_head_dim
        gemms = self.gemm(kind, tokens, down, hidden) + self.gemm(kind, tokens, queries, mla.q_lora_rank or hidden)
        gemms += self.gemm(kind, tokens, hidden, heads * mla.v_head_dim)
        generated = tokens - work.prompt_tokens
        if work.prompt_tokens:
            gemms += self.gemm(kind, work.prompt_tokens, heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)
        if generated:  # queries are multiplied with the weight of the keys of each head, outputs with that of the values
            weights = 2 * heads * mla.kv_lora_rank * (mla.qk_head_dim + mla.v_head_dim)
            flops = generated * weights
            gemms += max(weights / self.speed.hbm_bytes, flops / self.speed.peak_flops["16"]) / self.rates.memory + 2 * floors.START
        return gemms, self.moved(4 * tokens * (down + queries)) + floors.START

    def _attention(self, work: StepWork, window: int | None) -> float:
        model, tensor = self.layout.model, self.layout.tensor
        heads = max(1, model.num_attention_heads // tensor)
        seconds = 0.0
        if work.prompt_tokens:
            pairs = work.prompt_pairs if window is None else min(work.prompt_pairs, work.prompt_tokens * float(window))
            width = (
                (model.kv_channels, model.kv_channels) if model.mla is None else (model.mla.query_head_dim, model.mla.v_head_dim)
            )
            kernel = Attention("forward", 1, heads, work.prompt_tokens, work.prompt_tokens, pairs, *width)
            seconds += attention_seconds(kernel, self.speed, self.rates)
        if work.requests:
            length = work.length if window is None else min(work.length, window)
            seconds += self._generation(heads * (1 + work.drafts), work.requests, length)
        return seconds

    def _generation(self, heads: int, requests: int, length: int) -> float:
        """Attention of the new tokens of each request. A kernel reads the cache once for all of them, as for further heads."""
        model, bits = self.layout.model, self.layout.cache_bits
        size = ELEMENT_BYTES[bits]
        if model.mla is not None:
            floor = floors.latent_floor(self.speed, element_bytes=size, heads=heads, batch=requests, length=length)
            return floor * self.ratio(f"latent {bits}", "latent", heads, requests, length)
        keys = max(1, model.num_query_groups // self.layout.tensor)
        group = heads / keys
        floor = floors.attention_floor(
            self.speed, element_bytes=size, width=model.kv_channels, group=group, heads=keys, batch=requests, length=length
        )
        return floor * self.ratio(f"attention {model.kv_channels} {bits}", "attention", group, keys, requests, length)

    def _experts(self, work: StepWork) -> tuple[float, float]:
        """Seconds of router and experts, and of the exchange of their tokens."""
        layout, model = self.layout, self.layout.model
        moe = model.moe
        assert moe is not None
        hidden, tokens = model.hidden_size, work.tokens
        spread = layout.attention_data > 1
        routed = max(tokens, work.all_tokens) if spread else tokens
        gemm = self.gemm("16", tokens, moe.num_experts, hidden)
        width, local = moe.ffn_hidden_size / layout.expert_tensor, moe.num_experts / layout.expert
        base = floors.base_kind(layout.expert_kind)
        floor = floors.experts_floor(
            self.speed, base, tokens=routed, hidden=hidden, width=width, local=local, experts=moe.num_experts, topk=moe.topk
        )
        alone = floor * self._experts_ratio(routed, width, local)
        flops = 6 * routed * moe.topk / layout.expert * hidden * width
        gemm += alone * self._slower(flops / self.speed.peak_flops[floors.PEAKS[base]] / alone)
        if moe.shared_ffn_hidden_size:
            gemm += self._mlp(tokens, ceil(moe.shared_ffn_hidden_size / layout.tensor))
        if not spread:
            return gemm, self.all_reduce(2 * tokens * hidden)
        sent = routed * hidden * floors.INPUT_BYTES[base]
        near = min(layout.ranks, self.speed.nvlink_domain)
        span = Span(layout.ranks, near)
        gathered = message_seconds("all_gather", sent, span, self.speed, self.rates).total
        return gemm, gathered + message_seconds("reduce_scatter", 2 * routed * hidden, span, self.speed, self.rates).total

    def _experts_ratio(self, *point: float) -> float:
        """With a scale for each tensor, an engine may use the kernel for blocks, with equal scales."""
        kind = self.layout.expert_kind
        kinds = (kind, "8b") if kind == "8" else (kind,)
        return min(self.ratio(f"experts {each}", "experts", *point, shape=self._shape) for each in kinds)

    @cached_property
    def _shape(self) -> str:
        """The shape of the experts, as tables of measured kernels name it."""
        model = self.layout.model
        assert model.moe is not None
        return f"{model.hidden_size} {model.moe.ffn_hidden_size} {model.moe.num_experts} {model.moe.topk}"

    def gemm(self, kind: str, rows: float, columns: float, depth: float) -> float:
        """Seconds of a linear layer."""
        if not rows:
            return 0.0
        alone = floors.gemm_floor(self.speed, kind, rows, columns, depth) * self.ratio(f"gemm {kind}", "gemm", rows, columns, depth)
        return alone * self._slower(2 * rows * columns * depth / self.speed.peak_flops[floors.PEAKS[kind]] / alone)

    def _slower(self, busy: float) -> float:
        """The clock falls under load, as in a training: of kernels which keep the matrix units busy this share of the time."""
        return 1 + min(1.0, busy) * (1 / self.rates.clock - 1)

    def moved(self, size: float) -> float:
        """Seconds of a kernel that reads and writes so many bytes."""
        return size / (self.speed.hbm_bytes * self.rates.memory) + floors.START

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce over the tensor-parallel ranks."""
        ranks = self.layout.tensor
        if ranks == 1 or not size:
            return 0.0
        if ranks > self.speed.nvlink_domain:
            span = Span(ranks, self.speed.nvlink_domain)
            return message_seconds("all_reduce", size, span, self.speed, self.rates).total
        return floors.all_reduce_floor(self.speed, ranks=ranks, size=size) * self.ratio("all_reduce", "all_reduce", ranks, size)

    def ratio(self, kernel: str, table: Table, *point: float, shape: str = "") -> float:
        """The ratio of a kernel of the engine; without a table that of the nearest kind, or of another engine."""
        own = self._ratio(kernel, table, *point, shape=shape)
        other = next((name for also, name, where in self.engine.also if also == kernel and self.speed.architecture in where), None)
        shared = None if other is None else ratio(self.speed, other, kernel, table, *point, shape=shape)
        return own if shared is None else min(own, shared)

    def _ratio(self, kernel: str, table: Table, *point: float, shape: str = "") -> float:
        first, _, kind = kernel.rpartition(" ")
        names = [kernel, *([f"{first} {STAND_INS[kind]}"] if kind in STAND_INS else []), *([f"{first} 16"] if first else [])]
        for engine in (self.engine.tables, *ENGINES):
            for name in names:
                found = ratio(self.speed, engine, name, table, *point, shape=shape)
                if found is not None:
                    return found
        if table == "attention":
            return self.ratio(f"attention 128 {kind}", table, *point)
        return 1.0
