"""Serving: an engine with continuous batching, and the clients that wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

EngineName = Literal["megatron", "vllm", "trtllm", "sglang"]
ENGINE_NAMES: Final[tuple[EngineName, ...]] = ("megatron", "vllm", "trtllm", "sglang")
MEMORY_SHARE: Final = 0.9
"""Share of the memory of a GPU that an engine uses for weights, temporary tensors and cache, if it is not given: the default of
vLLM (`gpu_memory_utilization`)."""
WAVES: Final = 10
"""Requests of each client, if they are not given."""
SPREAD: Final = 0.2
"""Lengths from 80 % to 100 % of the given ones, as public benchmarks of serving draw them. Requests of equal lengths would stay in
step."""


@dataclass(frozen=True, kw_only=True)
class ServingSpec:
    """How requests are served (`--info-serving`). Each client sends its next request when the last one is complete."""

    engine: EngineName = "vllm"
    clients: int
    """Requests that one replica of the model has at the same time, waiting or running."""
    slots: int | None = None
    """Requests that the engine runs at the same time; None for all that the cache has room for."""
    requests: int = WAVES
    """Requests of each client. All clients send the first one at the same time."""
    chunk_tokens: int | None = None
    """Tokens of a step that computes prompts; None for the default of the engine."""
    wait_steps: int = 0
    """Most steps of decode that prompts wait for further prompts; with data-parallel attention, until each group has one."""
    wait_share: float = 1.0
    """Share of the tokens of a step from which on prompts do not wait."""
    receive_steps: int = 1
    """Steps of decode after which the engine looks for new requests."""
    captured_tokens: int | None = None
    """Most tokens of a step with prompts that is replayed as CUDA graphs, except for its attention; None for the default."""
    prefix: float = 0.0
    """Share of the tokens of a prompt that the cache has already."""
    draft_tokens: int = 0
    """Tokens that speculative decoding or multi-token prediction proposes in a step."""
    acceptance: float = 0.0
    """Probability that a proposed token is accepted, if those before it are."""
    memory_share: float = MEMORY_SHARE
    prefill_replicas: int = 0
    """Replicas that compute prompts only, for each one that generates; 0 if each replica does both."""
    read_together: int | None = None
    """Clients whose prompts one process reads: of several replicas; None for those of one replica."""
    prefill_shared: float = 1.0
    """Replicas that generate for which one of those for prompts works."""
    spread: float = SPREAD
    """Lengths are spread equally from (1 - spread) of the given ones to these."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a request gets in a step of decode."""
        return 1.0 + sum(self.acceptance**place for place in range(1, self.draft_tokens + 1))
