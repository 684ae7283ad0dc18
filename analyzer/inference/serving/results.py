"""The result of the analysis of serving."""

from __future__ import annotations

from dataclasses import dataclass

from analyzer.inference.results import StepSeconds
from analyzer.specs.serving import ServingSpec


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
