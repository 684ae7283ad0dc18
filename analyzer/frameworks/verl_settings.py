"""The settings of a launch of verl: words `name=value`, with an error for what Hydra would refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from analyzer.errors import InputError
from analyzer.launch.spelling import is_misspelling

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_SIZES: Final = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "param_offload", "grad_offload",
    "optimizer_offload", "use_distributed_optimizer", "use_megatron_fsdp",
)  # fmt: skip
_ENGINES: Final = (f"{_ACTOR}megatron.", "actor_rollout_ref.ref.megatron.", "critic.megatron.", "engine.")
_MODELS: Final = ("actor_rollout_ref.model.", "critic.model.", "model.")
_OF_LOG_PROBS: Final = ("micro_batch_size_per_gpu", "max_token_len_per_gpu", "use_dynamic_bsz")
SETTINGS: Final = frozenset({
    *(f"{engine}{name}" for engine in _ENGINES for name in _SIZES),
    *(f"{model}{name}" for model in _MODELS for name in ("path", "use_fused_kernels", "lora.rank")),
    *(f"actor_rollout_ref.{role}.log_prob_{name}" for role in ("rollout", "ref") for name in _OF_LOG_PROBS),
    *(f"{_ACTOR}{name}" for name in (
        "strategy", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz",
        "use_kl_loss",
    )),
    f"{_ROLLOUT}n", f"{_ROLLOUT}gpu_memory_utilization", f"{_ROLLOUT}tensor_model_parallel_size", f"{_ROLLOUT}free_cache_engine",
    *(f"critic.{name}" for name in (
        "enable", "strategy", "ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu",
    )),
    "actor_rollout_ref.hybrid_engine", "algorithm.adv_estimator", "algorithm.use_kl_in_reward", "trainer.nnodes",
    "trainer.n_gpus_per_node", "data.max_prompt_length", "data.max_response_length", "data.max_length", "data.train_batch_size",
    "data.max_token_len_per_gpu", "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz",
})  # fmt: skip
"""Settings that decide about memory."""


def settings(words: Sequence[str]) -> dict[str, str]:
    """The values of the words, which may begin with + or ++.

    Raises InputError for a word that is neither a setting nor an option of Hydra, and for a misspelled setting.
    """
    found: dict[str, str] = {}
    for word in _settings(words):
        name, _, value = word.partition("=")
        plain = name.lstrip("+")
        meant = next((each for each in SETTINGS if is_misspelling(plain, each)), None)
        if meant is not None and plain not in SETTINGS:
            raise InputError(plain, "is not a setting of verl", f"write {meant}={value}")
        found[plain] = value.strip("'\"")
    return found


def _settings(words: Sequence[str]) -> Iterator[str]:
    """The words with a value."""
    previous = ""
    for word in words:
        if "=" in word:
            yield word
        elif word and not word.startswith(("-", "~")) and not (previous.startswith("-") and "=" not in previous):
            raise InputError(word, "is neither a setting of verl nor an option", "write NAME=VALUE")
        previous = word
