"""Which words are launches of frameworks, and what other launches import."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allocator_hook.step.supported import check_supported
from analyzer.api import read_launch
from analyzer.errors import InputError, UnsupportedError
from analyzer.frameworks import yaml_files
from analyzer.frameworks.prepare import framework_of, prepare
from analyzer.frameworks.recognize import recognize
from analyzer.frameworks.script_words import words_of_script
from analyzer.memory.ranks import highest_rank
from analyzer.modules.kinds import ModuleKind
from analyzer.modules.tree import total_bytes
from analyzer.passes.stages import full_model, stage_models
from analyzer.predict.formula import predict
from analyzer.predict.parameter_counts import parameter_counts
from analyzer.script.stand_ins.python_command import trains
from tests.data_files import data_file
from tests.frameworks.files import batch, job, layout, write

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
)


@pytest.mark.parametrize(
    ("line", "framework", "words"),
    [
        ("-m verl.trainer.main_ppo trainer.nnodes=1", "verl", ("trainer.nnodes=1",)),
        ("--info-gpu H100-80GB examples/run_sft.py --config a.yaml", "nemo_rl", ("--config", "a.yaml")),
        ("examples/start_rlvr_pipeline.py --config_path a --config_name b", "roll", ("--config_path", "a", "--config_name", "b")),
        ("torchrun --nproc_per_node 8 scripts/performance/run_recipe.py -m llama3", "bridge", ("-m", "llama3")),
        ("torchrun primus/cli/main.py train pretrain --config a.yaml", "primus", ("train", "pretrain", "--config", "a.yaml")),
        ("megatron sft --model Qwen/Qwen3-8B", "ms_swift", ("--model", "Qwen/Qwen3-8B")),
        ("a.yaml x.y=1 --info-margin 5%", None, ("x.y=1",)),
    ],
)
def test_launches_of_frameworks_are_recognized(line: str, framework: str | None, words: tuple[str, ...]) -> None:
    found = recognize(line.split())
    assert found is not None
    assert (found.framework, found.words) == (framework, words)


@pytest.mark.parametrize(
    "line",
    [
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {MEGATRON}",
        f"{MEGATRON} --yaml-cfg config.yaml",
        f"train.py {MEGATRON} --tp-comm-overlap-cfg cfg.yaml",
        "--info-json report.yaml " + MEGATRON,
        "main.py " + MEGATRON,
    ],
)
def test_other_launches_are_left_as_they_are(line: str) -> None:
    assert recognize(line.split()) is None


@pytest.mark.parametrize("task", ["sft", "pt", "rlhf"])
def test_trainings_of_ms_swift_without_megatron_are_refused(task: str) -> None:
    """ROUTE_MAPPING of swift/cli/main.py: only those of swift/cli/_megatron train with Megatron-LM."""
    with pytest.raises(UnsupportedError, match="trains with the Trainer of transformers") as found:
        recognize(["swift", task, "--model", "Qwen/Qwen3-8B"])
    assert found.value.option == f"swift {task}"
    assert recognize(["megatron", task, "--model", "Qwen/Qwen3-8B"]) is not None


@pytest.mark.parametrize(
    ("tree", "framework"),
    [
        ({"modules": {}}, "primus"),
        ({"actor_rollout_ref": {}, "trainer": {}}, "verl"),
        ({"pretrain": "a", "actor_train": {}}, "roll"),
        ({"policy": {}}, "nemo_rl"),
        ({"defaults": "../base.yaml"}, "nemo_rl"),
        ({"model": {}, "ddp": {}, "train": {}}, "bridge"),
        ({"language_model": {}, "model_parallel": {}}, "megatron_yaml"),
        ({"model": "Qwen/Qwen3-8B", "tuner_type": "full"}, "ms_swift"),
        ({"services": {}}, None),
    ],
)
def test_keys_show_the_framework(tree: dict[str, object], framework: str | None) -> None:
    assert framework_of(tree) == framework


def test_a_file_of_no_framework_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"a.yaml": "services: {}\n", "b.yaml": "a: [\n", "c.yaml": "- 1\n"})
    for name, fault in (("a.yaml", "has keys of no known framework"), ("b.yaml", "is not YAML in line"), ("c.yaml", "has no keys")):
        with pytest.raises(InputError, match=fault):
            read_launch([name], environ={}, folder=tmp_path)


def test_aliases_inside_aliases_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 8)}]" for number in range(1, 12)]
    write(tmp_path, {"a.yaml": "\n".join(["policy: {}", *lines])})
    with pytest.raises(InputError, match="has more than"):
        read_launch(["a.yaml"], environ={}, folder=tmp_path)


def test_a_launch_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="starts Megatron-LM's own scripts only"):
        prepare(["a.yaml", "--info-launch"], environ={}, folder=tmp_path)


def test_without_omegaconf_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    with pytest.raises(InputError) as raised:
        yaml_files.resolve({"a": 1, "b": "${a}"}, "a.yaml", environ={})
    assert str(raised.value).count("\n") == 0
    assert "get-training-info[frameworks]" in raised.value.remedy


def test_references_are_resolved() -> None:
    pytest.importorskip("omegaconf")
    tree = {"a": 2, "b": "${mul:${a}, 3}", "c": "${oc.env:SIZE,4}", "d": "${missing}", "e": [{"f": "${a}"}]}
    found = yaml_files.resolve(tree, "a.yaml", environ={"SIZE": "5"})
    assert found == {"a": 2, "b": 6, "c": "5", "d": "${missing}", "e": [{"f": 2}]}


def test_numbers_with_exponents_are_numbers() -> None:
    assert yaml_files.parse_value("1e-5") == 1e-5
    assert yaml_files.parse_value("[1, a]") == [1, "a"]


def test_a_file_of_ms_swift_is_its_command_line(tmp_path: Path) -> None:
    content = (
        "model: Qwen/Qwen3-8B\ntuner_type: full\ntensor_model_parallel_size: 2\nsequence_parallel: true\n"
        "micro_batch_size: 2\nglobal_batch_size: 32\nmax_length: 2048\nrecompute_granularity: full\n"
        "recompute_method: uniform\nrecompute_num_layers: 1\n"
    )
    write(tmp_path, {"sft.yaml": content})
    for words in (("sft.yaml",), ("megatron", "sft", "sft.yaml")):
        found = job(tmp_path, *words, "--info-world-size", "8")
        assert layout(found)[:3] == (8, 2, 1)
        assert batch(found) == (2, 32, 2048)
        assert found.recompute.granularity == "full"
        assert found.withheld == ()


def test_a_reference_model_has_the_weights_of_the_trained_one(tmp_path: Path) -> None:
    """A sample of DPO is a chosen and a rejected sequence. A frozen copy of the model in bf16 stays on the GPU, unless adapters are
    trained: then the reference is the model without them (swift/megatron/trainers/rlhf_mixin.py of ms-swift 4.6).
    """
    words = "megatron rlhf --model Qwen/Qwen3-8B --micro_batch_size 1 --global_batch_size 16 --max_length 2048 --rlhf_type".split()
    dpo = job(tmp_path, *words, "dpo", "--info-world-size", "8")
    assert batch(dpo) == (2, 32, 2048)
    assert dpo.tuning.method == "DPO"
    assert dpo.withheld == ()
    parts = {part.name: part.bytes for part in highest_rank(dpo).memory.runtime_parts}
    assert parts["weights of the reference model"] == pytest.approx(2 * 8_190_735_360, abs=512 * 1000)
    lora = job(tmp_path, *words, "kto", "--tuner_type", "lora", "--info-world-size", "8")
    assert lora.tuning.beside == ()
    assert lora.withheld == ()


def test_a_second_sequence_of_kto_needs_no_gradients(tmp_path: Path) -> None:
    words = "megatron rlhf --rlhf_type kto --model Qwen/Qwen3-8B --micro_batch_size 2 --global_batch_size 16 --max_length 2048"
    assert batch(job(tmp_path, *words.split(), "--info-world-size", "8")) == (2, 16, 2048)


@pytest.mark.parametrize(
    ("options", "outputs", "embeddings"),
    [("task_type: seq_cls\nnum_labels: 5\n", 5, 1), ("task_type: embedding\n", 0, 1), ("rlhf_type: rm\n", 1, 1), ("", None, 2)],
)
def test_heads_of_few_outputs_replace_the_output_layer(tmp_path: Path, options: str, outputs: int | None, embeddings: int) -> None:
    """`GPTModel.__init__` of mcore-bridge. Qwen3-8B: 151936 tokens, a hidden size of 4096, and 6,946,075,648 other parameters."""
    sizes = "model: Qwen/Qwen3-8B\nmax_length: 512\nmicro_batch_size: 2\ntensor_model_parallel_size: 4\npacking: true\n"
    write(tmp_path, {"train.yaml": sizes + options})
    found = job(tmp_path, "megatron", "rlhf" if "rlhf" in options else "sft", "train.yaml", "--info-world-size", "8")
    assert found.model.head_outputs == outputs
    assert found.withheld == ()
    check_supported(found)
    counted = parameter_counts(found.model, full_model(found)).unpadded
    assert counted == 6_946_075_648 + 151936 * 4096 * embeddings + 4096 * (outputs or 0)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("--task_type embedding --model Qwen/Qwen3-Embedding-8B", 8_188_515_328 - 151665 * 4096),
        ("--task_type generative_reranker --model Qwen/Qwen3-Reranker-8B", 8_188_548_096),
        ("--task_type embedding --model Qwen/Qwen3-Embedding-0.6B", 595_776_512),
        ("--task_type embedding --model Qwen/Qwen3-VL-Embedding-8B", 8_767_123_696 - 151936 * 4096),
        ("--task_type generative_reranker --model Qwen/Qwen3-VL-Reranker-2B", 2_127_532_032),
    ],
)
def test_embeddings_and_rerankers_of_qwen_are_known_by_name(tmp_path: Path, words: str, count: int) -> None:
    """Parameters of the model classes of transformers. Embeddings have no output layer; that of 0.6B is tied."""
    found = job(tmp_path, *f"megatron sft {words} --micro_batch_size 1 --packing true --info-world-size 1".split())
    assert found.withheld == ()
    assert parameter_counts(found.model, full_model(found)).unpadded == count


GLM = "--model zai-org/GLM-4-9B-0414 --micro_batch_size 1 --global_batch_size 8 --max_length 512 --packing true --info-world-size 8"


def test_norms_after_attention_and_ffn_are_those_of_the_framework(tmp_path: Path) -> None:
    """`Glm4SelfAttention` and `Glm4MLP` of mcore-bridge: each of 40 layers has two more norms of 4096 elements."""
    found = job(tmp_path, "megatron", "sft", *GLM.split())
    assert found.model.branch_norms
    assert found.withheld == ()
    check_supported(found)
    counts = json.loads(data_file("published_models.json").read_text())["parameters"]
    assert parameter_counts(found.model, full_model(found)).unpadded == counts["zai-org/GLM-4-9B-0414"]
    plain = replace(found.model, branch_norms=False)
    without = parameter_counts(plain, full_model(replace(found, model=plain))).unpadded
    assert counts["zai-org/GLM-4-9B-0414"] - without == 40 * 2 * 4096


def test_norms_after_attention_and_ffn_that_no_layer_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="norms after attention and FFN, which layers of Megatron-LM do not have"):
        job(tmp_path, "--nproc-per-node", "8", "--info-model", "zai-org/GLM-4-9B-0414")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--recompute_granularity selective --recompute_modules mlp", "with recomputed norms or FFN"),
        ("--mtp_num_layers 1", "with MTP layers"),
    ],
)
def test_such_norms_get_no_verdict_where_they_were_not_compared(tmp_path: Path, options: str, reason: str) -> None:
    found = job(tmp_path, "megatron", "sft", *GLM.split(), *options.split())
    assert found.withheld == (f"norms after attention and FFN are not modelled {reason}",)


def test_options_of_slime_for_these_norms_are_read(tmp_path: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --bf16"
    words = f"{sizes} --micro-batch-size 1 --rollout-batch-size 8 --vocab-size 1000 --tokenizer-type NullTokenizer"
    both = ("--post-self-attn-layernorm", "--post-mlp-layernorm")
    assert job(tmp_path, "train.py", *words.split(), *both, "--info-world-size", "1").model.branch_norms
    assert not job(tmp_path, "train.py", *words.split(), "--info-world-size", "1").model.branch_norms


def test_a_generative_reranker_gathers_the_logits_and_has_a_gradient_of_all_for_each_of_two_tokens(tmp_path: Path) -> None:
    """`GPTModel._postprocess` of mcore-bridge. Qwen3-8B has 151,936 tokens, padded to 152,064; 512 tokens of 2 samples; bf16."""
    words = (
        "megatron sft --task_type generative_reranker --model Qwen/Qwen3-8B --micro_batch_size 2 --max_length 512 --packing true"
    )
    found = job(tmp_path, *words.split(), "--tensor_model_parallel_size", "4", "--info-world-size", "8")
    assert found.withheld == ()
    check_supported(found)
    score = next(module for _, module in stage_models(found)[0].trees[0].walk() if module.kind is ModuleKind.TOKEN_SCORE)
    logits = 2 * 2 * 512 * found.model.padded_vocab_size
    assert total_bytes(score.forward_workspace) == logits // 4 + 2 * logits
    assert total_bytes(score.backward_workspace) == 2 * logits


def test_messages_of_a_reference_model_get_no_verdict(tmp_path: Path) -> None:
    words = "megatron rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --pipeline_model_parallel_size 2 --max_length 2048"
    found = job(tmp_path, *words.split(), "--info-world-size", "8")
    assert found.not_counted == ("the messages of the reference model between pipeline stages are not counted (DPO)",)


@pytest.mark.parametrize(("packing", "state"), [("true", "does not fit"), ("false", None)])
def test_samples_that_may_be_shorter_are_not_judged_not_to_fit(tmp_path: Path, packing: str, state: str | None) -> None:
    words = "megatron sft --model Qwen/Qwen3-8B --micro_batch_size 8 --global_batch_size 64 --max_length 32768 --info-gpu H100-80GB"
    verdict = predict(job(tmp_path, *words.split(), "--packing", packing, "--info-world-size", "8")).verdict
    assert verdict.state == state
    assert ("longest length" in verdict.withheld) is (state is None)


def test_a_file_of_megatron_is_read_as_yaml_cfg(tmp_path: Path) -> None:
    write(tmp_path, {"gpt.yaml": "language_model: {}\nmodel_parallel: {}\n"})
    prepared = prepare(["gpt.yaml"], environ={}, folder=tmp_path)
    assert prepared.argv == ("--yaml-cfg", "gpt.yaml")


def test_a_plain_launch_imports_neither_yaml_nor_omegaconf() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom analyzer.api import read_launch\n"
        f"read_launch('{MEGATRON} --tokenizer-type NullTokenizer --vocab-size 512'.split(), environ={{}}, folder=Path('/'))\n"
        "names = {'yaml', 'omegaconf', 'analyzer.frameworks.yaml_files', 'analyzer.frameworks.nemo_rl'}\n"
        "print(*sorted(names & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "words", "found"),
    [
        ("run_grpo_math.py", ["--config", "a.yaml"], True),
        ("run_grpo_math.py", ["--help"], False),
        ("run_sft.py", ["--config=a.yaml"], True),
        ("start_rlvr_pipeline.py", ["--config_path", "a", "--config_name", "b"], True),
        ("setup_experiment.py", ["--recipe", "llama3_8b"], True),
        ("run_grpo_report.py", ["--output", "a"], False),
    ],
)
def test_scripts_of_frameworks_are_trainings(name: str, words: list[str], found: bool) -> None:
    assert trains(name, words) == found


def test_a_script_of_ms_swift_keeps_its_task(tmp_path: Path) -> None:
    """`megatron rlhf` without --rlhf_type trains with DPO, the default of ms-swift."""
    rest = "--model Qwen/Qwen3-8B --micro_batch_size 1 --global_batch_size 16 --max_length 2048"
    for task, sequences in (("sft", 1), ("rlhf", 2)):
        (tmp_path / "train.sh").write_text(f"NPROC_PER_NODE=8 megatron {task} {rest}\n")
        with words_of_script(["train.sh"], environ={}, folder=tmp_path) as found:
            launch = read_launch(found.words, environ=found.environ, folder=tmp_path)
        assert launch.framework == "ms_swift"
        assert launch.job.tuning.sequences_per_sample == sequences
