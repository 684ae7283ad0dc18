"""The flex dispatcher with DeepEP: tokens that arrive, its buffers, and the groups that it knows."""

from __future__ import annotations

from itertools import combinations

import pytest

from analyzer.device import outside_allocator_bytes
from analyzer.errors import InputError
from analyzer.memory import rank_classes
from analyzer.modules.dispatch import Routing
from analyzer.modules.flex import arrivals, deepep_buffer_bytes
from analyzer.modules.shapes import Shapes
from analyzer.units import MIB
from tests.launch_of import launch_of

MIXTURE = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --global-batch-size 64"
FLEX = f"{MIXTURE} --moe-token-dispatcher-type flex --moe-enable-deepep --moe-router-dtype fp32 --expert-model-parallel-size"
S = 2048


def routing(ranks: int, more: str = "") -> Routing:
    return Routing(Shapes(launch_of(f"{FLEX} {ranks} {more}", gpus=max(8, ranks))))


@pytest.mark.parametrize(("ranks", "topk"), [(2, 2), (4, 2), (4, 3), (8, 2), (8, 4)])
def test_a_token_arrives_once_on_each_rank_that_has_one_of_its_experts(ranks: int, topk: int) -> None:
    """Counted over all choices of k of 8 experts, of which the rank has the first 8/ep."""
    choices = list(combinations(range(8), topk))
    here = 8 // ranks
    hit = sum(min(choice) < here for choice in choices)
    expected = S * ranks * hit / len(choices)
    assert arrivals(routing(ranks, f"--moe-router-topk {topk}")) == pytest.approx(expected, abs=1)


def test_buffers_in_a_node() -> None:
    """csrc/config.hpp get_nvl_buffer_size_hint: 10 channels, 8 peers, 256 rows each of h in 16 bit, source, choices, scales."""
    launch = launch_of(f"{FLEX} 8")
    row = 2 * 1024 + 8 + 128 * 8 + 128 * 4 + 128 * 4
    bytes_ = 10 * 8 * ((2 * 1 + 3) * 4 + 256 * row)
    assert deepep_buffer_bytes(launch) == -(-bytes_ // 128) * 128
    plain = launch_of(f"{MIXTURE} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8")
    assert outside_allocator_bytes(launch) - outside_allocator_bytes(plain) == deepep_buffer_bytes(launch)


def test_buffers_over_a_network_come_in_large_pieces() -> None:
    launch = launch_of(f"{FLEX} 16 --num-experts 16", gpus=16)
    near = 10 * 8 * ((2 * 2 + 3) * 4 + 288 * (2 * 1024 + 8 + 2048))
    assert deepep_buffer_bytes(launch) == -(-near // 128) * 128 + 512 * MIB


def test_fewer_rows_travel_than_with_all_to_all() -> None:
    """Messages of tokens are A rows in the place of k·T, in the group of all ranks that share experts."""
    tree = rank_classes(launch_of(f"{FLEX} 4 --moe-router-topk 4"))[0].trees[0]
    [sent] = {
        call.shape[0]
        for _, module in tree.walk()
        if module.name == "combine"
        for call in module.collectives
        if call.group == "tp_ep"
    }
    assert sent == arrivals(routing(4, "--moe-router-topk 4"))
    assert S < sent < 4 * S


@pytest.mark.parametrize(
    ("line", "option", "remedy"),
    [
        (f"{FLEX} 1", "--moe-token-dispatcher-type flex", "2, 4, 8"),
        (f"{FLEX} 2 --moe-deepep-num-sms 7", "--moe-deepep-num-sms", "even"),
        (f"{FLEX} 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input", "alltoall"),
        (f"{FLEX} 2 --moe-flex-dispatcher-backend hybridep", "--moe-flex-dispatcher-backend hybridep", "deepep"),
    ],
)
def test_what_is_refused(line: str, option: str, remedy: str) -> None:
    with pytest.raises(InputError) as refused:
        launch_of(line)
    assert option in str(refused.value)
    assert remedy in str(refused.value)
