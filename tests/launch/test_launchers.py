"""The number of processes that deepspeed, accelerate, MPI and Slurm start, and the options of launchers on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzer.errors import InputError
from analyzer.launch.launchers.read_world import read_world
from analyzer.launch.launchers.world import World
from analyzer.launch.options.catalogue import load_catalogue
from analyzer.launch.split_argv import SplitArgv, split_argv

HOSTS = "# workers\nworker-1 slots=8\nworker-2 slots=8  # rack 2\n\nworker-3 slots=8\n"
CONFIGURATION = "distributed_type: MULTI_GPU\nnum_machines: 2\nmegatron_lm_config:\n  num_processes: 3\nnum_processes: 16 # all\n"


def split(text: str) -> SplitArgv:
    return split_argv(text.split(), load_catalogue().newest)


def world(
    text: str,
    environ: dict[str, str] | None = None,
    *,
    folder: Path | None = None,
    size: int | None = None,
    per_node: int | None = None,
) -> World | None:
    words = split(text)
    return read_world(
        words.launcher_options, environ or {}, launcher=words.launcher, folder=folder, size=size, gpus_per_node=per_node
    )  # fmt: skip


def shape(found: World | None) -> tuple[int, int] | None:
    return None if found is None else (found.nodes, found.gpus_per_node)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py --bf16", (2, 4)),
        ("--num_nodes=2 --num_gpus=4 pretrain_gpt.py --bf16", (2, 4)),
        ("deepspeed --num_gpus 4 --module pretrain_gpt --bf16", (1, 4)),
        ("deepspeed --include localhost:0,2,3 pretrain_gpt.py", (1, 3)),
        ("deepspeed -i worker-1:0,1@worker-2:2,3 pretrain_gpt.py", (2, 2)),
        ("deepspeed -i worker-1:0,1@worker-2:3 pretrain_gpt.py", (3, 1)),
        ("deepspeed --hostfile hosts pretrain_gpt.py", (3, 8)),
        ("deepspeed -H hosts --num_nodes 2 pretrain_gpt.py", (2, 8)),
        ("deepspeed -H hosts --num_gpus 4 pretrain_gpt.py", (3, 4)),
        ("deepspeed -H hosts --include worker-1@worker-3 pretrain_gpt.py", (2, 8)),
        ("deepspeed -H elsewhere --num_gpus 8 pretrain_gpt.py", None),
        ("deepspeed -H elsewhere --num_nodes 2 --num_gpus 8 pretrain_gpt.py", (2, 8)),
        ("deepspeed --num_nodes 2 pretrain_gpt.py", None),
        ("deepspeed --num_nodes -1 --num_gpus -1 pretrain_gpt.py", None),
        ("deepspeed pretrain_gpt.py --deepspeed --zero-stage 1", None),
        ("accelerate launch --num_processes 16 --num_machines 2 train.py", (2, 8)),
        ("launch --num_processes 16 --num_machines 2 train.py", (2, 8)),
        ("--num_processes 16 train.py", (1, 16)),
        ("accelerate launch --config_file accelerate.yaml train.py", (2, 8)),
        ("accelerate launch --config_file accelerate.yaml --num_processes 8 train.py", (2, 4)),
        ("accelerate launch --config_file elsewhere.yaml train.py", None),
        ("torchrun pretrain_gpt.py", (1, 1)),
        ("pretrain_gpt.py --bf16", None),
        ("-m pretrain_gpt --bf16", None),
    ],
)
def test_options_of_launchers(text: str, expected: tuple[int, int] | None, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "accelerate.yaml").write_text(CONFIGURATION)
    assert shape(world(text, folder=tmp_path)) == expected


STEP = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("pretrain_gpt.py", {"PMI_SIZE": "16"}, (2, 8)),
        ("pretrain_gpt.py", {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_NTASKS": "2"}, (4, 4)),
        # one task per node, which starts the processes of the node
        ("pretrain_gpt.py", STEP, (2, 8)),
        ("deepspeed pretrain_gpt.py", STEP, (2, 8)),
        ("deepspeed --num_nodes 2 pretrain_gpt.py", STEP, (2, 8)),
        ("accelerate launch train.py", STEP, (2, 8)),
        # srun starts the program itself
        ("pretrain_gpt.py", {**STEP, "SLURM_STEP_NUM_TASKS": "2"}, (2, 1)),
        ("pretrain_gpt.py", {**STEP, "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}, (2, 8)),
        ("pretrain_gpt.py", {"SLURM_NNODES": "4", "SLURM_GPUS_PER_NODE": "h100:4"}, (4, 4)),
        ("pretrain_gpt.py", {"SLURM_NNODES": "4"}, None),
        ("torchrun --nnodes 4 --nproc_per_node 4 pretrain_gpt.py", {**STEP, "WORLD_SIZE": "7"}, (4, 4)),
        ("pretrain_gpt.py", {**STEP, "WORLD_SIZE": "32", "SLURM_STEP_NUM_TASKS": "2"}, (32, 1)),
        ("sft.py", {"NNODES": "2", "NPROC_PER_NODE": "4"}, (2, 4)),
    ],
)
def test_environment(text: str, environ: dict[str, str], expected: tuple[int, int] | None) -> None:
    assert shape(world(text, environ)) == expected


@pytest.mark.parametrize(
    ("text", "size", "per_node", "expected"),
    [
        ("torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py", 64, None, (8, 8)),
        ("torchrun --nnodes --nproc_per_node gpu pretrain_gpt.py", 64, None, (8, 8)),
        ("torchrun --nnodes --nproc_per_node 4 pretrain_gpt.py", 64, None, (16, 4)),
        ("pretrain_gpt.py", 64, 16, (4, 16)),
        ("pretrain_gpt.py", 12, None, (3, 4)),
        ("deepspeed --num_nodes 2 pretrain_gpt.py", None, 4, (2, 4)),
        ("torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py", None, 4, (4, 4)),
    ],
)
def test_info_world_size_wins(text: str, size: int | None, per_node: int | None, expected: tuple[int, int]) -> None:
    assert shape(world(text, {"WORLD_SIZE": "9", "SLURM_NTASKS": "x"} if size else {}, size=size, per_node=per_node)) == expected


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("torchrun --nnodes 2 --nproc_per_node gpu pretrain_gpt.py", "--nproc_per_node"),
        ("torchrun --nnodes 2 --nproc-per-node=auto pretrain_gpt.py", "--nproc-per-node"),
        ("torchrun --nnodes --nproc_per_node 8 pretrain_gpt.py", "--nnodes"),
        ("torchrun --nproc_per_node 8 --nnodes pretrain_gpt.py", "--nnodes"),
        ("torchrun --nnodes= --nproc_per_node 8 pretrain_gpt.py", "--nnodes"),
        ("deepspeed --num_gpus all pretrain_gpt.py", "--num_gpus"),
        ("accelerate launch --num_processes 0 train.py", "--num_processes"),
        ("accelerate launch --num_processes 9 --num_machines 2 train.py", "--num_processes"),
    ],
)
def test_sizes_that_are_not_numbers_are_errors_whose_remedy_is_the_option(text: str, option: str) -> None:
    with pytest.raises(InputError) as error:
        world(text)
    assert error.value.option == option
    assert "--info-world-size" in error.value.remedy


def test_sizes_that_do_not_divide_are_errors() -> None:
    with pytest.raises(InputError, match="--info-world-size"):
        world("pretrain_gpt.py", size=12, per_node=8)
    with pytest.raises(InputError, match="--info-gpus-per-node"):
        world("torchrun --nnodes 3 --nproc_per_node 3 pretrain_gpt.py", per_node=8)


@pytest.mark.parametrize("option", ["--node_rank", "--master_addr", "--master_port", "--rdzv_endpoint", "--rdzv-id", "--role"])
@pytest.mark.parametrize("rest", ["--nproc_per_node 8 pretrain_gpt.py --bf16", "pretrain_gpt.py --bf16 --nproc_per_node 8"])
def test_an_option_without_its_value_takes_no_other_word(option: str, rest: str) -> None:
    words = split(f"torchrun --nnodes 2 {option} {rest}")
    assert words.entry == "pretrain_gpt.py"
    assert words.megatron == ("--bf16",)
    assert shape(world(f"torchrun --nnodes 2 {option} {rest}")) == (2, 8)


@pytest.mark.parametrize(
    ("text", "launcher", "entry"),
    [
        ("torchrun --nnodes 2 pretrain_gpt.py --bf16", "torchrun", "pretrain_gpt.py"),
        ("-u -m torch.distributed.run --nnodes 2 pretrain_gpt.py --bf16", "torchrun", "pretrain_gpt.py"),
        ("deepspeed --launcher slurm --force_multi --no_local_rank pretrain_gpt2.py --bf16", "deepspeed", "pretrain_gpt2.py"),
        ("accelerate launch --megatron_lm_tp_degree 2 --mixed_precision bf16 train.py --bf16", "accelerate", "train.py"),
        ("accelerate launch --zero3_init_flag false -m package.train --bf16", "accelerate", "package.train"),
        ("--launcher pdsh --save_pid pretrain_gpt.py --bf16", None, "pretrain_gpt.py"),
    ],
)  # fmt: skip
def test_options_of_the_launcher_do_not_reach_megatron(text: str, launcher: str | None, entry: str) -> None:
    words = split(text)
    assert (words.launcher, words.entry, words.megatron) == (launcher, entry, ("--bf16",))


def test_options_after_the_script_belong_to_the_script() -> None:
    words = split("deepspeed --num_gpus 8 pretrain_gpt.py --include x --hostfile y")
    assert words.megatron == ("--include", "x", "--hostfile", "y")


@pytest.mark.parametrize("python", ["python", "python3", "python3.11", "/usr/bin/python3 -u"])
def test_the_interpreter_is_before_a_launcher_or_a_script(python: str) -> None:
    for command in ("pretrain_gpt.py --num-layers 2", "-m torch.distributed.run --nproc-per-node 8 pretrain_gpt.py --num-layers 2"):
        assert split(f"{python} {command}") == split(command)
    assert split("--data-path python pretrain_gpt.py").megatron == ("--data-path", "python")
    assert split(f"--nproc-per-node 8 {python} pretrain_gpt.py") == split("--nproc-per-node 8 pretrain_gpt.py")
    assert split(f"torchrun --no-python {python} pretrain_gpt.py") == split("torchrun --no-python pretrain_gpt.py")
    assert split("-m python --num-layers 2").entry == "python"


def test_launchers_have_paths_and_modules() -> None:
    for path, name in (("/usr/local/bin/torchrun", "torchrun"), ("python3 /opt/bin/deepspeed", "deepspeed")):
        assert split(f"{path} pretrain_gpt.py") == split(f"{name} pretrain_gpt.py")
    for module, line in (
        ("deepspeed.launcher.runner", "deepspeed --num_gpus 8"),
        ("accelerate.commands.launch", "accelerate launch --num_processes 8"),
    ):
        rest = line.split()[1:] if module.startswith("deepspeed") else line.split()[2:]
        found, named = split(f"python3 -m {module} {' '.join(rest)} pretrain_gpt.py"), split(f"{line} pretrain_gpt.py")
        assert (found.launcher, found.launcher_options, found.entry) == (named.launcher, named.launcher_options, named.entry)
