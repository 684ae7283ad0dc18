"""Layouts of a search as overrides: read again, they give the layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.frameworks.overrides import command, overrides
from analyzer.report.console.search_section import continued
from tests.frameworks import test_bridge, test_nemo_rl
from tests.frameworks.files import job, layout, write

pytest.importorskip("omegaconf")

CHANGES = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": None,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize("framework", ["bridge", "nemo_rl"])
def test_overrides_give_the_layout(tmp_path: Path, framework: str) -> None:
    content = test_bridge.CONFIG if framework == "bridge" else test_nemo_rl.BASE
    write(tmp_path, {"config.yaml": content})
    given = overrides(framework, CHANGES)
    assert given is not None
    found = job(tmp_path, "config.yaml", *given, "--info-world-size", "16")
    assert layout(found)[:3] == (16, 4, 2)
    assert found.parallel.virtual_pipeline is None
    assert (found.recompute.granularity, found.recompute.method, found.recompute.num_layers) == ("full", "uniform", 1)


def test_overrides_of_verl_are_settings_of_its_engine() -> None:
    assert overrides("verl", {"context_parallel_size": 2, "recompute_granularity": None}) == [
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=null",
    ]


def test_overrides_are_printed_whole() -> None:
    """A line ends between overrides, and not within one."""
    text = "a.yaml model.tensor_model_parallel_size=2 train.micro_batch_size=4 model.sequence_parallel=true"
    lines = continued(text, 70).split(" \\\n")
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= 70


def test_a_command_has_the_words_of_the_launch() -> None:
    words = ["a.yaml", "train.train_iters=5", "--info-gpu", "H100-80GB", "--info-search"]
    assert command("bridge", words, {"micro_batch_size": 2}) == "a.yaml train.train_iters=5 train.micro_batch_size=2"


def test_a_number_of_tokens_is_no_micro_batch_size() -> None:
    assert overrides("nemo_rl", {"micro_batch_size": 2}) is None
    assert overrides("ms_swift", {"tensor_model_parallel_size": 2}) is None
