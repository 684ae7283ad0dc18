"""Files and overrides with faults: each is an error of one line that names the setting and the remedy. No code of a file runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analyzer.errors import InputError
from tests.frameworks.files import job, write

pytest.importorskip("omegaconf")

NEMO = """
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
ROLL = """
pretrain: Qwen/Qwen2.5-7B
sequence_length: 4096
actor_train:
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 16}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,16))
"""
BRIDGE = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512, tensor_model_parallel_size: 2, seq_length: 64}
train: {micro_batch_size: 1, global_batch_size: 8}
optimizer: {optimizer: adam}
ddp: {}
"""
VERL = (
    "-m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.strategy=megatron "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 "
)
TP = "policy.megatron_cfg.tensor_model_parallel_size"


def changed(text: str, old: str, new: str) -> str:
    """`text` with a part replaced."""
    assert old in text
    return text.replace(old, new)


FILES = {
    "empty": ("", "run.yaml: has keys of no known framework"),
    "list": ("- a\n", "run.yaml: has no keys"),
    "tab": ("policy:\n\tmodel: x\n", r"run.yaml: is not YAML in line 2 \(found character .*\); correct that line"),
    "unclosed": ("policy: {a: 1\n", "run.yaml: is not YAML in line 2 .*; correct that line"),
    "two documents": ("a: 1\n---\nb: 2\n", r"run.yaml: is not YAML in line 2 \(but found another document\)"),
    "control character": ("a: \0\n", "run.yaml: is not YAML .*; correct that value"),
    "cycle of aliases": ("a: &x [*x]\n", "run.yaml: has more than 200000 values"),
    "impossible date": (NEMO + "x: 2026-99-99\n", r"run.yaml: is not YAML \(month must be in 1..12\)"),
    "tag of a number": (NEMO + 'x: !!int "abc"\n', "run.yaml: is not YAML .*; correct that value"),
    "number of 6,000 digits": (NEMO + f"x: {'9' * 6000}\n", "run.yaml: is not YAML .*; correct that value"),
    "too deep": (NEMO + f"x: {'{a: ' * 3000}1{'}' * 3000}\n", "run.yaml: has keys in keys that are too deep to read"),
    "references too deep": (
        NEMO + f"x: {'{a: ' * 200}'${{policy.precision}}'{'}' * 200}\n",
        "run.yaml: has keys in keys that are too deep to read",
    ),
    "missing default": (
        "defaults: other.yaml\n" + NEMO,
        r"other.yaml \(of run.yaml\): cannot be read \(No such file or directory\)",
    ),
    "default that is a number": ("defaults: 5\n" + NEMO, "run.yaml: defaults has 5, which is no name of a file"),
    "default that is a table": ("defaults: {a: b}\n" + NEMO, "run.yaml: defaults has {'a': 'b'}, which is no name of a file"),
    "defaults in a circle": ("defaults: run.yaml\n" + NEMO, "includes more than 100 files; remove the cycle of files"),
    "text instead of a size": (
        changed(NEMO, "model_parallel_size: 1, p", "model_parallel_size: two, p"),
        "'two' is not an integer",
    ),
    "negative batch": (changed(NEMO, "512\n  train_m", "-4\n  train_m"), "policy.train_global_batch_size: -4 is not a number of 1"),
    "no batch": (changed(NEMO, "  train_global_batch_size: 512\n", ""), "policy.train_global_batch_size: is missing; write"),
    "no nodes": (changed(NEMO, "num_nodes: 1", "num_nodes: 0"), "cluster.num_nodes: 0 is not a number of 1 or more"),
    "no cluster": (NEMO.partition("cluster")[0], r"cluster: is missing; write \+cluster.gpus_per_node=8"),
    "no model": (changed(NEMO, "  model_name: Qwen/Qwen2.5-1.5B\n", ""), "policy.model_name: is missing"),
    "unknown precision": (changed(NEMO, "bfloat16", "bf17"), "policy.precision: 'bf17' is not known; use one of bfloat16"),
    "section that is a text": (
        changed(NEMO, "{enabled: true", "{optimizer: adam, enabled: true"),
        "optimizer: is 'adam', which has no",
    ),
    "adapter without rank": (
        changed(NEMO, "{enabled: true", "{peft: {enabled: true}, enabled: true"),
        "policy.megatron_cfg.peft.dim: None is not a number of 1 or more",
    ),
    "packing without tokens": (
        changed(NEMO, "  precision", "  sequence_packing: {enabled: true, train_mb_tokens: 0}\n  precision"),
        "policy.sequence_packing.train_mb_tokens: 0 is not a number of 1 or more",
    ),
    "reference to nothing": (
        changed(NEMO, "Qwen/Qwen2.5-1.5B", "${a.b}"),
        "policy.model_name: .*refers to something that is not there",
    ),
    "variable that is not set": (
        changed(NEMO, "Qwen/Qwen2.5-1.5B", "${oc.env:MY_MODEL}"),
        r"policy.model_name: \$\{oc.env:MY_MODEL\} refers to something that is not there; set the key or the variable",
    ),
    "references in a circle": (
        changed(NEMO, "train_micro_batch_size: 4", "train_micro_batch_size: ${policy.train_micro_batch_size}"),
        "policy.train_micro_batch_size: .* is not a number of 1 or more",
    ),
    "reference without an end": (
        changed(NEMO, "512\n  train_m", '"${mul:2"\n  train_m'),
        r"policy.train_global_batch_size: cannot be read \(missing BRACE_CLOSE.*correct its value in run.yaml",
    ),
    "GPUs as code": (
        changed(ROLL, "list(range(0,16))", '''"__import__('os').mkdir('made')"'''),
        "actor_train.device_mapping: .* is no list of GPUs",
    ),
    "GPUs without number": (
        changed(ROLL, "  device_mapping: list(range(0,16))\n", ""),
        "actor_train.device_mapping: 'None' is no list",
    ),
    "billions of GPUs": (changed(ROLL, "0,16", "0,10000000000"), "actor_train.device_mapping: .* is no list of GPUs"),
    "steps that are a text": (
        changed(ROLL, "steps: 16", "steps: x"),
        "actor_train.training_args.gradient_accumulation_steps: 'x' is not a number of 1 or more",
    ),
    "strategy that is a list": (
        changed(ROLL, "{tensor_model_parallel_size: 2}", "[2]"),
        r"strategy_config: is \[2\], which has no keys",
    ),
    "other engine": (changed(ROLL, "megatron_train", "deepspeed_train"), "run.yaml: trains with deepspeed_train"),
    "missing default of Hydra": ("defaults:\n  - ../config/x@_here_\n" + ROLL, r"../config/x \(of run.yaml\): cannot be read"),
    "no train": (changed(BRIDGE, "train:", "trainx:"), "the configuration: has no model or no train"),
    "unknown mixed precision": (BRIDGE + "mixed_precision: bf17\n", "mixed_precision: 'bf17' is not known; use one of bf16_mixed"),
    "vocabulary that is a text": (changed(BRIDGE, "512", "lots"), "model.vocab_size: 'lots' is not a number of 1 or more"),
    "Primus elsewhere": (
        "modules: {pre_trainer: {framework: megatron, config: a.yaml, model: b.yaml}}\n",
        "run.yaml: needs the folder primus/configs, which was not found; .* set PRIMUS_PATH",
    ),
    "Primus with a variable": (
        "modules: {pre_trainer: {framework: '${F}'}}\n",
        "run.yaml: uses the environment variable F, which is not",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_fault_is_an_error_of_one_line(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    write(tmp_path, {"run.yaml": text})
    with pytest.raises(InputError) as caught:
        job(tmp_path, "run.yaml")
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("text", "word", "message"),
    [
        (NEMO, "foo", "foo: is no override of run.yaml; write KEY=VALUE"),
        (NEMO, f"{TP}=", f"{TP}: has no value; write {TP}=VALUE"),
        (NEMO, "policy.model_name.x=3", "policy.model_name.x: model_name has no keys"),
        (NEMO, "policyx.precision=float16", r"is no key of run.yaml; write policy.precision, or add it with \+policyx"),
        (NEMO, f"{TP[:-1]}=2", f"is no key of run.yaml; write {TP}, or add it"),
        (NEMO, "training.steps=2", r"training.steps: is no key of run.yaml; add it with \+training.steps=2"),
        (NEMO, f"{TP}=two", "'two' is not an integer"),
        (BRIDGE, "train.micro_batchsize=2", "is no key of run.yaml; write train.micro_batch_size, or add"),
        (BRIDGE, "trainx.micro_batch_size=2", "is no key of run.yaml; write train.micro_batch_size, or add"),
        (BRIDGE, "--micro", r"--micro"),
        (ROLL, "sequence_lenght=8192", "is no key of run.yaml; write sequence_length, or add"),
    ],
)
def test_an_override_with_a_fault_is_an_error(text: str, word: str, message: str, tmp_path: Path) -> None:
    write(tmp_path, {"run.yaml": text})
    with pytest.raises(InputError, match=message):
        job(tmp_path, "run.yaml", word)


def test_a_plus_adds_a_key(tmp_path: Path) -> None:
    """As in Hydra: only with + or ++ may an override add a section, or a key that is similar to one that is there."""
    write(tmp_path, {"run.yaml": NEMO})
    assert job(tmp_path, "run.yaml", "+training.steps=2", "++policy.megatron_cfg.context_parallel_size=2").parallel.context == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("foo", "foo: is neither a setting of verl nor an option; write NAME=VALUE"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_sizes=4",
            "is not a setting of verl; write actor_rollout_ref.actor.ppo_mini_batch_size=4",
        ),
        ("actor_rolout_ref.rollout.n=4", "is not a setting of verl; write actor_rollout_ref.rollout.n=4"),
        ("trainer.nnodes=0", "trainer.nnodes: '0' is not a number of 1 or more"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=lots", "'lots' is not a number from 0 to 1"),
    ],
)
def test_a_setting_of_verl_with_a_fault_is_an_error(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job(tmp_path, *VERL.split(), word)


def test_code_of_a_file_does_not_run(tmp_path: Path) -> None:
    """Tags of Python are read as plain values."""
    write(tmp_path, {"run.yaml": NEMO + "x: !!python/object/apply:os.mkdir [made]\ny: !!python/name:os.system\n"})
    assert job(tmp_path, "run.yaml").parallel.world_size == 8
    assert not (tmp_path / "made").exists()
    assert not Path("made").exists()
