"""A replica of a model under an engine: the seconds of its steps, the room of its cache, and what its clients see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from analyzer.errors import UnsupportedError
from analyzer.inference.kv_cache import has_attention, token_bytes
from analyzer.inference.memory import stage_memories
from analyzer.inference.results import ServedTime
from analyzer.inference.serving.batching import Load, Served, serve
from analyzer.inference.serving.engines import Engine, engine_of
from analyzer.inference.serving.layout import ServingLayout, layout_of
from analyzer.inference.serving.step import StepModel, StepWork
from analyzer.specs import InferenceJob
from analyzer.specs.serving import EngineName, ServingSpec
from analyzer.specs.speed import SpeedSpec
from analyzer.time.efficiencies import Efficiencies, efficiencies_of

UNLIMITED: Final = 2**60
"""Tokens of the cache if the capacity of the GPU is not known."""


@dataclass(frozen=True)
class Replica:
    """One replica of the model."""

    job: InferenceJob
    engine: Engine
    speed: SpeedSpec
    rates: Efficiencies

    @cached_property
    def layout(self) -> ServingLayout:
        """The layout of the replica."""
        return layout_of(self.job)

    @cached_property
    def steps(self) -> StepModel:
        """The seconds of its steps."""
        return StepModel(self.layout, self.engine, self.speed, self.rates)

    @cached_property
    def _fixed_and_token_bytes(self) -> tuple[int, float]:
        """Bytes of a rank without its cache, and of a token in the cache of all layers."""
        prompt = min(self.engine.chunk_tokens, self.job.inference.prompt_tokens)
        alone = replace(self.job, inference=replace(self.job.inference, batch_size=1, prompt_tokens=prompt, generated_tokens=1))
        highest = max(stage_memories(alone), key=lambda each: each.device_bytes - each.kv_cache_bytes)
        layers = sum(has_attention(self.job.model, layer) for layer in range(1, self.job.model.num_layers + 1))
        return highest.device_bytes - highest.kv_cache_bytes, layers * token_bytes(self.job)

    def cache_tokens(self, memory_share: float) -> int:
        """Tokens that the cache of all groups has room for; 0 or less if the weights do not fit."""
        capacity = self.job.hardware.capacity_bytes
        if capacity is None:
            return UNLIMITED
        fixed, each = self._fixed_and_token_bytes
        return int((memory_share * capacity - fixed) / each) * self.layout.attention_data

    def serve(self, spec: ServingSpec, *, prompts: Replica | None = None) -> Served:
        """What the clients see. `prompts`: a replica that only computes prompts; `spec.prefill_replicas` work for this one."""
        inference, engine = self.job.inference, self.engine
        transfer = 0.0
        if prompts is not None:
            transfer = inference.prompt_tokens * self._fixed_and_token_bytes[1] / self.speed.network_bytes
        load = Load(
            clients=spec.clients,
            requests=spec.requests,
            prompt=inference.prompt_tokens,
            generate=inference.generated_tokens,
            spread=spec.spread,
            prefix=spec.prefix,
            chunk=spec.chunk_tokens or engine.chunk_tokens,
            chunked=engine.chunked,
            mixed=engine.mixed,
            groups=self.layout.attention_data,
            prompt_groups=1 if prompts is None else prompts.layout.attention_data,
            slots=spec.slots or spec.clients,
            cache_tokens=max(1, self.cache_tokens(spec.memory_share)),
            wait_steps=spec.wait_steps,
            wait_share=spec.wait_share,
            receive_steps=spec.receive_steps,
            captured=engine.captured_tokens if spec.captured_tokens is None else spec.captured_tokens,
            tokens_per_step=spec.tokens_per_step,
            drafts=spec.draft_tokens,
            prefill_replicas=spec.prefill_replicas if prompts is not None else 0,
            busy=spec.prefill_shared,
            transfer=transfer,
        )

        def seconds(work: StepWork) -> float:
            unit = prompts if prompts is not None and work.prompt_tokens else self
            return unit.steps.seconds(work).total

        served = serve(load, seconds)
        read = engine.text_seconds * inference.prompt_tokens * (1 - spec.spread / 2)
        outside = engine.first_seconds + read + (engine.handover_seconds if prompts is not None else 0.0)
        together = (
            outside + read * (spec.read_together or spec.clients) / spec.requests
        )  # one process reads the prompts that all clients send first
        return served._replace(first=served.first + together, first_later=served.first_later + outside)


def replica_of(job: InferenceJob, engine: EngineName, speed: SpeedSpec, rates: Efficiencies | None = None) -> Replica:
    """The replica of a job. Raises UnsupportedError for what is not modelled."""
    if job.parallel.pipeline > 1:
        fault = "serving engines are modelled without pipeline stages"
        raise UnsupportedError("--pipeline-model-parallel-size", fault, "write 1, or --info-serving-engine megatron")
    return Replica(job, engine_of(engine, speed.name, job.hardware.capacity_bytes), speed, rates or efficiencies_of(speed))


def cache_requests(replica: Replica, spec: ServingSpec) -> int | None:
    """Finished requests of the given lengths that the cache of a replica has room for; None if the capacity is not known."""
    if replica.job.hardware.capacity_bytes is None:
        return None
    groups = replica.layout.attention_data
    tokens = replica.cache_tokens(spec.memory_share) // groups
    return max(0, tokens // replica.job.inference.sequence_length) * groups


def served_time(replica: Replica, spec: ServingSpec, *, replicas: int, price: float | None) -> ServedTime:
    """What the clients of a replica see. `replicas`: number of replicas that generate."""
    served = replica.serve(spec, prompts=replica if spec.prefill_replicas else None)
    outside = 1e9 if not served.tokens_per_second else served.tokens_per_second * replicas
    gpus = replica.layout.ranks * replicas * (1 + spec.prefill_replicas)
    return ServedTime(
        clients=spec.clients,
        first_seconds=served.first,
        first_later_seconds=served.first_later,
        token_seconds=served.token,
        tokens_per_second=outside,
        running=served.running,
        prompt_share=served.prompt_share,
        waits=served.waits,
        cost_per_million_tokens=None if price is None else price * gpus / 3600 / outside * 1e6,
    )
