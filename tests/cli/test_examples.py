"""The launch scripts in examples/: the output of the command in each script is compared with a file in examples/expected/.

After an intended change, `python tools/update_examples.py` updates these files.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.report.printed import check_memory_table, check_parts, section
from tools.update_examples import ROOT, SCRIPTS, command_of, commands, expected_file, run, shown_in_readme

pytestmark = pytest.mark.slow

EXIT_STATUS = {"pretrain_llama3_405b": 1, "pretrain_llama3_405b_1024gpus": 1}
"""Exit status of scripts that do not fit. Llama-3 405B in 80 GB without recomputation needs the framework of its paper."""

MAX_LINES = 68
"""Maximum number of lines of the output for Llama-3 8B."""
MOST_IN_README = 20
"""Maximum number of lines of it that the README shows, so that its first part is one screen."""
VERDICT_WITHIN = 15
"""Number of lines at the start that contain the verdict."""

GENERATING = ("generate_llama3_70b", "generate_mixtral_8x7b", "generate_opt_30b")
"""Scripts of inference."""

PUBLISHED = {
    "generate_llama3_70b": 70_553_706_496,
    "generate_mixtral_8x7b": 46_702_792_704,
    "generate_opt_30b": 12 * 48 * 7168**2 + 13 * 48 * 7168 + (50272 + 2050) * 7168 + 2 * 7168,
    "pretrain_gpt3_175b": 12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048) * 12288 + 2 * 12288,
    "pretrain_gpt_7b_2nodes": 6_642_245_632 + 32 * 2 * 4096 + 2 * 4096 - (50432 - 50257) * 4096,
    "pretrain_llama3_8b": 8_030_261_248,
    "pretrain_llama3_70b": 70_553_706_496,
    "pretrain_llama3_405b": 405_853_388_800,
    "pretrain_llama3_405b_1024gpus": 405_853_388_800,
    "pretrain_mixtral_8x7b": 46_702_792_704,
    "pretrain_qwen3_235b_a22b": 235_093_634_560,
    "pretrain_gpt_oss_20b": 20_914_757_184,
    "pretrain_deepseek_v3": 671_026_404_352 + 11_610_067_968,
}
"""Number of parameters of each script.

Llama, Mixtral, Qwen3 and gpt-oss: the published checkpoints. GPT-3: 12Lh² + 13Lh + (V + s)h and the final norm. OPT-30B: the
same, with two more positions than tokens.

DeepSeek-V3: the published weights without the expert biases, which are not parameters, and the MTP layer: 11.5 billion in its model
card, plus the norm before its head.

The 7B model: the number in the proposal (vocabulary padded to 50,432), plus the parameters that the proposal omits: 2h of the QKV
bias (it counts h instead of 3h) and the final norm.
"""

PADDED = ("pretrain_qwen3_235b_a22b", "pretrain_gpt_oss_20b", "pretrain_deepseek_v3")
"""Scripts of models whose published embeddings are padded: they have more rows than their tokenizers have tokens."""

SED = 'sed "s%torchrun %python $PWD/get_training_info.py %"'
"""Replaces the launcher in a script, in the root of the repository."""

MEGATRON_STYLES = (
    "torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\\n    ${GPT_MODEL_ARGS[@]} \\\n    ${TRAINING_ARGS[@]}\n",
    'torchrun ${DISTRIBUTED_ARGS[@]} \\\n    "$PRETRAIN_SCRIPT_PATH" \\\n    ${GPT_MODEL_ARGS[@]} \\\n    ${TRAINING_ARGS[@]}\n',
    "torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\\n    ${GPT_MODEL_ARGS[*]} ${TRAINING_ARGS[*]} --distributed-backend nccl\n",
)
"""Launch commands in the styles of Megatron-LM's examples: with arrays, with the training script in a variable, and with
one string of arguments as in 2023."""


@pytest.mark.parametrize("file", commands(), ids=lambda path: path.stem)
def test_output(file: Path) -> None:
    done = run(commands()[file])
    assert done.stderr == ""
    assert done.stdout == file.read_text()
    assert done.returncode == EXIT_STATUS.get(file.stem, 0)


@pytest.mark.parametrize("file", commands(), ids=lambda path: path.stem)
def test_the_verdict_is_at_the_start_and_the_sums_of_printed_parts_are_correct(file: Path) -> None:
    text = file.read_text()
    start = text.splitlines()[:VERDICT_WITHIN]
    assert sum(line.startswith(("It fits: ", "It is tight: ", "It does not fit: ")) for line in start) == 1
    fits = EXIT_STATUS.get(file.stem, 0) == 0
    assert any(line.startswith("  headroom  ") for line in start) is fits
    memory = section(text, "Memory of")
    assert check_memory_table(memory) >= 1
    assert file.stem in GENERATING or check_parts(memory) >= 2


def test_the_default_output_is_short() -> None:
    lines = expected_file(ROOT / "examples" / "pretrain_llama3_8b.sh").read_text().splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[-1].startswith("More: --info-detail memory, time, groups, ")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_parameters(script: Path) -> None:
    model = json.loads(run(f"{command_of(script)} --info-json -").stdout)["model"]
    assert model["parameters" if script.stem in PADDED else "parameters_unpadded"] == PUBLISHED[script.stem]


def test_scripts_and_expected_outputs_are_complete() -> None:
    assert {script.stem for script in SCRIPTS} == set(PUBLISHED)
    assert set((ROOT / "examples" / "expected").iterdir()) == set(commands())


def test_the_output_of_sed_runs_in_any_folder(tmp_path: Path) -> None:
    script = ROOT / "examples" / "pretrain_llama3_8b.sh"
    made = tmp_path / "info.sh"
    made.write_text(run(f"{SED} {script}").stdout)
    assert f"python {ROOT}/get_training_info.py ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py" in made.read_text()
    done = run(f"bash {made} --info-gpu H100-80GB", folder=tmp_path)
    assert (done.stdout, done.stderr) == (expected_file(script).read_text(), "")


@pytest.mark.parametrize("job", MEGATRON_STYLES)
def test_the_examples_of_megatron(job: str, tmp_path: Path) -> None:
    made = tmp_path / "train.sh"
    made.write_text(
        "#!/bin/bash\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nPRETRAIN_SCRIPT_PATH=megatron/pretrain_gpt.py\n"
        "DISTRIBUTED_ARGS=(\n    --nproc_per_node 8 \n    --nnodes 1 \n    --master_addr localhost \n    --master_port 6000\n)\n"
        "GPT_MODEL_ARGS=(\n    --num-layers 24 \n    --hidden-size 1024 \n    --num-attention-heads 16 \n"
        "    --seq-length 1024 \n    --max-position-embeddings 1024 \n)\n"
        "TRAINING_ARGS=(\n    --micro-batch-size 1 \n    --global-batch-size 8 \n    --train-iters 10 --lr 1e-4 --fp16\n)\n"
        + ("DISTRIBUTED_ARGS=${DISTRIBUTED_ARGS[*]}\n" if "$DISTRIBUTED_ARGS" in job else "")
        + job
    )
    for command in (f"{SED} {made} | bash", f"python get_training_info.py {made}"):
        done = run(command)
        assert done.stderr == ""
        assert "  model         GPT, 24 layers, hidden size 1,024, " in done.stdout
        assert done.returncode == 0


def test_scripts_have_valid_syntax_and_are_executable() -> None:
    for script in SCRIPTS:
        assert script.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert script.read_text().rstrip().endswith('"$@"')


def test_the_readme_contains_the_output() -> None:
    assert f"```\n{shown_in_readme()}```" in (ROOT / "README.md").read_text()
    assert shown_in_readme().count("\n") <= MOST_IN_README
