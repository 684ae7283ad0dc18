"""Seconds of prefill and of a decode step, through all pipeline stages."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import ceil
from typing import Final

from analyzer.inference.attention import rotated_keys_bytes
from analyzer.inference.forward_job import forward_job
from analyzer.inference.kernels import (
    Machine,
    cached_attention_seconds,
    experts_seconds,
    linear_seconds,
    measured_attention,
)
from analyzer.inference.kv_cache import caches_latents, has_attention, token_bytes, visible_tokens
from analyzer.inference.results import StepSeconds
from analyzer.inference.weights import is_quantized
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.stage import StageModel
from analyzer.modules.tree import Module
from analyzer.passes.stages import stage_models
from analyzer.program.chunks import chunk_program
from analyzer.specs import InferenceJob, QuantizationSpec, TrainingJob
from analyzer.time.kernels.seconds import kernel_seconds
from analyzer.time.links import span_of
from analyzer.time.message_seconds import message_seconds
from analyzer.time.pass_seconds import pass_run
from analyzer.time.pass_work import PassWork, block_work, settings_of
from analyzer.time.work.context import WorkContext, work_context
from analyzer.time.work.kernels import Attention, Gemm, Kernel
from analyzer.time.work.linear import own_weight
from analyzer.time.work.of_module import work_of
from analyzer.units import DTYPE_BYTES

LAUNCH: Final = 5e-6
"""Seconds in which cuBLAS issues a product of the loop over experts in Transformer Engine (`nvte_multi_tensor_gemm`): assumed,
the time of a launch of a kernel."""
_AFTER_LAYERS = frozenset({ModuleKind.FINAL_NORM, ModuleKind.OUTPUT_LAYER})
_SKIPPED = frozenset({ModuleKind.LOSS, ModuleKind.BATCH, *_AFTER_LAYERS})


def prefill_seconds(job: InferenceJob, machine: Machine) -> StepSeconds:
    """Seconds from the prompts to the first token of every request."""
    spec = job.inference
    return _step(job, machine, tokens=spec.prompt_tokens, cached=0)


def decode_seconds(job: InferenceJob, machine: Machine) -> StepSeconds:
    """Seconds of an output token after the first one, at the mean length of a request while its tokens are generated."""
    spec = job.inference
    return _step(job, machine, tokens=1, cached=spec.prompt_tokens + (spec.generated_tokens + 1) // 2)


def _step(job: InferenceJob, machine: Machine, *, tokens: int, cached: int) -> StepSeconds:
    """A step with `tokens` tokens of every request. `cached`: tokens in the cache that decode attends to; 0 for prefill."""
    requests = job.inference.batch_size
    forward = forward_job(job, requests=requests, tokens=tokens)
    last = forward_job(job, requests=requests, tokens=1)
    parts = dict.fromkeys(("gemm", "attention", "memory_bound", "communication", "host"), 0.0)
    for stage, after in zip(stage_models(forward), stage_models(last), strict=True):
        run = _Stage(job, machine, cached=cached)
        for tree in stage.trees:
            run.add(forward, tree, skipped=_SKIPPED)
        for tree in after.trees:  # norm and logits of the last token of each request
            run.add(last, tree, only=_AFTER_LAYERS)
        run.add_cache(stage, tokens=tokens)
        seconds = run.seconds()
        for name in parts:
            parts[name] += getattr(seconds, name)
    boundaries = job.parallel.pipeline * job.parallel.chunks - 1
    if boundaries:
        payload = requests * tokens * job.model.hidden_size * DTYPE_BYTES[job.precision.parameters]
        span = span_of(forward, "pp", machine.speed)._replace(ranks=2)
        parts["communication"] += boundaries * message_seconds("send", payload, span, machine.speed, machine.rates).total
    return StepSeconds(**parts)


class _Stage:
    """The seconds of one pipeline stage, collected tree by tree."""

    def __init__(self, job: InferenceJob, machine: Machine, *, cached: int) -> None:
        self.job, self.machine, self.cached = job, machine, cached
        self.gemm = self.attention = self.memory_bound = self.communication = 0.0
        self.issue = self.synchronization = 0.0

    def add(
        self,
        forward: TrainingJob,
        tree: Module,
        *,
        skipped: frozenset[ModuleKind] = frozenset(),
        only: frozenset[ModuleKind] | None = None,
    ) -> None:
        """Adds the blocks of a tree, those of kinds in `only` or all but those of `skipped`."""
        context = work_context(forward)
        for block in chunk_program(tree).blocks:
            if block.module.kind in skipped or (only is not None and block.module.kind not in only):
                continue
            self._add_kernels(block.module, context, block.times)
            work = block_work(block.module, "forward", context, settings_of(forward))
            self._add_calls(forward, work, block.times)

    def _add_calls(self, forward: TrainingJob, work: PassWork, times: int) -> None:
        """Collectives, and the operations of the host."""
        graphs = self.job.inference.decode_graphs and self.cached > 0
        calls = work.calls + work.graph_calls
        messages = work._replace(kernels=(), graph_calls=calls if graphs else 0, calls=0 if graphs else calls)
        run = pass_run(forward, messages, self.machine.speed, self.machine.rates)
        self.communication += times * (run.device.tp + run.device.cp + run.device.ep)
        self.issue += 0.0 if graphs else times * (run.issue - _of_loops(work, self.machine.rates.host_call))
        self.synchronization += 0.0 if graphs else times * run.synchronization

    def _add_kernels(self, block: Module, context: WorkContext, times: int) -> None:
        for kernel, quantization, number in step_kernels(block, context, self.job.inference.quantization, decode=self.cached > 0):
            if isinstance(kernel, Gemm):
                measured = _measured_experts(kernel, context, self.machine, quantization) if kernel.grouped else None
                seconds = linear_seconds(kernel, self.machine, quantization) if measured is None else measured
                self.gemm += times * number * seconds
            elif isinstance(kernel, Attention):
                self.attention += times * number * kernel_seconds(kernel, self.machine.speed, self.machine.rates)
            else:
                self.memory_bound += times * number * kernel_seconds(kernel, self.machine.speed, self.machine.rates)

    def add_cache(self, stage: StageModel, *, tokens: int) -> None:
        """Writes the tokens of the step into the cache of the layers, and in decode reads the tokens that they attend to."""
        layers = [layer for chunk in stage.chunks for layer in chunk.layers if has_attention(self.job.model, layer)]
        written = 2 * self.job.inference.batch_size * tokens * token_bytes(self.job) / self.machine.memory
        self.memory_bound += len(layers) * (written + self.machine.rates.kernel_gap)
        if self.cached:  # the static engine reads the keys and writes them with their rotation
            rotated = 2 * rotated_keys_bytes(self.job, tokens=self.cached)
            self.memory_bound += len(layers) * (rotated / self.machine.memory + (self.machine.rates.kernel_gap if rotated else 0))
            lengths = Counter(visible_tokens(self.job, layer, self.cached) for layer in layers)
            self.attention += sum(number * self._attention(length) for length, number in lengths.items())

    def _attention(self, length: int) -> float:
        """Seconds of decode attention of a layer to `length` tokens of each request."""
        job, model = self.job, self.job.model
        measured = measured_attention(
            job, self.machine, heads=model.num_attention_heads // job.parallel.tensor, length=length, latent=caches_latents(job)
        )
        if measured is not None and (model.mla is None or caches_latents(job)):
            return measured
        rows = job.inference.batch_size * length
        heads = model.num_attention_heads // job.parallel.tensor
        width = 2 * model.kv_channels
        if model.mla is not None:
            width = model.mla.query_head_dim + model.mla.v_head_dim
            if caches_latents(job):  # scores over latents and rotated keys, and a sum of latents
                width = 2 * model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim
        stored = token_bytes(job)
        bits = job.inference.quantization.cache_bits
        return cached_attention_seconds(
            self.machine,
            cache_bytes=rows * stored,
            operations=2.0 * rows * heads * width,
            elements=rows * stored * 8 / bits,
            cache_bits=bits,
            dtype=job.precision.parameters,
        )

    def seconds(self) -> StepSeconds:
        """The stage. The GPU waits for the host where that issues operations more slowly than the GPU runs them."""
        device = self.gemm + self.attention + self.memory_bound + self.communication
        return StepSeconds(
            gemm=self.gemm,
            attention=self.attention,
            memory_bound=self.memory_bound,
            communication=self.communication,
            host=max(0.0, self.issue - device) + self.synchronization,
        )


def _of_loops(work: PassWork, host_call: float) -> float:
    """Seconds less that the host needs for the products of experts: a loop in C++ issues them, not one by one from Python."""
    issued = sum(count * kernel.launches for kernel, count in work.kernels if isinstance(kernel, Gemm) and kernel.grouped)
    return issued * max(0.0, host_call - LAUNCH)


def _measured_experts(kernel: Gemm, context: WorkContext, machine: Machine, quantization: QuantizationSpec | None) -> float | None:
    routing = context.routing
    width = routing.moe.ffn_hidden_size / routing.etp
    tokens = routing.tokens * routing.ep * routing.etp
    return experts_seconds(kernel, machine, quantization, tokens=tokens, width=width, local=routing.local_experts)


def step_kernels(
    block: Module, context: WorkContext, quantization: QuantizationSpec, *, decode: bool
) -> tuple[tuple[Kernel, QuantizationSpec | None, int], ...]:
    """The kernels of a block, each with its quantization and number. In decode without the kernels of attention over the step."""
    return block.derived(_step_kernels, context, quantization, decode)


def _step_kernels(
    block: Module, context: WorkContext, quantization: QuantizationSpec, decode: bool
) -> tuple[tuple[Kernel, QuantizationSpec | None, int], ...]:
    found: Counter[tuple[Kernel, QuantizationSpec | None]] = Counter()
    for _, module in block.walk():
        if module.children:
            continue
        weight = own_weight(module)
        own = quantization if weight is not None and is_quantized(module, weight) else None
        for kernel in work_of(module, context).forward:
            if decode and module.kind is ModuleKind.ATTENTION_KERNEL and kernel.name != "rotation":
                continue
            found[_chosen_experts(kernel, context), own] += 1
    return tuple((kernel, own, number) for (kernel, own), number in found.items())


def _chosen_experts(kernel: Kernel, context: WorkContext) -> Kernel:
    """A grouped GEMM with the experts that the tokens of the step choose: a few tokens do not choose all of them."""
    if not isinstance(kernel, Gemm) or not kernel.grouped:
        return kernel
    routing = context.routing
    number = expected_experts(kernel.batch, routing.moe.num_experts, routing.moe.topk, routing.tokens * routing.ep)
    return kernel._replace(batch=number, m=max(1, ceil(routing.multiplied_rows / number)))


@cache
def expected_experts(local: int, experts: int, topk: int, tokens: int) -> int:
    """The mean number of `local` experts of a rank that any of `tokens` tokens chooses, if all experts are equally likely."""
    return max(1, ceil(local * (1 - (1 - topk / experts) ** tokens) - 1e-9))
