"""Random command lines, environments and files give a report or an error of one line, whatever they contain."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from allocator_hook.trace_writer import TraceWriter
from analyzer.launch.model_config.published import published_names, read_configuration
from analyzer.trace.events import Header
from tests.command import Outcome, run
from tests.data_files import DATA
from tests.fuzz.budget import examples
from tests.fuzz.invariants import check_outcome, check_report, parsed
from tests.fuzz.strategies import (
    ENVIRONMENTS,
    FEATURES,
    JSON_VALUES,
    LAUNCHERS,
    LONG,
    PLAIN,
    altered,
    mutated_launches,
    nearly_valid_launches,
)

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
    "--global-batch-size 8 --bf16 --lr 1e-4 --train-iters 10"
).split()
WORLD = ["--nproc-per-node", "8", "pretrain_gpt.py"]
VOCABULARY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


HYBRID = "--num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --expert-model-parallel-size 8"


def checked(*words: str) -> Outcome:
    """Run the program and check what holds for every run."""
    outcome = run(*words)
    check_outcome(outcome, notes="--info-print-options" in words)
    event("refused" if outcome.status == 2 else "accepted")
    return outcome


def check_json(words: list[str]) -> None:
    outcome = checked(*words, "--info-json", "-")
    if outcome.out.startswith("{"):
        document = parsed(outcome.out)
        if document["schema"] == "training-info/1":
            check_report(document)


@examples(1)
@given(mutated_launches())
def test_any_options(words: list[str]) -> None:
    check_json(words)


@examples(1)
@given(nearly_valid_launches())
def test_any_option(words: list[str]) -> None:
    check_json(words)


@examples(0.25)
@given(st.one_of(mutated_launches(), nearly_valid_launches()))
def test_any_options_with_a_console_report(words: list[str]) -> None:
    checked(*words)


@examples(0.5)
@given(st.sampled_from((*LAUNCHERS, ())), st.sampled_from(("", HYBRID, *FEATURES)), ENVIRONMENTS)
def test_any_environment(launcher: tuple[str, ...], feature: str, environment: dict[str, str]) -> None:
    words = [*launcher, *PLAIN.split(), *feature.split()]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        check_json(words)
        checked(*words)


HETEROGENEOUS = json.loads((DATA / "different_layers.json").read_text())
CONFIGURATIONS = [dict(read_configuration(name, folder=Path()).values) for name in sorted(set(published_names().values()))]
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "c"}],
}
JOINED = st.one_of(st.binary(max_size=40), st.sampled_from([word.encode() for word in LONG] + [b"[" * 100_000, b'{"a":' * 100_000]))


def contents(*documents: Any) -> st.SearchStrategy[bytes]:
    """Contents of a JSON file: one of `documents` with changes, any JSON, or no JSON."""
    changed = st.sampled_from(documents).flatmap(altered)
    written = st.one_of(changed, changed, changed, JSON_VALUES).map(
        lambda value: json.dumps(value).encode("utf-8", "surrogatepass")
    )
    return st.one_of(written, written, written, JOINED)


@examples(0.25)
@given(contents(*CONFIGURATIONS))
def test_any_configuration_of_a_model(content: bytes) -> None:
    Path("config.json").write_bytes(content)
    checked(*WORLD, "--info-model", "config.json", *MODEL[MODEL.index("--seq-length") :], *VOCABULARY)


LAYERS = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --position-embedding-type rope --swiglu --bf16 "
    "--use-rotary-position-embeddings --use-rope-scaling --normalization RMSNorm --disable-bias-linear --lr 1 "
    "--train-iters 10 --untie-embeddings-and-output-weights"
)


@examples(0.15)
@given(contents(HETEROGENEOUS))
def test_any_configuration_of_different_layers(content: bytes) -> None:
    Path("layers.json").write_bytes(content)
    checked(*WORLD, *LAYERS.split(), *VOCABULARY, "--heterogeneous-layers-config-path", "layers.json")


NAMES = ("tokenizer.json", "vocab.json", "added_tokens.json", "config.json", "tokenizer.model", "vocab.txt")
KINDS = ("HuggingFaceTokenizer", "SFTTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


@examples(0.25)
@given(
    st.dictionaries(st.sampled_from(NAMES), contents(TOKENIZER, {"a": 0, "b": 1}, {"vocab_size": 7}), min_size=1, max_size=3),
    st.sampled_from((*KINDS, "TikTokenizer", "GPT2BPETokenizer", "BertWordPieceLowerCase")),
    st.booleans(),
)
def test_any_tokenizer(files: dict[str, bytes], kind: str, as_file: bool) -> None:
    folder = Path("tokenizer")
    folder.mkdir(exist_ok=True)
    for name in os.listdir(folder):
        (folder / name).unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    path = str(folder / sorted(files)[0]) if as_file else str(folder)
    checked(*WORLD, *MODEL, "--tokenizer-type", kind, "--tokenizer-model", path, "--vocab-file", path, "--merge-file", path)


@examples(0.25)
@given(st.data())
def test_any_older_report(data: st.DataObject) -> None:
    words = [*WORLD, *MODEL, *VOCABULARY]
    report = json.loads(run(*words, "--info-json", "-").out)
    for name in ("communication", "groups", "assumptions"):
        report[name] = report[name][:2] if isinstance(report[name], list) else report[name]
    Path("old.json").write_bytes(data.draw(contents(report)))
    outcome = checked(*words, "--info-against", "old.json", *data.draw(st.sampled_from(([], ["--info-json", "-"]))))
    if outcome.out.startswith("{"):
        check_report(parsed(outcome.out))


HOST_FILES = st.one_of(
    st.text("worker12 =slots\n#,:0²", max_size=40).map(str.encode),
    st.sampled_from([b"a slots=" + b"9" * 5000, b"num_processes: " + b"9" * 5000, b"a slots=8\nb slots=4\n", b"\xff slots=\xff"]),
    JOINED,
)


@examples(0.15)
@given(HOST_FILES, st.sampled_from(("deepspeed --hostfile hosts", "accelerate launch --config_file hosts", "--hostfile hosts")))
def test_any_file_of_a_launcher(content: bytes, launcher: str) -> None:
    Path("hosts").write_bytes(content)
    checked(*launcher.split(), "pretrain_gpt.py", *MODEL, *VOCABULARY)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` with changed, removed and added bytes."""
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(content)))
        content = content[:place] + draw(st.binary(max_size=3)) + content[place + draw(st.integers(0, 4)) :]
    return content if draw(st.integers(0, 4)) else content[: draw(st.integers(0, len(content)))]


ARGUMENTS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "swiglu": True, "group_query_attention": True,
    "num_query_groups": 4, "position_embedding_type": "rope", "tensor_model_parallel_size": 2, "padded_vocab_size": 50688,
    "spec": ["a", "b"], "moe_layer_freq": None, "ffn_hidden_size": 512, "norm_epsilon": 1e-5, "num_experts": None,
}  # fmt: skip


@examples(0.15)
@given(altered(ARGUMENTS), st.sampled_from([b"12", b"12", b"12", b"release", b"-1", "²".encode(), b"9" * 5000, b"\xff"]), st.data())
def test_any_checkpoint(arguments: Any, tracker: bytes, data: st.DataObject) -> None:
    folder = Path("checkpoint/iter_0000012")
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_bytes(tracker)
    namespace = argparse.Namespace(**arguments) if isinstance(arguments, dict) else arguments
    pickled = data.draw(damaged(pickle.dumps({"args": namespace}, protocol=2)))
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    if data.draw(st.integers(0, 3)) == 3:
        (folder / "common.pt").write_bytes(data.draw(damaged((folder / "common.pt").read_bytes())))
    checked(*WORLD, *MODEL, *VOCABULARY, "--use-checkpoint-args", "--load", "checkpoint")


@examples(0.15)
@given(st.data())
def test_any_trace(data: st.DataObject) -> None:
    header = Header(recorder="shadow", argv=("get_training_info.py", *WORLD, *MODEL, *VOCABULARY))
    with TraceWriter(Path("trace"), header) as writer:
        for pointer in range(data.draw(st.integers(0, 3))):
            writer.free(pointer, time_ns=pointer)
    Path("trace").write_bytes(data.draw(damaged(Path("trace").read_bytes())))
    checked("--info-check", "trace", *data.draw(st.sampled_from(([], ["--info-allow-truncated"], [*WORLD, *MODEL, *VOCABULARY]))))
