"""Layouts of a search in the terms of the framework of a launch: read again, they give the layout."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from analyzer.api import Launch, problem_of, read_launch
from analyzer.frameworks.overrides import command, overrides
from analyzer.frameworks.script_words import words_of_script
from analyzer.layout_search.dimensions import space_of
from analyzer.report.console.report import draw
from analyzer.report.console.search_section import _commands, continued
from analyzer.specs import TrainingJob
from tests.frameworks import test_bridge, test_nemo_rl
from tests.frameworks.files import job, layout, read, write

pytest.importorskip("omegaconf")

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples/frameworks"
GPU: Final = ("--info-gpu", "H100-80GB")
LAUNCHES: Final = {
    "Megatron-Bridge": "megatron_bridge_gpt_oss_120b_lora.yaml --info-world-size 16",
    "ms-swift, file": "ms_swift_qwen3_30b_a3b_sft.yaml --info-world-size 16",
    "ms-swift, script": "ms_swift_qwen3_8b_lora.sh",
    "Megatron-Bridge, overlap": "megatron_bridge_qwen3_8b_lora.yaml --info-world-size 8 ++comm_overlap.tp_comm_overlap=false "
    "++comm_overlap.overlap_grad_reduce=false ++comm_overlap.overlap_param_gather=false",
    "ms-swift, DPO": "megatron rlhf --model Qwen/Qwen3-8B --dataset x --packing true --max_length 4096 --micro_batch_size 2 "
    "--global_batch_size 32 --tensor_model_parallel_size 4 --sequence_parallel true --attention_backend flash --info-world-size 8",
    "NeMo-RL, overriding": "nemo_rl/sft_llama3_8b.yaml policy.megatron_cfg.activation_checkpointing=false "
    "++policy.megatron_cfg.model_overrides.recompute_granularity=full ++policy.megatron_cfg.model_overrides.recompute_method=block "
    "++policy.megatron_cfg.model_overrides.recompute_num_layers=4",
    "NeMo-RL": "nemo_rl/sft_llama3_8b.yaml",
    "NeMo-RL, packed": "nemo_rl/sft_llama3_8b.yaml policy.sequence_packing.enabled=true",
    "Primus": "primus_llama3.1_8b_pretrain.yaml",
    "ROLL": "roll_qwen3_8b_grpo.yaml",
    "ROLL, packed": "roll_qwen3_8b_grpo.yaml +actor_train.use_sequence_packing=true",
    "ROLL, tokens": "roll_qwen3_8b_grpo.yaml +actor_train.use_dynamic_batching_in_train=true "
    "+actor_train.max_tokens_per_microbatch_in_train=16384",
    "ROLL, layers of experts": "roll_qwen3_8b_grpo.yaml pretrain=Qwen/Qwen3-30B-A3B "
    "++actor_train.strategy_args.strategy_config.expert_model_parallel_size=4 "
    "++actor_train.strategy_args.strategy_config.moe_layer_recompute=true "
    "actor_train.strategy_args.strategy_config.recompute_granularity=null",
    "slime": "slime_qwen3_8b_grpo.sh",
    "verl": "verl_qwen3_8b_grpo.sh",
    "verl, fine-tuning": "-m verl.trainer.sft_trainer engine=megatron model.path=Qwen/Qwen3-8B data.max_length=4096 "
    "data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=1 data.train_batch_size=64 trainer.n_gpus_per_node=8 "
    "engine.tensor_model_parallel_size=2",
}
CHANGES: Final = {
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": None,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECOMPUTE: Final[tuple[dict[str, object], ...]] = (
    {},
    {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, "recompute_modules": None},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4, "recompute_modules": None},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, "recompute_modules": None},
    {
        "recompute_granularity": "selective",
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": ("layernorm", "mlp"),
    },
)


@lru_cache
def launch_of(name: str) -> tuple[Launch, tuple[str, ...], Mapping[str, str]]:
    """The launch, its words and its environment."""
    program, *rest = LAUNCHES[name].split()
    first = str(EXAMPLES / program) if "." in program else program
    with words_of_script([first, *rest], environ={}, folder=EXAMPLES) as found:
        words = (*found.words, *GPU)
        return read_launch(words, environ=found.environ, folder=EXAMPLES), words, found.environ


def comparable(job: TrainingJob) -> TrainingJob:
    """A job without its notes, and without rows of the vocabulary that pad it for a tensor-parallel size."""
    return replace(job, assumptions=(), warnings=(), model=replace(job.model, padded_vocab_size=0))


def with_variables(command: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and the variables before it."""
    words = shlex.split(command)
    count = next(index for index, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    variables = (each.partition("=") for each in words[:count])
    return words[count:], {name: value for name, _, value in variables}


@pytest.mark.parametrize("name", LAUNCHES)
@settings(max_examples=12, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(RECOMPUTE),
    overlap=st.booleans(),
)
def test_the_command_of_a_layout_gives_the_layout(
    name: str, tensor: int, pipeline: int, context: int, micro: int, recompute: dict[str, object], overlap: bool
) -> None:
    launch, words, _ = launch_of(name)
    wanted: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "sequence_parallel": tensor > 1,
        "micro_batch_size": launch.job.batch.micro_batch_size * (1 if launch.job.tuning.filled else micro),
        "overlap_grad_reduce": overlap,
        **recompute,
    }
    arguments = launch.arguments
    changes = {
        dest: value
        for dest, value in wanted.items()
        if arguments.get(dest) != value and (value is not None or dest in arguments.given) and (value or arguments.get(dest))
    }
    expected = space_of(problem_of(launch)).jobs.of(changes)
    assume(expected is not None)
    assert expected is not None
    assume(name != "Megatron-Bridge, overlap" or expected.parallel.data > 1)  # it has no bucket size otherwise
    text = command(launch, words, changes)
    assert text is not None
    assert "--info" not in text
    size = [word for flag, word in pairwise(words) if flag == "--info-world-size"]
    more = [*GPU, *(["--info-world-size", *size] if size else [])]
    pasted, environ = with_variables(text)
    found = read_launch([*pasted, *more], environ=environ, folder=EXAMPLES).job
    assert comparable(found) == comparable(replace(expected, tuning=found.tuning))


@pytest.mark.parametrize(
    ("name", "setting", "tokens"),
    [
        ("NeMo-RL, packed", "policy.sequence_packing.train_mb_tokens", 16384),
        ("ROLL, tokens", "max_tokens_per_microbatch_in_train", 32768),
    ],
)
def test_two_sequences_in_a_packed_microbatch_are_twice_the_tokens(name: str, setting: str, tokens: int) -> None:
    """A search does not change them: the number of microbatches follows from their tokens."""
    launch, words, _ = launch_of(name)
    text = command(launch, words, {"micro_batch_size": 2})
    assert text is not None
    assert text.split()[-1].endswith(f"{setting}={tokens}")
    assert space_of(problem_of(launch)).sizes.micro_batch == (launch.job.batch.micro_batch_size,)


def test_tokens_of_a_rank_depend_on_the_context_parallel_size() -> None:
    """slime: `--max-tokens-per-gpu` 9216 of one rank."""
    launch, words, _ = launch_of("slime")
    for context, micro, tokens in ((2, 1, 4608), (4, 4, 9216)):
        text = command(launch, words, {"context_parallel_size": context, "micro_batch_size": micro})
        assert text is not None
        assert text.count("--max-tokens-per-gpu") == 1
        assert f"--max-tokens-per-gpu {tokens}" in text
        assert "--micro-batch-size" not in text


@pytest.mark.parametrize("framework", ["bridge", "nemo_rl"])
def test_overrides_give_the_layout(tmp_path: Path, framework: str) -> None:
    content = test_bridge.CONFIG if framework == "bridge" else test_nemo_rl.BASE
    write(tmp_path, {"config.yaml": content})
    words = ("config.yaml", "--info-world-size", "16")
    changed = overrides(read(tmp_path, *words), CHANGES)
    found = job(tmp_path, *words, *changed)
    assert layout(found)[:3] == (16, 4, 2)
    assert found.parallel.virtual_pipeline is None
    assert (found.recompute.granularity, found.recompute.method, found.recompute.num_layers) == ("full", "uniform", 1)


def test_overrides_of_verl_are_settings_of_its_engine() -> None:
    """Also those of the reference model, which the launch gives sizes for."""
    launch, _, _ = launch_of("verl")
    assert overrides(launch, {"context_parallel_size": 2, "recompute_granularity": None}) == [
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=null",
        "actor_rollout_ref.ref.megatron.context_parallel_size=2",
    ]


def test_pairs_of_sequences_are_samples() -> None:
    """A microbatch of DPO has two sequences of each sample; a search does not split them."""
    launch = read(EXAMPLES, "roll_qwen3_8b_grpo.yaml", "+chosen_key=chosen", *GPU)
    assert launch.job.tuning.sequences_per_sample == 2
    assert min(space_of(problem_of(launch)).sizes.micro_batch) == 2
    micro = launch.job.batch.micro_batch_size
    assert overrides(launch, {"micro_batch_size": 2 * micro})[0].endswith(f"per_device_train_batch_size={micro}")


@pytest.mark.parametrize("name", ["verl", "slime", "Megatron-Bridge"])
def test_the_console_has_whole_commands(name: str) -> None:
    """Also a path that is longer than a line."""
    launch, words, _ = launch_of(name)
    text = command(launch, [*words, f"long={'x' * 150}"], {"tensor_model_parallel_size": 1})
    assert text is not None
    drawn = draw(_commands([text], [], 100), width=100)
    pasted = drawn.partition("# layout 1")[2].replace("\\\n", " ")
    assert shlex.split(pasted) == shlex.split(text)


def test_commands_begin_with_their_program() -> None:
    begins = {"verl": "python3 -m verl.trainer.main_ppo", "slime": "python3 train.py", "ms-swift, script": "megatron sft"}
    for name, first in begins.items():
        launch, words, _ = launch_of(name)
        text = command(launch, words, {})
        assert text is not None
        assert shlex.join(with_variables(text)[0]).startswith(first)


def test_a_search_has_no_layouts_without_the_adapters_of_the_launch() -> None:
    """Adapters of ms-swift are not modelled in FP8: such a layout would be a training of all parameters."""
    launch, _, _ = launch_of("ms-swift, script")
    jobs = space_of(problem_of(launch)).jobs
    assert jobs.of({"tensor_model_parallel_size": 1}) is not None
    assert jobs.of({"fp8": "hybrid"}) is None


def test_overrides_are_printed_whole() -> None:
    """A line ends between overrides, and not within one."""
    text = "a.yaml model.tensor_model_parallel_size=2 train.micro_batch_size=4 model.sequence_parallel=true"
    lines = continued(text, 70).split(" \\\n")
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= 70


def test_a_command_has_the_words_of_the_launch() -> None:
    launch, _, _ = launch_of("Megatron-Bridge")
    words = ["a.yaml", "train.train_iters=5", "--info-gpu", "H100-80GB", "--info-search"]
    assert command(launch, words, {"micro_batch_size": 2}) == "a.yaml train.train_iters=5 train.micro_batch_size=2"


def test_a_launch_of_megatron_has_no_other_terms() -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1"
    )
    launch = read_launch([*words.split(), "--bf16"], environ={}, folder=EXAMPLES)
    assert command(launch, launch.command, {"micro_batch_size": 2}) is None
