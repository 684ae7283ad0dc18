"""The inference time of llm-analysis: shares of the peaks of computation and memory (`--info-efficiency`).

Source: llm-analysis 0.2.2, `LLMAnalysis.inference` (llm_analysis/analysis.py). Attention and MLP of a layer take the longer of
their operations and of reading their weights and activations. Norms read fp32 activations. All pairs of queries and keys of the
step are computed, none of the cache; the cache is read and written once in decode at its full length. The word embedding is read
once in each step, and the logits of all tokens are computed. An all-reduce over n ranks sends 2(n-1)/n of its message.
"""

from __future__ import annotations

from math import ceil

from analyzer.errors import UnsupportedError
from analyzer.inference.results import StepSeconds
from analyzer.specs import InferenceJob, ModelSpec
from analyzer.specs.speed import SpeedSpec
from analyzer.units import DTYPE_BYTES

MESSAGE_SECONDS = 8e-6
"""Shortest time of an all-reduce (`intra_node_min_message_latency` of llm_analysis/gpu_configs/a100-sxm-80gb.json)."""
NORM_BYTES = 4
"""Bytes of an element of the activations that norms read."""


class SimpleModel:
    """Seconds of the steps of a job at shares of the peaks. Raises UnsupportedError for models that llm-analysis does not have."""

    def __init__(self, job: InferenceJob, speed: SpeedSpec, *, flops: float, memory: float) -> None:
        model, quantization = job.model, job.inference.quantization
        if model.mla is not None or model.blocks or job.parallel.pipeline > 1:
            what = "pipeline stages" if job.parallel.pipeline > 1 else "latent attention and layers that differ"
            raise UnsupportedError("--info-efficiency", f"its model of inference has no {what}", "leave --info-efficiency out")
        self.job, self.model, self.tensor = job, model, job.parallel.tensor
        self.requests = job.inference.batch_size
        bits = max(quantization.weight_bits, quantization.activation_bits)
        peak = max(speed.peak_flops[str(bits)], speed.integer_ops.get(str(bits), 0.0))
        self.operations = flops * peak * self.tensor
        self.memory = memory * speed.hbm_bytes
        self.link = speed.nvlink_bytes
        self.weight = quantization.weight_bits / 8
        self.activation = quantization.activation_bits / 8

    def prefill(self) -> StepSeconds:
        """Seconds of the step with all tokens of the prompts."""
        return self._step(self.job.inference.prompt_tokens)

    def decode(self) -> StepSeconds:
        """Seconds of a step with one token of each request."""
        spec, model = self.job.inference, self.model
        elements = 2 * spec.batch_size * spec.sequence_length * model.key_value_projection_size * model.num_layers
        cache = elements * spec.quantization.cache_bits / 8 / self.tensor
        step = self._step(1)
        return StepSeconds(
            gemm=step.gemm,
            attention=2 * cache / self.memory,
            memory_bound=step.memory_bound,
            communication=step.communication,
        )

    def _step(self, tokens: int) -> StepSeconds:
        model = self.model
        rows = self.requests * tokens
        layers = self._attention(tokens) + self._mlp(rows)
        logits = 2 * rows * model.hidden_size * model.vocab_size / self.operations
        norms = 2 * rows * model.hidden_size * NORM_BYTES / self.memory
        embedding = model.vocab_size * model.hidden_size * DTYPE_BYTES[self.job.precision.parameters] / self.memory
        return StepSeconds(
            gemm=model.num_layers * layers + logits,
            memory_bound=model.num_layers * norms + embedding,
            communication=2 * model.num_layers * self._all_reduce(rows),
        )

    def _attention(self, tokens: int) -> float:
        """Seconds of the projections and of the attention of a layer."""
        model, rows = self.model, self.requests * tokens
        query = model.query_projection_size
        parameters = 2 * model.hidden_size * (query + model.key_value_projection_size)
        operations = 2 * rows * parameters + 4 * rows * tokens * query
        inside = max(3 * query, 2 * query + 4 * model.num_attention_heads)
        return self._longer(operations, parameters, inside * rows)

    def _mlp(self, rows: int) -> float:
        """Seconds of the MLP of a layer: of experts, those that are chosen compute, and all weights of the rank are read."""
        model = self.model
        width = _experts_width(model, chosen=False) / (self.job.parallel.expert if model.moe else 1)
        matrices = (3 if model.gated else 2) * model.hidden_size
        operations = 2 * rows * matrices * _experts_width(model, chosen=True)
        largest = max(model.hidden_size, model.moe.ffn_hidden_size if model.moe else model.ffn_hidden_size)
        return self._longer(operations, ceil(matrices * width), rows * largest * (model.moe.topk if model.moe else 1))

    def _longer(self, operations: float, parameters: float, activations: float) -> float:
        read = (parameters * self.weight + activations * self.activation) / self.tensor
        return max(operations / self.operations, read / self.memory)

    def _all_reduce(self, rows: int) -> float:
        if self.tensor == 1:
            return 0.0
        sent = 2 * rows * self.model.hidden_size * self.activation * (self.tensor - 1) / self.tensor
        return max(sent / self.link, MESSAGE_SECONDS)


def _experts_width(model: ModelSpec, *, chosen: bool) -> int:
    """Width of the MLP of a layer: of all experts together, or of those that a token chooses."""
    if model.moe is None:
        return model.ffn_hidden_size
    return model.moe.ffn_hidden_size * (model.moe.topk if chosen else model.moe.num_experts)
