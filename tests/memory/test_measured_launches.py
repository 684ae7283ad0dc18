"""Verdicts of launches whose iterations were measured. They ran, so none may be predicted not to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analyzer.api import read_launch
from analyzer.memory.ranks import highest_rank
from analyzer.memory.verdict import verdict
from analyzer.results import Verdict
from tests.data_files import data_file

MODELS = ("llama3-70b", "gpt3-175b", "deepseek-v3")
"""The models whose launches fill a GPU most."""
LLAMA = ("mbridge", "pretrain-llama3-70b-GB200-64-fp8-current-scaling")
GPT = ("mlperf-v4.1", "eos_n32_ngc24.09_nemo-gpt3")
LLAMA_RECIPE = "--hidden-dropout 0 --attention-dropout 0 --no-gradient-accumulation-fusion --fsdp-double-buffer"
"""Options that the records of these launches do not have: LlamaModelProvider and llama3_llm_pretrain.py of Megatron-Bridge."""
GPT_RECIPE = (
    "--hidden-dropout 0 --attention-dropout 0 --grad-reduce-in-bf16 --defer-embedding-wgrad-compute --wgrad-deferral-limit 22"
)
"""Options of NVIDIA's implementation in training_results_v4.0: custom.yaml and distributed_fused_adam.yaml. The limit of deferred
weight gradients is that of NeMo's performance recipes."""
RECIPES = {LLAMA: LLAMA_RECIPE.split(), GPT: GPT_RECIPE.split()}


def _records() -> list[dict[str, Any]]:
    """Return one record for each launch of `MODELS`."""
    records: list[dict[str, Any]] = json.loads(data_file("measured_time/iterations.json").read_text())
    chosen = [record for record in records if record["model"] in MODELS]
    return list({(*record["argv"], record["gpu"], record["nodes"]): record for record in chosen}.values())


def _is(record: dict[str, Any], parts: tuple[str, str]) -> bool:
    return all(part in record["id"] for part in parts)


def _verdict(record: dict[str, Any], folder: Path, *options: str) -> Verdict:
    world = ["--nnodes", str(record["nodes"]), "--nproc-per-node", str(record["gpus_per_node"])]
    launch = read_launch([*world, *record["argv"], *options, "--info-gpu", record["gpu"]], environ=record["env"], folder=folder)
    return verdict([highest_rank(launch.job)], launch.job.hardware)


def test_launches_that_ran_are_predicted_to_fit(tmp_path: Path) -> None:
    records = _records()
    wrong = [record for record in records if not _verdict(record, tmp_path).fits]
    assert len(records) > 50
    assert all(any(_is(record, parts) for parts in RECIPES) for record in wrong)


@pytest.mark.parametrize("parts", RECIPES)
def test_the_exceptions_fit_with_all_options_of_their_recipes(parts: tuple[str, str], tmp_path: Path) -> None:
    """Their records leave out that the recipes use no dropout. Its masks are 10 and 2.8 GiB."""
    [record] = [each for each in _records() if _is(each, parts)]
    assert not _verdict(record, tmp_path).fits
    assert _verdict(record, tmp_path, *RECIPES[parts]).fits
