"""The memory of NCCL communicators, outside PyTorch's allocator: their buffers, by the code of NCCL 2.27 to 2.30.

- Every communicator has buffers for messages through the network: 16 steps of a chunk for each channel (`sharedNetBuffersInit`,
  src/transport/net.cc). The chunk has 512 KiB where NVLink connects all ranks, and 128 KiB elsewhere (`computeBuffSizes`, init.cc).
- A connection with another GPU has buffers of the protocols Simple, LL128 and LL for what is received, and a page for what is sent
  (`p2pRecvSetup` and `p2pSendSetup`, src/transport/p2p.cc), in pages of 2 MiB. Rings connect both neighbours in each channel, trees
  both in the other direction too (src/transport/generic.cc), and sends and receives, of which an all-to-all consists, each peer in
  several channels (`ncclTopoComputeP2pChannels`, src/graph/paths.cc).
- NVLink SHARP (NVLS) has two buffers of 1 MiB for each channel and rank (`ncclNvlsBufferSetup`, src/transport/nvls.cc).

PyTorch creates a communicator when its group first communicates, and NCCL the connections of an algorithm when it is first used.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from analyzer.layout.job_groups import domain_size, gradient_statistics_group, ranks_in_group, ranks_near
from analyzer.specs import HardwareSpec, TrainingJob
from analyzer.specs.moe import AUXILIARY_LOSSES
from analyzer.specs.software import DEFAULT_NCCL, NcclSpec
from analyzer.units import KIB, MIB, ceil_div, power_of_two, round_up

PAGE: Final = 2 * MIB
"""Buffers that other processes map are multiples of it (CUDA_IPC_MIN, and the granularity of CUDA's virtual memory)."""
LL128: Final = 120 * 640 * 8 * 8
"""Bytes of a buffer of this protocol: 120 elements × 640 threads × 8 B × 8 steps."""
LL: Final = 512 * KIB
STEPS: Final = 16
"""Chunks of the buffers for messages through the network, for each channel."""
BUFFER_STEPS: Final = 8
"""Steps of a buffer of a connection (NCCL_STEPS)."""
MOST_CHANNELS: Final = (32, 64)
"""Channels of a communicator with one rank: up to NCCL 2.24, and from 2.26 on (MAXCHANNELS)."""
NETWORK_CHANNELS: Final = 16
"""Channels of a ring through the network with eight or four GPUs of a node; four for each GPU below."""
NETWORK_PEER_CHANNELS: Final = 4
"""Channels of a message to another node: 14 GB/s each, for a port of 50 GB/s (NCCL_P2P_PER_CHANNEL_NET_BW)."""
PCIE_CHANNELS: Final = 4
AMD_CHANNELS: Final = 32
"""Of RCCL, whose rings alone have what was measured for a communicator."""
NVLS_BUFFER: Final = 2 * 8 * 128 * KIB
"""Bytes of both NVLS buffers of a channel and rank: 8 steps of 128 KiB."""

_LINK_GB: Final = ((10, 40.1), (9, 20.6), (7, 20.0))
"""GB/s that NCCL assumes for an NVLink, by major compute capability (src/graph/topo.h)."""
_SPEEDS: Final = (
    (10, (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0)),
    (9, (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0)),
    (7, (40.0, 30.0, 20.0, 18.0, 15.0, 12.0)),
)
"""GB/s that NCCL tries for a channel, by major compute capability (src/graph/search.cc)."""


class Communicator(NamedTuple):
    """A process group that communicates on the GPU."""

    group: str
    ranks: int
    near: int
    """Ranks in one NVLink domain."""
    peers: int = 0
    """Ranks that each rank sends messages to: neighbours in a pipeline or ring, all others in an all-to-all."""
    collectives: bool = True


class Estimate(NamedTuple):
    """Bytes of all communicators of a rank."""

    least: int
    """With rings only, and NCCL before 2.26."""
    bytes: int
    """With rings and trees."""
    most: int
    """With NVLS as well."""


def communicator_bytes(job: TrainingJob, *, training: bool = True) -> Estimate:
    """The buffers of the communicators of a rank between two others of its pipeline. `training`: also those of a training step."""
    cache: dict[bool, Estimate] = job.__dict__.setdefault("_communicator_bytes", {})
    if training not in cache:
        found = [bytes_of(each, job.hardware, job.nccl) for each in communicators(job, training=training)]
        cache[training] = Estimate(*(sum(each[place] for each in found) for place in range(3)))
    return cache[training]


def communicators(job: TrainingJob, *, training: bool = True) -> tuple[Communicator, ...]:
    """The groups of a rank that communicate: those of a forward and, if `training`, those of a training step.

    A training step reduces its success, the gradient norm and the losses over groups of any size, also of one rank
    (megatron/training/training.py, core 0.16.1).
    """
    parallel, moe = job.parallel, job.model.moe
    domain = domain_size(parallel, job.hardware.nvlink_domain)

    def of(group: str, *, peers: int = 0, collectives: bool = True) -> Communicator:
        ranks = ranks_in_group(job, group)
        near = min(ranks, ranks_near(parallel, group.removeprefix("intra_"), domain))
        return Communicator(group, ranks, near, min(peers, ranks - 1), collectives)

    found = [of("world")] if training or parallel.world_size > 1 else []
    if training:
        groups = ["mp", "dp_cp", gradient_statistics_group(job), gradient_statistics_group(job, experts=moe is not None)]
        found += [of(group) for group in dict.fromkeys(groups) if group != "world"]
    if parallel.tensor > 1:
        found.append(of("tp"))
    if parallel.pipeline > 1:
        logged = training and moe is not None and any(each in AUXILIARY_LOSSES for each in moe.load_balancing)
        unbatched = parallel.overlap_p2p and parallel.chunks > 1
        found += _with_pairs(of("pp", peers=2, collectives=logged), unbatched=unbatched)
        if training and job.model.tied_embeddings:
            found.append(Communicator("embd", 2, 2 if of("pp").near == parallel.pipeline else 1))
    if parallel.context > 1:
        everyone = parallel.context - 1 if "a2a" in parallel.cp_comm_type else 2
        gathers = parallel.cp_comm_type == "all_gather"
        unbatched = parallel.cp_comm_type == "p2p" and parallel.context > 2
        found += _with_pairs(of("cp", peers=0 if gathers else everyone, collectives=gathers), unbatched=unbatched)
    if training and parallel.distributed_optimizer_instances > 1:
        found.append(Communicator("inter_dist_opt", parallel.distributed_optimizer_instances, 1))
    if moe is not None:
        found += [each for each in _of_experts(job, of("ep", peers=parallel.expert), of("tp_ep"), of("etp")) if each.ranks > 1]
        found += [each for each in (of("edp"), of("tp_cp")) if training and each.ranks > 1]
    return tuple(found)


def _with_pairs(group: Communicator, *, unbatched: bool) -> list[Communicator]:
    """The group; with single messages (`isend`, `irecv`) PyTorch creates a communicator of two ranks for each of two neighbours.

    Interleaved schedules with overlapping messages have these, and rings of more than two context-parallel ranks (Transformer
    Engine, `flash_attn_p2p_communicate`). The group itself then has collectives only.
    """
    if not unbatched:
        return [group]
    pair = Communicator(f"{group.group} pair", 2, min(2, group.near), peers=1, collectives=False)
    return [pair, pair, *([group._replace(peers=0)] if group.collectives else [])]


def _of_experts(job: TrainingJob, ep: Communicator, tp_ep: Communicator, etp: Communicator) -> list[Communicator]:
    """Those of the dispatcher: the all-to-all exchanges tokens, and its groups gather the numbers of tokens of the experts."""
    moe = job.model.moe
    assert moe is not None, "the model has experts"
    if moe.dispatcher == "alltoall":
        return [ep._replace(collectives=False), tp_ep, etp]
    return [tp_ep]


def received_bytes(nccl: NcclSpec) -> int:
    """What a connection allocates for what it receives: a buffer of each protocol."""
    return round_up(nccl.buffer_bytes + LL128 + LL, PAGE)


def connection_bytes(nccl: NcclSpec) -> int:
    """A connection in both directions, of one channel."""
    return received_bytes(nccl) + PAGE


def bytes_of(each: Communicator, gpu: HardwareSpec, nccl: NcclSpec = DEFAULT_NCCL) -> Estimate:
    """The buffers of a communicator on one rank."""
    if each.ranks == 1:
        chunk = min(nccl.nvlink_chunk, nccl.buffer_bytes // BUFFER_STEPS)
        least, most = (min(channels, nccl.most_channels) * STEPS * chunk for channels in MOST_CHANNELS)
        return Estimate(least, most, most)
    return _near(each, gpu, nccl) if each.near == each.ranks else _far(each, nccl)


def _near(each: Communicator, gpu: HardwareSpec, nccl: NcclSpec) -> Estimate:
    """All ranks are in one node or rack."""
    channels = AMD_CHANNELS if gpu.is_amd else _limited(ring_channels(gpu), nccl)
    powered = power_of_two(channels)
    connection = connection_bytes(nccl)
    least = powered * _shared(nccl.nvlink_chunk if gpu.nvlinks or gpu.is_amd else nccl.network_chunk, nccl)
    least += each.peers * min(powered, peer_channels(gpu)) * connection
    trees = sharp = 0
    if each.collectives:
        least += channels * connection
        trees = channels * connection if nccl.trees and each.ranks > 2 else 0
        sharp = sharp_channels(gpu) * NVLS_BUFFER * min(each.ranks, 32) if nccl.sharp else 0
    return Estimate(least, least if gpu.is_amd else least + trees, least + trees + sharp)


def _far(each: Communicator, nccl: NcclSpec) -> Estimate:
    """Ranks are in several nodes or racks. The other GPUs of the node forward messages, each through a buffer of its own (PXN)."""
    channels = _limited(min(NETWORK_CHANNELS, 4 * each.near), nccl)
    shared = channels * _shared(nccl.network_chunk, nccl)
    per_peer = NETWORK_PEER_CHANNELS
    while per_peer > 1 and per_peer * ceil_div(each.ranks, 8) > channels:
        per_peer //= 2
    least = shared + min(each.peers, each.near - 1) * per_peer * connection_bytes(nccl)
    forwarded = (min(each.near, 8) - 1) * shared if nccl.forwards else 0
    trees = 0
    if each.collectives:
        # with GPUDirect the network reads and writes buffers of Simple and LL128 at both ends
        network = 2 * round_up(nccl.buffer_bytes + LL128, PAGE)
        rings = channels * (network if each.near == 1 else connection_bytes(nccl))
        least += rings
        trees = rings if nccl.trees and each.ranks > 2 else 0
    return Estimate(least, least + trees + forwarded, least + trees + forwarded)


def _shared(chunk: int, nccl: NcclSpec) -> int:
    """The buffer for messages through the network, for each channel. A chunk is at most a step of a connection."""
    return STEPS * min(chunk, nccl.buffer_bytes // BUFFER_STEPS)


def _limited(channels: int, nccl: NcclSpec) -> int:
    return max(min(channels, nccl.most_channels), min(nccl.fewest_channels, MOST_CHANNELS[1]))


@lru_cache
def ring_channels(gpu: HardwareSpec) -> int:
    """Channels of the rings of a node: `ncclTopoCompute` and `ncclTopoDupChannels` (src/graph/search.cc), and connect.cc.

    The fastest channels that together use most of the bandwidth, twice as many if they are fast, and each of them twice.
    """
    if not gpu.nvlinks:
        return PCIE_CHANNELS
    major = (gpu.compute_capability or (9, 0))[0]
    link = next(value for least, value in _LINK_GB if major >= least or least == 7)
    speeds = next(values for least, values in _SPEEDS if major >= least or least == 7)
    total = gpu.nvlinks * link
    speed = max(speeds, key=lambda each: (total // each * each, each))
    channels = int(total // speed)
    if speed >= 25 and not (major >= 9 and speed < 50 and channels > 4):
        channels *= 2
    return 2 * channels


def peer_channels(gpu: HardwareSpec) -> int:
    """Channels of the messages to a rank of the same node: two for each NVLink, rounded up to a power of two."""
    if gpu.is_amd:
        return AMD_CHANNELS
    return power_of_two(2 * max(1, gpu.nvlinks))


def sharp_channels(gpu: HardwareSpec) -> int:
    """Channels of NVLS (src/transport/nvls.cc); 0 without NVSwitch, which bridges of two GPUs have not."""
    major = (gpu.compute_capability or (9, 0))[0]
    if gpu.is_amd or not gpu.nvlinks or gpu.nvlink_domain < 4 or major < 9:
        return 0
    return 24 if major >= 10 else 16
