"""Launch scripts with every form of launcher: number of launches, and nodes and GPUs per node of each."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.script.commands import SCRIPTS, printed, run

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """What a script starts."""

    shapes: tuple[tuple[int, int] | None, ...]
    """Nodes and GPUs per node of each launch; None if nothing gives them."""
    launchers: tuple[str, ...]
    """The first word of each launch; of several equal ones the first is sufficient."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of the first launch."""
    arguments: tuple[str, ...] = ()


TORCHRUN = ("torchrun",)
PYTHON = ("python",)
CASES = {
    "torchrun_one_node.sh": Case(((1, 8),), TORCHRUN, {"--tensor-model-parallel-size": "2"}),
    "torchrun_strict_mode.sh": Case(((4, 8),), TORCHRUN, {"--rdzv-endpoint": "node001:29500"}),
    "torch_distributed_run.sh": Case(((2, 8),), PYTHON, {"--pipeline-model-parallel-size": "2"}),
    "torch_distributed_launch.sh": Case(((2, 4),), ("python3",), {"-m": "torch.distributed.launch"}),
    "srun_python.slurm": Case(((4, 8),), PYTHON, {"--tensor-model-parallel-size": "4"}),
    "srun_torchrun.sbatch": Case(((16, 8),), TORCHRUN, {"--nnodes": "16"}),
    "srun_options.sh": Case(((2, 4), (2, 8), (3, 8), (4, 8), (4, 8)), PYTHON),
    "srun_heredoc.sh": Case(((2, 8),), TORCHRUN, {"--node_rank": "0"}),
    "srun_written_script.slurm": Case(((8, 4),), TORCHRUN, {"--node_rank": "0", "--master_addr": "node001"}),
    "srun_bash_c.slurm": Case(((2, 8),), PYTHON),
    "srun_container.slurm": Case(((2, 8),), TORCHRUN),
    "header_only.slurm": Case(((2, 8),), PYTHON, {"--context-parallel-size": "2"}),
    "sbatch_wrap.sh": Case(((1, 8), (2, 8), (4, 8)), PYTHON, {"--save": "/checkpoints/1"}),
    "sbatch_other_script.sh": Case(((4, 8),), PYTHON),
    "mpirun.sh": Case(((2, 8), (8, 4), (3, 8)), PYTHON),
    "mpiexec.sh": Case(((2, 4),), ("python3",)),
    "deepspeed.sh": Case(((2, 8), (1, 4)), ("deepspeed",), {"--master_port": "29600"}),
    "deepspeed_hostfile.sh": Case(((4, 8), (2, 4)), ("deepspeed",)),
    "accelerate.sh": Case(((2, 8),), ("accelerate",), {"--megatron_lm_tp_degree": "2"}),
    "accelerate_config.sh": Case(((4, 8),), ("accelerate",)),
    "ray_job.sh": Case(((1, 8),), ("python3",)),
    "nsys.sh": Case(((1, 8),), TORCHRUN, {"--profile-step-start": "5"}),
    "docker_run.sh": Case(((1, 8), (1, 4), (1, 2), (1, 1)), ("torchrun", "python", "torchrun", "torchrun")),
    "singularity.slurm": Case(((2, 4), (2, 4), (1, 4)), ("python", "torchrun", "python")),
    "variables_and_arrays.sh": Case(((1, 1), (1, 2), (1, 4), (1, 8)), ()),
    "functions_and_eval.sh": Case(((1, 4), (2, 8)), TORCHRUN),
    "prefix_commands.sh": Case(((1, 1), (1, 2), (1, 4), (1, 8), (1, 16)), ()),
    "background.sh": Case(((1, 8),), TORCHRUN),
    "background_without_wait.sh": Case(((1, 4),), TORCHRUN),
    "path_changes.sh": Case(
        ((1, 2), (1, 4), (1, 8), (1, 16)), ("torchrun", "torchrun", "/opt/conda/bin/torchrun", "/opt/conda/bin/python3")
    ),
    "retry_until.sh": Case(((1, 8),), TORCHRUN),
    "retry_while_true.slurm": Case(((2, 8),), PYTHON),
    "ssh_loop.sh": Case(((3, 8),), TORCHRUN, {"--master_addr": "node1"}),
    "positional_arguments.sh": Case(
        ((1, 8),), TORCHRUN, {"--tensor-model-parallel-size": "2", "--log-interval": "5"}, ("8", "2", "--log-interval", "5")
    ),
    "world_size_variables.sh": Case(((4, 4), (1, 8), (4, 8)), PYTHON),
    "count_gpus.sh": Case(((1, 8),), TORCHRUN, {"--nproc_per_node": "8"}),
    "empty_variables.sh": Case(((2, 8),), TORCHRUN),
    "unknown_size.sh": Case((None, None, None), ("deepspeed", "python", "torchrun")),
    "cluster_commands.sh": Case(((1, 8),), TORCHRUN),
    "sh_script": Case(((1, 4),), TORCHRUN, {"--train-iters": "10"}, ("4",)),
    "python_module.sh": Case(((1, 8), (1, 8)), PYTHON),
}
"""By file in scripts/. The sizes follow from the documentation of each launcher."""
ANALYZED = (
    "torchrun_one_node.sh", "torch_distributed_run.sh", "srun_python.slurm", "srun_heredoc.sh", "header_only.slurm", "mpiexec.sh",
    "deepspeed.sh", "accelerate.sh", "docker_run.sh", "empty_variables.sh", "ray_job.sh", "sh_script",
)  # fmt: skip
"""Scripts whose launches are also analyzed."""
LAYERS, HIDDEN, VOCABULARY, POSITIONS = 24, 2048, 32000 + 1, 2048
PARAMETERS = 12 * LAYERS * HIDDEN**2 + 13 * LAYERS * HIDDEN + (VOCABULARY + POSITIONS) * HIDDEN + 2 * HIDDEN
"""12Lh² + 13Lh + (V + s)h and the final norm: the GPT model of all scripts. Megatron's NullTokenizer has one more token, for the
end of a document."""


def test_every_script_has_a_case() -> None:
    assert {path.name for path in SCRIPTS.iterdir()} == set(CASES)
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_launches(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    done = run(SCRIPTS / name, *case.arguments, "--info-dry", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    launches = printed(done.stdout)
    assert tuple(each.shape for each in launches) == case.shapes
    assert all(each.value("--num-layers") == "24" for each in launches)
    first = [each.words[0] for each in launches]
    if case.launchers:
        assert first == list(case.launchers if len(case.launchers) > 1 else case.launchers * len(first))
    assert {option: launches[0].value(option) for option in case.options} == case.options


@pytest.mark.parametrize("name", ANALYZED)
def test_reports(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    done = run(SCRIPTS / name, *case.arguments, "--info-json", "report.json", "--info-gpu", "H100-80GB", folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    for number, shape in enumerate(case.shapes, 1):
        report = json.loads((tmp_path / ("report.json" if number == 1 else f"report-{number}.json")).read_text())
        assert shape is not None
        assert (report["world"]["nodes"], report["world"]["gpus_per_node"]) == shape
        assert report["model"]["parameters_unpadded"] == PARAMETERS
    assert not (tmp_path / f"report-{len(case.shapes) + 1}.json").exists()
