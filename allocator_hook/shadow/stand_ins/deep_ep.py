"""The part of DeepEP (releases of 2025 and 2026, and its branch hybrid-ep) that megatron-core calls.

Each function returns tensors of the sizes that the library allocates with PyTorch. Its communication buffers are allocated with the
CUDA driver and not recorded. Communication is recorded as an all-to-all of the tokens that arrive on this rank, and of weights.

Sources: deep_ep/buffer.py and csrc/deep_ep.cpp (`intranode_dispatch`, `internode_dispatch`, `intranode_combine`); branch
hybrid-ep: deep_ep/hybrid_ep_buffer.py, csrc/hybrid_ep/hybrid_ep.cu and executor/executor.cu.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from allocator_hook.shadow.balance import means
from allocator_hook.shadow.te_kernels.allocate import empty
from analyzer.modules.moe.flex import expected_arrivals
from analyzer.units import round_up

PEERS: Final = 8
"""Ranks of a node (NUM_MAX_NVL_PEERS)."""
SOURCE_BYTES: Final = 8
"""Bytes of the origin of a token that arrives over the network."""


class Event:
    """`EventHandle` and `EventOverlap`: operations run in the order in which they are issued."""

    def __init__(self, *_: Any) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


class _NoBuffer:
    """A configuration whose buffers have no bytes: they are outside PyTorch's allocator."""

    def get_nvl_buffer_size_hint(self, *_: Any) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, *_: Any) -> int:
        return 0


class Handle(NamedTuple):
    """What a dispatch keeps for the combine, and for the two in backward."""

    tokens: int
    """Tokens of this rank."""
    arrived: int
    kept: tuple[torch.Tensor, ...]


class Buffer:
    """`Buffer`: dispatch and combine in normal mode."""

    _sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(sms: int) -> None:
        Buffer._sms = sms

    @staticmethod
    def get_dispatch_config(ranks: int) -> _NoBuffer:
        return _NoBuffer()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Return tokens for each rank, node and expert, and the ranks of each token."""
        ranks = self.group.size()
        per_node = empty((ranks // PEERS,), torch.int32) if ranks > PEERS else None
        in_rank = empty((topk_idx.shape[0], ranks), torch.bool)
        return empty((ranks,), torch.int32), per_node, empty((num_experts,), torch.int32), in_rank, Event()

    def dispatch(self, x: torch.Tensor, handle: Handle | None = None, **options: Any) -> tuple[Any, ...]:
        """Return the tokens that arrive, their choices and weights, the tokens of each expert, the handle and an event."""
        if handle is not None:
            return self._arriving(x, handle.arrived), None, None, None, None, Event()
        choices, weights = options["topk_idx"], options["topk_weights"]
        tokens, topk = choices.shape
        ranks, experts = self.group.size(), options["num_tokens_per_expert"].shape[0]
        local = experts // ranks
        arrived = _arrivals(self.group, tokens, experts, topk)
        rows = tokens * topk
        kept = (*self._metadata(tokens, arrived), options["is_token_in_rank"])
        received = self._arriving(x, arrived)
        received_choices, received_weights = empty((arrived, topk), choices.dtype), empty((arrived, topk), weights.dtype)
        _record(received_weights, self.group)
        means.put(received_choices, rows / (arrived * topk))  # the share of choices of local experts: the others are -1
        each = means.spread(rows, local)
        return received, received_choices, received_weights, each, Handle(tokens, arrived, kept), Event()

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, **_: Any) -> tuple[Any, ...]:
        """Return the sums of the tokens of this rank and of their weights, and an event."""
        _record(x, self.group)
        weights = None
        if topk_weights is not None:
            _record(topk_weights, self.group)
            weights = empty((handle.tokens, topk_weights.shape[1]), torch.float32)
        return empty((handle.tokens, x.shape[1]), x.dtype), weights, Event()

    def _arriving(self, x: torch.Tensor, arrived: int) -> torch.Tensor:
        received = empty((arrived, x.shape[1]), x.dtype)
        _record(received, self.group)
        return received

    def _metadata(self, tokens: int, arrived: int) -> tuple[torch.Tensor, ...]:
        ranks, channels = self.group.size(), Buffer._sms // 2
        if ranks <= PEERS:
            matrices = [empty((ranks, width), torch.int32) for width in (ranks, channels, channels)]
            return (*matrices, empty((arrived,), torch.int32), empty((tokens, ranks), torch.int32))
        nodes = ranks // PEERS
        sizes = [(nodes, channels), (ranks, channels)] * 2
        return (
            *(empty(size, torch.int32) for size in sizes),
            empty((arrived, SOURCE_BYTES), torch.uint8),
            empty((tokens, nodes), torch.int32),
        )


class HybridEPBuffer:
    """`HybridEPBuffer`: one kernel dispatches tokens and copies them for each expert."""

    def __init__(self, group: Any, num_local_experts: int, **_: Any) -> None:
        self.group, self.local = group, num_local_experts

    def dispatch_with_permute(
        self,
        hidden: torch.Tensor,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        handle: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return rows sorted by expert, their probabilities, scales, the rows of each expert, and the handle."""
        if handle is None:
            assert routing_map is not None
            handle = self._handle(hidden, routing_map, pad_multiple, num_permuted_tokens)
        tokens, rows, *_unused = handle
        permuted = empty((rows, hidden.shape[1]), hidden.dtype)
        arrived = self._arrived(tokens, handle[2])
        _record(_sized(permuted, (arrived, hidden.shape[1])), self.group)
        probabilities = None
        if probs is not None:
            probabilities = empty((rows,), torch.float32)
            _record(_sized(probabilities, (arrived, self.local * self.group.size())), self.group)
        each = empty((self.local,), torch.int64)
        means.put(each, rows / self.local, padded=True)
        return permuted, probabilities, None, each, handle

    def combine_with_unpermute(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: Any = None, **_: Any
    ) -> tuple[Any, ...]:
        """Return the sums of the tokens of this rank, and their probabilities for every expert."""
        tokens, _, topk, *_unused = handle
        arrived = self._arrived(tokens, topk)
        _record(_sized(hidden, (arrived, hidden.shape[1])), self.group)
        combined = empty((tokens, hidden.shape[1]), hidden.dtype)
        if probs is None:
            return combined, None
        _record(_sized(probs, (arrived, self.local * self.group.size())), self.group)
        return combined, empty((tokens, self.local * self.group.size()), torch.float32)

    def _arrived(self, tokens: int, topk: int) -> int:
        ranks = self.group.size()
        return _arrivals(self.group, tokens, self.local * ranks, topk)

    def _handle(self, hidden: torch.Tensor, routing_map: torch.Tensor, pad: int | None, limit: Any) -> tuple[Any, ...]:
        """`metadata_preprocessing`, for ranks in one NVLink domain."""
        tokens, experts = routing_map.shape
        ranks = self.group.size()
        topk = round((means.of(routing_map) or 0.0) * experts)
        gathered = empty((tokens * ranks, experts), torch.bool)
        dist.all_gather_into_tensor(gathered, routing_map, group=self.group)
        kept = (
            empty((tokens, ranks), torch.int32),
            empty((round_up(tokens, 16), 1), torch.bool),
            empty((tokens * ranks, self.local), torch.bool),
            empty((tokens * ranks, self.local), torch.int32),
        )
        del gathered
        each = tokens * topk // self.local
        rows = int(limit) if limit is not None else (means.padded(each, pad) if pad else each) * self.local
        return tokens, rows, topk, kept


def _arrivals(group: Any, tokens: int, experts: int, topk: int) -> int:
    """The expected number of tokens that arrive on a rank if choices are independent.

    Megatron lists every expert and every choice once for each rank over which an expert is split.
    """
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size

    split = get_expert_tensor_parallel_world_size()
    return expected_arrivals(tokens * group.size(), experts // split, experts // group.size(), topk=topk // split)


def _record(payload: torch.Tensor, group: Any) -> None:
    """Record an all-to-all with this payload."""
    dist.all_to_all_single(payload, payload, group=group)


def _sized(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a view of this shape that allocates nothing."""
    return tensor.flatten()[:1].expand(shape)


def modules() -> dict[str, ModuleType]:
    """Return the replacement modules by import name."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.__path__ = []
    contents: dict[str, Callable[..., Any]] = {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer}
    for name, value in contents.items():
        setattr(package, name, value)
    utils.EventHandle = utils.EventOverlap = Event  # type: ignore[attr-defined]
    return {"deep_ep": package, "deep_ep.utils": utils}
