"""Commands that start a recipe of Megatron-Bridge are refused with the command that writes its configuration.

Options: scripts/training/{run_recipe,setup_experiment}.py and scripts/performance/argument_parser.py of Megatron-Bridge, 2026.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from analyzer.errors import InputError
from tests.frameworks.files import read

RECIPE = "qwen3_8b_pretrain_16gpu_h100_bf16_config"
SLURM = (
    "--nodes 2 --gpus-per-node 4 --account a --partition p --time 01:00:00 --container-image nemo:26.06 --mount /data "
    "--env HF_TOKEN --srun-arg=--mpi=pmix --no-gpu-resource-request --experiment-name test --wait"
)


def commands(words: str, folder: Path) -> list[list[str]]:
    """The commands of the remedy, each as words."""
    with pytest.raises(InputError, match="builds the configuration of Megatron-Bridge in Python") as caught:
        read(folder, *shlex.split(words))
    assert "\n" not in str(caught.value)
    return [shlex.split(each) for each in caught.value.remedy.partition(": ")[2].split(" && ")]


def parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The words as `run_recipe.py` reads them: it accepts no abbreviations, and any other word has to be KEY=VALUE."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    selection = parser.add_mutually_exclusive_group(required=True)
    selection.add_argument("--model")
    selection.add_argument("--recipe")
    parser.add_argument("--mode", choices=["pretrain", "sft", "lora", "dora"])
    for flags in (("-ms", "--max_steps"), ("-mb", "--micro_batch_size"), ("-tp", "--tensor_model_parallel_size")):
        parser.add_argument(*flags, type=int)
    parser.add_argument("--dataset")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", dest="dryrun")
    known, others = parser.parse_known_args(words)
    assert not [word for word in others if word.startswith("-") or "=" not in word]
    return known, others


def test_options_of_slurm_are_left_out(tmp_path: Path) -> None:
    """`train.sh` and `setup_experiment.py` hand the other words to `run_recipe.py`, and 2 nodes of 4 GPUs are 8."""
    words = f"scripts/training/setup_experiment.py {SLURM} --recipe {RECIPE} -tp 2 --dataset mock train.train_iters=5 "
    words += "'dataset.blend=[[a b],null]'"
    dump, analysis = commands(words, tmp_path)
    assert dump[:2] == ["python", "scripts/training/run_recipe.py"]
    known, overrides = parsed(dump[2:])
    assert (known.recipe, known.tensor_model_parallel_size, known.dataset, known.dryrun) == (RECIPE, 2, "mock", True)
    file = str(tmp_path / "config.yaml")
    assert overrides == ["train.train_iters=5", "dataset.blend=[[a b],null]", f"logger.save_config_filepath={file}"]
    assert analysis == ["get-training-info", file, "--info-world-size", "8"]


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (f"--nproc_per_node 8 --nnodes=4 scripts/training/run_recipe.py --recipe {RECIPE}", "32"),
        (f"scripts/training/run_recipe.py --recipe {RECIPE} --mode pretrain", "16"),
        ("scripts/training/run_recipe.py --model gpt_oss_20b --mode sft -mb 1", "GPUS"),
    ],
)
def test_the_number_of_gpus_is_that_of_the_launcher_or_of_the_name(words: str, gpus: str, tmp_path: Path) -> None:
    dump, analysis = commands(words, tmp_path)
    assert parsed(dump[2:])[0].dryrun
    assert analysis[2:] == ["--info-world-size", gpus]


def test_scripts_for_benchmarks_have_options_of_their_own(tmp_path: Path) -> None:
    """`bootstrap.py` reads all options of `setup_experiment.py` in scripts/performance."""
    words = "scripts/performance/setup_experiment.py -m qwen3 -mr qwen3_30b_a3b -ng 16 -gn 8 -c bf16 --account a"
    dump, analysis = commands(words, tmp_path)
    file = str(tmp_path / "config.yaml")
    assert dump[:2] == ["python", "scripts/performance/bootstrap.py"]
    assert dump[2:-3] == shlex.split(words)[1:]
    assert dump[-3:] == ["--dryrun", "--save_config_filepath", file]
    assert analysis[2:] == ["--info-world-size", "16"]


def test_a_script_without_a_dry_run_calls_to_yaml(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"call config.to_yaml\('config.yaml'\) in it, or set logger.save_config_filepath"):
        read(tmp_path, "launch_with_nemo_run.py", "--recipe", RECIPE)
