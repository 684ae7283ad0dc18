"""The number of processes, from torchrun's options or the environment variables of a scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzer.errors import InputError, UnsupportedError
from analyzer.launch.launchers.world import World
from analyzer.launch.parse import parse


def world(*argv: str, **environ: str) -> World:
    found = parse(argv, environ=environ, folder=Path("/nowhere"))[1]
    assert found is not None
    return found


@pytest.mark.parametrize(
    "argv",
    [
        "--nnodes 2 --nproc-per-node 8",
        "--nnodes=2 --nproc_per_node=8 pretrain_gpt.py --num-layers 4",
        "--nproc-per 8 --nnod 2 -m pretrain_gpt",
        "--num-layers 4 --nproc_per_node 8 --bf16 --nnodes 2:2",
        "pretrain_gpt.py --num-layers 4 --nnodes 2 --nproc-per-node 8",
        "-r 3 -t3 --rdzv-conf a=1 --max-restarts 3 --nnodes 2 --nproc_per_node 8 --run-path x/pretrain_gpt.py --bf16",
        "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py",
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 8 pretrain_gpt.py",
        "--no-python --nnodes 2 --nproc-per-node 8 ./train --bf16",
    ],
)
def test_two_nodes_with_eight_gpus_each(argv: str) -> None:
    found = world(*argv.split())
    assert (found.nodes, found.gpus_per_node, found.size) == (2, 8, 16)


def test_defaults_of_torchrun_are_reported() -> None:
    found = world("--nnodes", "4")
    assert (found.nodes, found.gpus_per_node) == (4, 1)
    assert "--nproc-per-node" in found.assumptions[0]
    assert world("--standalone", "--nproc-per-node", "4").assumptions == ()


def test_the_maximum_of_an_elastic_launch_is_assumed() -> None:
    found = world("--nnodes", "1:4", "--nproc-per-node", "8")
    assert found.nodes == 4
    assert found.elastic == ("--nnodes 1:4", 1)


def test_local_rank_is_an_option_of_megatron() -> None:
    arguments, _, _ = parse(["--local-rank", "3"], environ={}, folder=Path("/nowhere"))
    assert arguments.values["local_rank"] == 3


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        ("--nnodes 0 --nproc-per-node 8", "--nnodes"),
        ("--nnodes -1 --nproc-per-node 8", "--nnodes"),
        ("--nnodes 4:1", "--nnodes"),
        ("--nnodes 2 --nproc_per_node gpu", "--nproc_per_node"),
        ("--nproc-per-node 2.5", "--nproc-per-node"),
        ("--nproc-per-node", "--nproc-per-node"),
        ("--n 8 --info-strict", "--n"),
        ("--rdzv 8", "--rdzv"),
        ("--standalone=1", "--standalone"),
    ],
)
def test_invalid_values_are_refused(argv: str, option: str) -> None:
    with pytest.raises(InputError) as error:
        world(*argv.split())
    assert error.value.option == option
    assert error.value.remedy


@pytest.mark.parametrize(
    ("environ", "shape", "named"),
    [
        ({"WORLD_SIZE": "64"}, (8, 8), "WORLD_SIZE"),
        ({"WORLD_SIZE": "12", "SLURM_NTASKS": "99"}, (3, 4), "WORLD_SIZE"),
        ({"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "6"}, (2, 6), "LOCAL_WORLD_SIZE"),
        ({"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "4"}, (4, 4), "SLURM_NTASKS"),
        ({"SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "8"}, (3, 8), "SLURM_NNODES"),
        ({"SLURM_NTASKS": "16", "SLURM_GPUS_PER_NODE": "h100:4"}, (4, 4), "SLURM_GPUS_PER_NODE"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (2, 4), "OMPI_COMM_WORLD_SIZE"),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "64"}, (2, 4), "PET_NNODES"),
    ],
)
def test_environment_variables_are_used_and_reported(environ: dict[str, str], shape: tuple[int, int], named: str) -> None:
    found = world("--bf16", **environ)
    assert (found.nodes, found.gpus_per_node) == shape
    assert named in " ".join(found.assumptions)


def test_without_options_and_variables_the_number_is_unknown() -> None:
    assert parse(["--bf16"], environ={}, folder=Path("/nowhere"))[1] is None


def test_torchrun_options_take_precedence_over_the_environment() -> None:
    found = world("--nnodes", "2", "--nproc-per-node", "4", WORLD_SIZE="64", PET_NNODES="9")
    assert (found.nodes, found.gpus_per_node, found.assumptions) == (2, 4, ())


def test_a_world_size_that_does_not_divide_into_nodes_is_refused() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE"):
        world("--bf16", WORLD_SIZE="12", LOCAL_WORLD_SIZE="8")


@given(nodes=st.integers(1, 20_000), gpus=st.integers(1, 16))
def test_any_number_of_nodes_and_gpus(nodes: int, gpus: int) -> None:
    assert world("--nnodes", str(nodes), "--nproc-per-node", str(gpus)).size == nodes * gpus


@pytest.mark.parametrize("script", ["pretrain_ict.py", "a/pretrain_vision_classify.py", "my_vlm.py"])
def test_scripts_of_other_models_are_refused(script: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        world("--nproc-per-node", "8", script, "--bf16")
    assert error.value.option == script


def test_a_module_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="vision-language"):
        world("-m", "pretrain_llava")


def test_an_unknown_script_is_assumed_to_build_a_gpt() -> None:
    arguments, _, _ = parse(["train.py", "--bf16"], environ={}, folder=Path("/nowhere"))
    assert arguments.entry == "train.py"
    assert any("train.py" in sentence for sentence in arguments.unknown)
    arguments, _, _ = parse(["/x/pretrain_gpt.py", "--bf16"], environ={}, folder=Path("/nowhere"))
    assert arguments.unknown == ()
