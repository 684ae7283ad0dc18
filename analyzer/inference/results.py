"""The report of an inference launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from analyzer.layout.groups import RankRanges
from analyzer.results import Exported, MemoryPart, Verdict
from analyzer.specs import InferenceJob
from analyzer.specs.serving import ServingSpec


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of the ranks of one pipeline stage, in bytes. The parts add up to `peak_bytes`."""

    pipeline_rank: int
    ranks: RankRanges
    layers: tuple[int, ...]
    """Counted from 1."""
    parameters: int
    """Parameters on one of these ranks."""
    weights_by_type: Mapping[str, int]
    kv_cache_bytes: int
    workspaces: tuple[MemoryPart, ...]
    prefill_bytes: int
    """Temporary tensors at the peak of prefill, with the logits on the last stage."""
    decode_bytes: int
    """The same of a decode step."""
    graph_pool_bytes: int
    """The memory pool of the CUDA graphs of decode."""
    peak_bytes: int
    """Allocated at the peak."""
    device_bytes: int
    """With segments of the allocator, CUDA context and communicators."""
    device_range_bytes: tuple[int, int]
    """The least and the most of `device_bytes`. They differ if the vocabulary size is not known."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.weights_by_type.values())

    @property
    def runtime_bytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(part.bytes for part in self.workspaces)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest values that fit the GPU, with the other values as they are; None if the capacity is not known."""

    batch_size: int
    """0 if not even one request fits."""
    sequence_length: int
    """Tokens of a finished request, with the given number of generated tokens; 0 if none fits."""


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of a prefill or of a decode step, through all pipeline stages. The parts add up to the total."""

    gemm: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    communication: float = 0.0
    """Collectives in layers, and messages between pipeline stages."""
    host: float = 0.0
    """The GPU waits for the host."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.gemm + self.attention + self.memory_bound + self.communication + self.host


@dataclass(frozen=True, kw_only=True)
class BatchTime:
    """Times of one batch size."""

    batch_size: int
    """Requests of one replica of the model."""
    prefill: StepSeconds
    """Time to the first token."""
    decode: StepSeconds
    """Time of an output token, at the mean length of the requests while they are generated."""
    tokens_per_second: float
    """Generated tokens of all replicas per second, from the start of the prefill to the last token."""
    cost_per_million_tokens: float | None = None
    """Of generated tokens, at `--info-price`."""
    fits: bool = True


@dataclass(frozen=True, kw_only=True)
class InferenceTime:
    """Times of the batch of the launch, and of other batch sizes that fit."""

    given: BatchTime
    others: tuple[BatchTime, ...]
    """Powers of two up to the largest batch that fits, and the given batch size."""
    calibration: str
    """Where the efficiencies are from."""


@dataclass(frozen=True, kw_only=True)
class ServedTime:
    """What the clients of one replica see. Times are means, in seconds."""

    clients: int
    first_seconds: float
    """From a request to its first token, with the wait for other requests."""
    first_later_seconds: float
    """The same without the first request of each client, which all send together."""
    token_seconds: float
    """Of an output token after the first one."""
    tokens_per_second: float
    """Generated tokens of all replicas."""
    running: float
    """Mean number of requests of a replica that generate at the same time."""
    prompt_share: float
    """Share of the time of steps that compute prompts."""
    waits: bool
    """Requests wait for room in the cache."""
    cost_per_million_tokens: float | None = None


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """A layout of a search, with the largest number of clients that meets the times."""

    gpus: int
    """Of all replicas."""
    tensor: int
    attention_data: int
    expert: int
    expert_tensor: int
    replicas: int
    time: ServedTime
    """Of one replica; tokens of all of them."""
    options: tuple[str, ...]
    """The options of the launch with this layout."""


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """Serving of a job."""

    spec: ServingSpec
    tables_gpu: str
    """The GPU whose measured kernels are used."""
    gpus: int
    """Of a replica."""
    attention_data: int
    """Groups of ranks with different requests."""
    cache_tokens: int | None
    """Tokens of the cache of a replica; None if the capacity is not known."""
    cache_requests: int | None
    """Finished requests that these are enough for."""
    given: ServedTime
    others: tuple[ServedTime, ...]
    """Numbers of clients, powers of two and the given one."""
    decode: StepSeconds
    """A step that generates a token of each running request, without prompts."""
    prompt: StepSeconds
    """A step with one prompt alone."""
    not_counted: tuple[str, ...]
    choices: tuple[ServingChoice, ...] = ()
    """Of a search, the cheapest first."""
    front: tuple[ServingChoice, ...] = ()
    """Of a search: the choices that no other one exceeds in tokens of a GPU and in the time of a token."""


@dataclass(frozen=True, kw_only=True)
class InferenceReport(Exported):
    """The result of the analysis of an inference launch."""

    job: InferenceJob
    parameters: int
    """Of the complete model, without parallelism."""
    parameters_unpadded: int
    """The same with the vocabulary of the tokenizer."""
    stages: tuple[StageMemory, ...]
    kv_cache_bytes_per_token: float
    """Bytes of a token of one request in the cache of all layers, without tensor parallelism."""
    cache_requests: int
    """Requests that the cache has memory for."""
    verdict: Verdict
    limits: Limits | None
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    time: InferenceTime | None = None
    """None if the speeds of the GPU are not known, and with a serving engine."""
    serving: ServingReport | None = None
    """Set with a serving engine."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The words of the launch that was analyzed; empty if the job was not read from words. Equal results may differ in it."""

    @property
    def highest(self) -> StageMemory:
        """The stage whose ranks need the most memory."""
        return max(self.stages, key=lambda each: each.device_bytes)
