"""Layouts of a search in the terms of the framework of a launch: read again, they give the layout."""

from __future__ import annotations

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
from analyzer.report.console.search_section import continued
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
    "NeMo-RL": "nemo_rl/sft_llama3_8b.yaml",
    "NeMo-RL, packed": "nemo_rl/sft_llama3_8b.yaml policy.sequence_packing.enabled=true",
    "Primus": "primus_llama3.1_8b_pretrain.yaml",
    "ROLL": "roll_qwen3_8b_grpo.yaml",
    "ROLL, packed": "roll_qwen3_8b_grpo.yaml +actor_train.use_sequence_packing=true",
    "ROLL, tokens": "roll_qwen3_8b_grpo.yaml +actor_train.use_dynamic_batching_in_train=true "
    "+actor_train.max_tokens_per_microbatch_in_train=16384",
    "slime": "slime_qwen3_8b_grpo.sh",
    "verl": "verl_qwen3_8b_grpo.sh",
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
    with words_of_script([str(EXAMPLES / program), *rest], environ={}, folder=EXAMPLES) as found:
        words = (*found.words, *GPU)
        return read_launch(words, environ=found.environ, folder=EXAMPLES), words, found.environ


def comparable(job: TrainingJob) -> TrainingJob:
    """A job without its notes, and without rows of the vocabulary that pad it for a tensor-parallel size."""
    return replace(job, assumptions=(), warnings=(), model=replace(job.model, padded_vocab_size=0))


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
    launch, words, environ = launch_of(name)
    wanted: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
        "sequence_parallel": tensor > 1,
        "micro_batch_size": launch.job.batch.micro_batch_size
        * (1 if "token" in name or "packed" in name or name == "slime" else micro),
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
    text = command(launch, words, changes)
    assert text is not None
    assert "--info" not in text
    size = [word for flag, word in pairwise(words) if flag == "--info-world-size"]
    more = [*GPU, *(["--info-world-size", *size] if size else [])]
    found = read_launch([*shlex.split(text), *more], environ=environ, folder=EXAMPLES).job
    assert comparable(found) == comparable(replace(expected, tuning=found.tuning))


@pytest.mark.parametrize(
    ("name", "setting", "tokens"),
    [
        ("NeMo-RL, packed", "policy.sequence_packing.train_mb_tokens", 16384),
        ("ROLL, tokens", "max_tokens_per_microbatch_in_train", 32768),
    ],
)
def test_two_sequences_in_a_packed_microbatch_are_twice_the_tokens(name: str, setting: str, tokens: int) -> None:
    launch, words, _ = launch_of(name)
    text = command(launch, words, {"micro_batch_size": 2})
    assert text is not None
    assert text.split()[-1].endswith(f"{setting}={tokens}")


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
