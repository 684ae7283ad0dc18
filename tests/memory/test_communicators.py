"""The buffers of NCCL communicators, compared with memory that users of NCCL measured and with the channels in its logs."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.api import analyze
from analyzer.hardware.gpus import find
from analyzer.launch.nccl import nccl_spec
from analyzer.layout.groups import DENSE_GROUPS, EXPERT_GROUPS, group_of
from analyzer.layout.job_groups import ranks_near
from analyzer.memory.communicators import (
    PAGE,
    Communicator,
    bytes_of,
    communicator_bytes,
    communicators,
    peer_channels,
    received_bytes,
    ring_channels,
)
from analyzer.specs import HardwareSpec
from analyzer.specs.software import NcclSpec
from analyzer.units import GIB, MIB
from tests.job_of import job_of
from tests.parallel_spec import spec

MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--disable-bias-linear "
)
LAYOUTS = (
    "--global-batch-size 16",
    "--global-batch-size 16 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    "--global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "--global-batch-size 16 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --use-distributed-optimizer",
    "--global-batch-size 16 --context-parallel-size 2 --use-distributed-optimizer",
    "--global-batch-size 16 --context-parallel-size 4",
    "--global-batch-size 16 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    MOE + "--global-batch-size 16 --expert-model-parallel-size 8 --use-distributed-optimizer",
    MOE + "--global-batch-size 16 --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    MOE + "--global-batch-size 16 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer",
)


def gpu(name: str) -> HardwareSpec:
    return find(name)[0].spec


@pytest.mark.parametrize(
    ("name", "channels", "peers"),
    [
        ("H100-80GB", 24, 64),  # NVIDIA/nccl issue 1259: channels 00 to 23
        ("H800-80GB", 16, 16),  # issue 892: "16 coll channels, 0 nvls channels, 16 p2p channels, 16 p2p channels per peer"
        ("V100-32GB", 12, 16),  # issue 713: 6 channels in the graph, which NCCL doubles
    ],
)
def test_channels_are_those_of_the_logs(name: str, channels: int, peers: int) -> None:
    assert (ring_channels(gpu(name)), peer_channels(gpu(name))) == (channels, peers)


def test_group_of_a100_has_what_was_measured() -> None:
    """NVIDIA/nccl issue 964: 544 MB for groups of two, 688 MB for larger ones on their first rank, an end of the trees."""
    assert bytes_of(Communicator("tp", 2, 2), gpu("A100-80GB")).bytes == 544 * MIB
    four = bytes_of(Communicator("tp", 4, 4), gpu("A100-80GB"))
    assert four.least < 688 * MIB < four.bytes


def test_connections_of_an_all_to_all_are_those_that_were_measured() -> None:
    """NVIDIA/nccl issue 1685, 8 H100: allocations of 10485760 and 2097152 bytes, and 3.28 GB more after the first all-to-all."""
    assert (received_bytes(NcclSpec()), PAGE) == (10485760, 2097152)
    found = bytes_of(Communicator("ep", 8, 8, peers=7, collectives=False), gpu("H100-80GB"))
    assert found.bytes == pytest.approx(3.28e9, rel=0.1)


def test_group_of_one_rank_has_what_was_measured() -> None:
    """NVIDIA/nccl issue 2363, B300 with NCCL 2.28.9: 536870912 bytes."""
    assert bytes_of(Communicator("dp", 1, 1), gpu("B300-288GB")).bytes == 536870912


def test_communicator_of_amd_has_what_was_measured() -> None:
    """Lumi-supercomputer/LUMI-AI-Guide issue 111, MI250X: 0.65 GiB for each further communicator."""
    assert bytes_of(Communicator("tp", 8, 8), gpu("MI250X-64GB")).bytes == pytest.approx(0.65 * GIB, rel=0.05)


@pytest.mark.parametrize(
    ("environ", "spec_"),
    [
        ({}, NcclSpec()),
        ({"NCCL_NVLS_ENABLE": "0"}, NcclSpec(sharp=False)),
        ({"NCCL_ALGO": "Ring"}, NcclSpec(trees=False, sharp=False)),
        ({"NCCL_ALGO": "^NVLS,NVLSTree"}, NcclSpec(sharp=False)),
        ({"NCCL_ALGO": "allreduce:tree;allgather:ring"}, NcclSpec()),
        ({"NCCL_BUFFSIZE": "2097152", "NCCL_MAX_NCHANNELS": "8"}, NcclSpec(buffer_bytes=2 * MIB, most_channels=8)),
        ({"NCCL_BUFFSIZE": "4M", "NCCL_MAX_NCHANNELS": "-1", "NCCL_MIN_CTAS": ""}, NcclSpec()),
        ({"NCCL_MIN_CTAS": "32", "NCCL_MIN_NCHANNELS": "16"}, NcclSpec(fewest_channels=32)),
        ({"NCCL_P2P_NET_CHUNKSIZE": "524288", "NCCL_PXN_DISABLE": "1"}, NcclSpec(network_chunk=512 * 1024, forwards=False)),
    ],
)
def test_settings_in_the_environment_are_read(environ: dict[str, str], spec_: NcclSpec) -> None:
    assert nccl_spec(environ) == spec_


def test_settings_change_the_buffers() -> None:
    """A connection has 4 MiB less with half of the buffer, and each of 8 channels has one; a step of 256 KiB is an eighth of it."""
    eight, small = Communicator("tp", 8, 8), NcclSpec(buffer_bytes=2 * MIB, most_channels=8)
    found = bytes_of(eight, gpu("H100-80GB"), small)
    assert found.least == 8 * (8 + 2) * MIB + 8 * 16 * 256 * 1024
    assert bytes_of(eight, gpu("H100-80GB"), NcclSpec(trees=False)).bytes == bytes_of(eight, gpu("H100-80GB")).least
    assert bytes_of(eight, gpu("H100-80GB"), NcclSpec(sharp=False)).most == bytes_of(eight, gpu("H100-80GB")).bytes
    far = Communicator("world", 64, 8)
    assert bytes_of(far, gpu("H100-80GB")).bytes - bytes_of(far, gpu("H100-80GB"), NcclSpec(forwards=False)).bytes == 7 * 32 * MIB


def test_groups_of_8_h100_need_no_more_than_what_was_freed() -> None:
    """verl-project/verl pull request 6408: TP2, PP2, DP2 on 8 H100. Suspending the communicators of Megatron freed about 7 GB.

    verl has further groups, and NCCL keeps NVLS buffers.
    """
    line = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    found = communicator_bytes(job_of(f"{line} --global-batch-size 16 --untie-embeddings-and-output-weights"))
    assert 7e9 / 2 < found.least < found.bytes < 7e9


def test_groups_across_nodes_need_less_than_those_of_a_node() -> None:
    """Messages through the network have few channels: an all-to-all of 16 ranks has those of 4 channels to 7 ranks of its node."""
    found = bytes_of(Communicator("ep", 16, 8, peers=15, collectives=False), gpu("H100-80GB"))
    assert found.least == 16 * 16 * 128 * 1024 + 7 * 4 * 12 * MIB
    assert found.bytes < bytes_of(Communicator("ep", 8, 8, peers=7, collectives=False), gpu("H100-80GB")).bytes


@pytest.mark.parametrize("line", LAYOUTS)
def test_every_group_of_the_communication_has_a_communicator(line: str) -> None:
    words = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    words += "--micro-batch-size 1 --bf16 --vocab-size 32000 --info-world-size 8 "
    report = analyze((words + line).split(), environ={})
    used = {row.group.removeprefix("intra_") for row in report.communication}
    assert used
    assert used <= {each.group.removeprefix("intra_").removesuffix(" pair") for each in communicators(report.job)}


sizes = st.sampled_from([1, 2, 4])


@given(sizes, sizes, sizes, sizes, sizes, st.sampled_from([2, 4, 8, 64]), st.sampled_from([*DENSE_GROUPS, *EXPERT_GROUPS]))
def test_near_ranks_are_those_of_the_first_domain(
    tensor: int, pipeline: int, context: int, expert: int, data: int, domain: int, group: str
) -> None:
    parallel = spec(
        prod((tensor, pipeline, context, expert, data)),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=1,
    )
    assert ranks_near(parallel, group, domain) == sum(rank < domain for rank in group_of(parallel, group, 0))
