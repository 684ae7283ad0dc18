"""Groups in which collectives are measured, and a run of two processes without a GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

from allocator_hook.calibrate.collectives import Layout, Peers, Ring, layout_of, rings, started_by_torchrun
from allocator_hook.calibrate.items import Transfer

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


def test_only_variables_of_torchrun_mean_several_processes() -> None:
    assert started_by_torchrun(TORCHRUN)
    assert not started_by_torchrun({**TORCHRUN, "WORLD_SIZE": "1"})
    assert not started_by_torchrun({"WORLD_SIZE": "16", "RANK": "0"})
    assert not started_by_torchrun({**TORCHRUN, "WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    ("nvlink_domain", "layout"), [(8, Layout(16, 8, 2)), (2, Layout(16, 2, 2)), (1, Layout(16, 1, 2)), (72, Layout(16, 16, 2))]
)
def test_a_rack_connects_nodes_and_a_bridge_divides_them(nvlink_domain: int, layout: Layout) -> None:
    assert layout_of(TORCHRUN, nvlink_domain) == layout


def test_groups_are_inside_a_domain_across_domains_and_of_all_ranks() -> None:
    inside, pairs, across, everyone = rings(Layout(8, 4, 2))
    assert inside == Ring(4, 4, ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert pairs == Ring(2, 2, ((0, 1), (2, 3), (4, 5), (6, 7)))
    assert across == Ring(2, 1, ((0, 4), (1, 5), (2, 6), (3, 7)))
    assert everyone == Ring(8, 4, (tuple(range(8)),))
    assert rings(Layout(2, 2, 1)) == [Ring(2, 2, ((0, 1),))]
    assert rings(Layout(4, 1, 4)) == [Ring(4, 1, ((0, 1, 2, 3),))]
    assert [ring.near for ring in rings(Layout(4, 2, 1))] == [2], "one node does not show the network"
    assert rings(Layout(6, 4, 2)) == []
    for layout in (Layout(8, 4, 2), Layout(16, 8, 2), Layout(12, 6, 2)):
        for ring in rings(layout):
            assert sorted(rank for members in ring.members for rank in members) == list(range(layout.world))
            assert {len(members) for members in ring.members} == {ring.ranks}


PROCESS = """
    import sys
    from functools import partial
    from pathlib import Path
    from allocator_hook.calibrate import collectives, session
    from analyzer.cli import calibrate
    from tests.allocator_hook.calibrate.known_machine import KnownRunner

    collectives.PAYLOADS = (4096, 65536, 1048576)
    session.TorchRunner = KnownRunner
    session.Peers = partial(collectives.Peers, device="cpu", backend="gloo")
    session.gpu_name = lambda environ: "NVIDIA H100 80GB HBM3"
    calibrate.require_gpu = lambda: None
    from get_training_info import main
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_measure_their_collectives(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    launch = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        f"--micro-batch-size 1 --train-iters 1 --lr 1e-4 --bf16 --vocab-size 999 --info-gpu H100-80GB --info-calibrate {path}"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), *launch.split()],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert "nvlink" in outputs[0][0]
    assert outputs[1][0] == "", "rank 1 prints nothing"
    content = json.loads(path.read_text())
    assert content["gpus"] == 2
    assert {"nvlink", "expert_nvlink"} <= content["efficiencies"].keys()
    assert "network" not in content["efficiencies"]
    kinds = {row["shape"]["kind"] for row in content["measured"] if "payload" in row["shape"]}
    assert {"all_gather", "all_reduce", "all_to_all", "send"} <= kinds
    assert any("one NVLink domain" in sentence for sentence in content["not_measured"])


class FakePeers(Peers):
    """Rank 0 of two ranks. Collectives of `broken` kinds fail on the other rank; each takes a second."""

    def __init__(self, *, broken: tuple[str, ...] = ()) -> None:
        self.device, self.rank, self.layout = "cpu", 0, Layout(2, 2, 1)
        self._groups = dict.fromkeys(rings(self.layout))
        self._broken, self._passed = broken, 0.0
        self.tried: list[Transfer] = []

    def worst(self, *values: float) -> tuple[float, ...]:
        """With the second rank."""
        if len(values) == 1:
            return values
        seconds, failed, _ = values
        self._passed += 1
        return seconds, max(failed, float(self.tried[-1].kind in self._broken)), self._passed

    def _attempt(self, group: object, transfer: Transfer) -> tuple[float, str]:
        assert group is None
        self.tried.append(transfer)
        return 1e-3, ""


def silent(_done: int, _total: int, _what: str) -> None:
    """Shows no progress."""


def test_a_collective_that_fails_on_another_rank_is_not_tried_again() -> None:
    peers = FakePeers(broken=("all_to_all",))
    found = peers.measure(budget=1e9, show=silent)
    assert [each.kind for each in peers.tried].count("all_to_all") == 1
    assert [each.kind for each in peers.tried].count("all_gather") > 1
    assert all(isinstance(each.item, Transfer) and each.item.kind != "all_to_all" for each in found.done)
    assert found.sentences() == ["all_to_all between 2 GPUs: it failed on another rank"]


def test_collectives_end_with_their_budget_and_payloads_fit_the_memory() -> None:
    peers = FakePeers()
    found = peers.measure(budget=3, show=silent)
    assert len(found.done) == len(peers.tried) == 4
    assert "the time of 3 s was over" in found.sentences()[-1]
    assert all(each.payload <= 0.2 * 2**30 for each in peers.tried), "1 GiB is free"
