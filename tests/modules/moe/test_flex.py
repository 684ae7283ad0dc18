"""The flex dispatcher: arriving tokens, the buffers of DeepEP and HybridEP, and the supported groups."""

from __future__ import annotations

from itertools import combinations

import pytest

from analyzer.errors import InputError, UnsupportedError
from analyzer.hardware.gpus import find
from analyzer.memory.communicators import communicator_bytes, communicators
from analyzer.memory.device_overhead import CONTEXT, outside_allocator_bytes
from analyzer.memory.ranks import rank_classes
from analyzer.modules.moe.dispatchers import flex_buffer_bytes
from analyzer.modules.moe.flex import arrivals
from analyzer.modules.moe.routing import Routing
from analyzer.modules.shapes import shapes_of
from analyzer.units import BLOCK, MIB, round_up
from tests.job_of import job_of

MOE = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --global-batch-size 64"
FLEX = f"{MOE} --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32 --expert-model-parallel-size"
HYBRID = f"{MOE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-dtype fp32 "
HYBRID += "--expert-model-parallel-size"
S = 2048


def routing(ranks: int, more: str = "") -> Routing:
    return Routing(shapes_of(job_of(f"{FLEX} {ranks} {more}", gpus=max(8, ranks))))


@pytest.mark.parametrize(("ranks", "topk"), [(2, 2), (4, 2), (4, 3), (8, 2), (8, 4)])
def test_a_token_arrives_once_on_each_rank_that_has_one_of_its_experts(ranks: int, topk: int) -> None:
    """Counted over all choices of k of 8 experts. The rank has the first 8/ep experts."""
    choices = list(combinations(range(8), topk))
    local = 8 // ranks
    hit = sum(min(choice) < local for choice in choices)
    expected = S * ranks * hit / len(choices)
    assert arrivals(routing(ranks, f"--moe-router-topk {topk}")) == pytest.approx(expected, abs=1)


def test_deepep_buffers_within_a_node() -> None:
    """csrc/config.hpp get_nvl_buffer_size_hint: 10 channels, 8 peers, 256 rows of h in 16 bit and metadata."""
    job = job_of(f"{FLEX} 8")
    row = 2 * 1024 + 8 + 128 * 8 + 128 * 4 + 128 * 4
    bytes_ = 10 * 8 * ((2 * 1 + 3) * 4 + 256 * row)
    assert flex_buffer_bytes(shapes_of(job)) == -(-bytes_ // 128) * 128
    assert outside_allocator_bytes(job) == CONTEXT + communicator_bytes(job).bytes + flex_buffer_bytes(shapes_of(job))
    assert "ep" not in {each.group for each in communicators(job)}


def test_deepep_network_buffers_are_rounded_up_to_512_mib() -> None:
    job = job_of(f"{FLEX} 16 --num-experts 16", gpus=16)
    near = 10 * 8 * ((2 * 2 + 3) * 4 + 288 * (2 * 1024 + 8 + 2048))
    assert flex_buffer_bytes(shapes_of(job)) == -(-near // 128) * 128 + 512 * MIB


def test_deepep_saves_arrivals_once_and_indices_for_each_row() -> None:
    """fused_a2a.py `FusedDispatch` and token_dispatcher.py `_DeepepManager` (0.16.1). A tokens arrive for R rows of El experts.

    The dispatcher references the choices, int64 and fp32 [T, k] (`setup_metadata`), the indices that arrive, int64 [A, k], and bool
    and fp32 [A, El] (`_indices_to_multihot`). Saved are the fp32 input [T, E] of `topk`, the handle of `buffer.dispatch`, bool and
    int32 [T, P] and int32 [A], the mask of `probs[mask]`, [A, k], the indices of its assignment, two int64 [R], and in `permute`
    int64 [R], the transposed fp32 and bool [El, A] of `masked_select`, and its result, fp32 [R].
    """
    tree = rank_classes(job_of(f"{FLEX} 4"))[0].trees[0]
    [dispatch] = {module for _, module in tree.walk() if module.name == "dispatch"}
    a, k, experts, local, ranks, rows = arrivals(routing(4)), 2, 8, 2, 4, 2 * S
    of_tokens = (4 * S * experts, S * ranks, 4 * S * ranks)
    of_arrivals = (4 * a, a * k, a * local, 4 * a * local)
    of_rows = (2 * 8 * rows, 8 * rows, 4 * rows)
    saved = (*of_tokens, *of_arrivals, *of_rows)
    assert sum(tensor.bytes for tensor in dispatch.saved) == sum(round_up(each, BLOCK) for each in saved)
    referenced = (8 * S * k, 4 * S * k, 8 * a * k, a * local, 4 * a * local)
    assert sum(tensor.bytes for tensor in dispatch.referenced) == sum(round_up(each, BLOCK) for each in referenced)


def test_hybridep_buffers_have_space_for_all_tokens_of_the_group() -> None:
    """buffer/intranode.cu: 8 ranks × 2048 tokens, each h in 16 bit, a scale for 128 values, and weights of 8 experts in fp32."""
    assert flex_buffer_bytes(shapes_of(job_of(f"{HYBRID} 8"))) == 8 * 2048 * (2 * 1024 + 4 * 1024 // 128 + 4 * 8)


def test_hybridep_buffers_between_nvlink_domains() -> None:
    """buffer/internode.cu: tokens of a rank with the weights of all experts; tokens of the other domain; sums, twice."""
    job = job_of(f"{HYBRID} 8", environ={"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "4"})
    values, scales, weights = 2 * 1024, 4 * 1024 // 128, 4 * 4
    near = 8 * S * (values + scales + weights)
    far = S * (values + scales + 2 * weights) + S * (values + scales + weights) + 2 * S * (values + weights)
    assert flex_buffer_bytes(shapes_of(job)) == near + far


def test_hybridep_sends_the_weights_of_all_experts_of_the_domain_with_each_token() -> None:
    """hybrid_ep_backend.cuh: NUM_OF_EXPERTS_PER_RANK * NUM_OF_RANKS_PER_NODE floats, also of experts that were not chosen."""

    def weights(environ: dict[str, str]) -> set[tuple[int, ...]]:
        tree = rank_classes(job_of(f"{HYBRID} 8", environ=environ))[0].trees[0]
        calls = [call for _, module in tree.walk() for call in module.collectives if module.name in ("dispatch", "combine")]
        return {call.shape for call in calls if call.kind == "all_to_all" and call.dtype == "fp32"}

    assert weights({}) == {(arrivals(routing(8)), 8)}
    assert weights({"NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "4"}) == {(arrivals(routing(8)), 4)}


@pytest.mark.parametrize(("ranks", "experts", "gpu", "domain"), [
    (16, 16, "GB200", 16), (64, 64, "GB300", 64), (72, 72, "GB200", 72), (128, 128, "GB200", 64), (64, 64, "B200", 8),
])  # fmt: skip
def test_hybridep_finds_the_ranks_that_nvlink_connects(ranks: int, experts: int, gpu: str, domain: int) -> None:
    """`detect_accessible_ranks` (csrc/hybrid_ep/allocator/allocator.cu): those of a node, or of a rack."""
    line = f"{HYBRID} {ranks} --num-experts {experts} --global-batch-size {ranks * 2}"
    job = job_of(line, gpus=ranks, gpu=find(gpu)[0].spec)
    assert Routing(shapes_of(job)).flex.nvlink_ranks == domain


def test_hybridep_buffers_have_space_for_at_least_512_tokens() -> None:
    few, many = (job_of(f"{HYBRID} 4 --seq-length {length}") for length in (128, 512))
    assert flex_buffer_bytes(shapes_of(few)) == flex_buffer_bytes(shapes_of(many))


def test_hybridep_saves_maps_of_the_group_and_no_arrived_tokens() -> None:
    """`metadata_preprocess_core` and `permute_processing`: 4·T·P + T·P/N + T·P·El + 4·T·P·El bytes, and rows of probabilities."""
    tree = rank_classes(job_of(f"{HYBRID} 4"))[0].trees[0]
    [dispatch] = {module for _, module in tree.walk() if module.name == "dispatch"}
    world, local, rows = 4 * S, 2, 2 * S
    assert sum(tensor.bytes for tensor in dispatch.saved) == 4 * world + S + world * local + 4 * world * local + 4 * rows
    assert all("arriv" not in tensor.name for tensor in (*dispatch.saved, *dispatch.forward_workspace))


def test_hybridep_pads_rows_for_fp8_on_arrival() -> None:
    """`pad_multiple`: half of 16 rows for each of two local experts, and no copy by the experts."""
    fp8 = Routing(shapes_of(job_of(f"{HYBRID} 4 --fp8-format hybrid")))
    assert fp8.rows == fp8.multiplied_rows == 2 * S + 2 * 16 // 2


def test_fewer_rows_are_sent_than_with_all_to_all() -> None:
    """Messages have A rows instead of k·T, in the group of all ranks that share experts."""
    tree = rank_classes(job_of(f"{FLEX} 4 --moe-router-topk 4"))[0].trees[0]
    [sent] = {
        call.shape[0]
        for _, module in tree.walk()
        if module.name == "combine"
        for call in module.collectives
        if call.group == "tp_ep"
    }
    assert sent == arrivals(routing(4, "--moe-router-topk 4"))
    assert S < sent < 4 * S


def test_hybridep_accepts_the_hidden_size_of_gpt_oss() -> None:
    """`BufferConfig::is_valid` of HybridEP: rows of bf16 need a multiple of 16."""
    job = job_of(f"{HYBRID} 2 --hidden-size 2880 --num-attention-heads 64 --kv-channels 64")
    assert job.model.moe is not None
    assert job.model.moe.flex is not None
    assert job.model.moe.flex.backend == "hybridep"


EQUALIZED = "--moe-hybridep-pad-uneven-dispatch-inputs"


def test_ranks_of_hybridep_agree_on_the_largest_number_of_their_tokens() -> None:
    """`_HybridEPManager.setup_metadata`: an all-reduce of one number before each exchange. 2048 tokens are not padded."""
    tree = rank_classes(job_of(f"{HYBRID} 8 {EQUALIZED}", release="0.19.0"))[0].trees[0]
    dispatch = next(module for _, module in tree.walk() if module.name == "dispatch")
    first = dispatch.collectives[0]
    assert (first.kind, first.group, first.shape, first.message_bytes, first.phase) == ("all_reduce", "tp_ep", (1,), 8, "forward")
    assert sum(call.kind == "all_reduce" for call in dispatch.collectives) == 1
    with pytest.raises(UnsupportedError, match=f"{EQUALIZED}: pads the 2,000 tokens of a rank to a multiple of 64"):
        job_of(f"{HYBRID} 8 {EQUALIZED} --seq-length 2000", release="0.19.0")


@pytest.mark.parametrize(
    ("line", "option", "remedy"),
    [
        (f"{FLEX} 1", "--moe-token-dispatcher-type flex", "2, 4, 8"),
        (f"{FLEX} 2 --moe-deepep-num-sms 7", "--moe-deepep-num-sms", "even"),
        (f"{FLEX} 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input", "alltoall"),
        (f"{HYBRID} 2 --hidden-size 1000 --num-attention-heads 8", "--moe-flex-dispatcher-backend hybridep", "--hidden-size 992"),
        (f"{HYBRID} 1", "--moe-flex-dispatcher-backend hybridep", "--expert-model-parallel-size 2"),
        (f"{HYBRID} 2 --num-experts 2", "--moe-flex-dispatcher-backend hybridep", "multiple of 4"),
        (f"{HYBRID} 2 --moe-enable-deepep", "--moe-enable-deepep", "leave it out"),
    ],
)
def test_unsupported_options_are_rejected(line: str, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as rejected:
        job_of(line)
    assert option in str(rejected.value)
    assert remedy in str(rejected.value)
