"""The command line with `--info-record` and `--info-engine`, without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

from analyzer.errors import AnalyzerError
from analyzer.trace.reader import Label, read_trace
from tests.command import assert_refused, run, torchrun
from tests.data_files import truth_records

MODEL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 999 --info-gpu H100-80GB"
).split()
HAS_SHADOW = all(find_spec(package) for package in ("torch", "megatron", "transformer_engine"))


@pytest.mark.shadow
@pytest.mark.skipif(not HAS_SHADOW, reason="the shadow extra is not installed")
def test_a_recorded_trace_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = tmp_path / "step.trace"
    done = run(*torchrun(8), *MODEL, "--tensor-model-parallel-size", "2", "--info-record", str(trace), "--info-rank", "3")
    assert done.status == 0
    assert "rank 3, recorded by the shadow recorder" in done.err
    assert read_trace(trace).header.rank == 3
    checked = run("--info-check", str(trace), "--info-tolerance", "0.001")
    assert checked.status == 0, checked.out
    assert "Everything agrees within 0.10%" in checked.out
    other = run("--info-check", str(trace), *torchrun(8), *MODEL, "--tensor-model-parallel-size", "1")
    assert other.status == 3


@pytest.mark.shadow
@pytest.mark.skipif(not HAS_SHADOW, reason="the shadow extra is not installed")
def test_a_shortened_model_is_checked_with_its_recorded_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = tmp_path / "step.trace"
    assert run(*torchrun(1), *MODEL, "--info-record", str(trace), "--info-layers", "1").status == 0
    checked = run("--info-check", str(trace))
    assert checked.status == 0, checked.out
    assert "decoder.layers.0" in checked.out
    assert "decoder.layers.1" not in checked.out


@pytest.mark.shadow
@pytest.mark.skipif(not HAS_SHADOW, reason="the shadow extra is not installed")
def test_the_shadow_engine_gives_a_report_with_the_same_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    argv = (*torchrun(4), *MODEL, "--pipeline-model-parallel-size", "2", "--global-batch-size", "4")
    shadow = run(*argv, "--info-engine", "shadow", "--info-json", "-").report
    formula = run(*argv, "--info-json", "-").report
    assert shadow["engine"] == "shadow"
    assert set(formula) == set(shadow)
    assert [rank["ranks"] for rank in shadow["ranks"]] == [rank["ranks"] for rank in formula["ranks"]]
    assert len(shadow["timelines"]) == 2
    for rank in shadow["ranks"]:
        memory = rank["memory"]
        parts = memory["parameters_bytes"] + memory["gradients_bytes"] + memory["optimizer_bytes"] + memory["runtime_bytes"]
        assert parts == memory["allocated_bytes"]
        assert parts + memory["activations_bytes"] + memory["transient_bytes"] == memory["peak_allocated_bytes"]


@pytest.mark.shadow
@pytest.mark.skipif(not HAS_SHADOW, reason="the shadow extra is not installed")
@pytest.mark.parametrize("model", ["gpt2-345m", "qwen2.5-0.5b"])
def test_recorded_parameters_are_those_of_megatron(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/data/truth/parameters.json contains the parameters of `get_model` on each pipeline rank."""
    records = truth_records("parameters.json")
    record = next(each for each in records if each["model"] == model and each["layout"]["pp"] > 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for truth in record["per_pp_rank"]:
        trace = tmp_path / f"{truth['pp_rank']}.trace"
        where = ("--info-record", str(trace), "--info-rank", str(truth["global_rank"]))
        assert run(*torchrun(record["world_size"]), *record["argv"], *where).status == 0
        labels = {event.name: event for event in read_trace(trace) if isinstance(event, Label) and event.role == "parameter"}
        weights = [label for name, label in labels.items() if not name.startswith("buffer ")]
        assert sum(prod(label.shape) for label in weights) == truth["total"]


@pytest.mark.skipif(HAS_SHADOW, reason="the shadow extra is installed")
@pytest.mark.parametrize("option", [("--info-engine", "shadow"), ("--info-engine", "both"), ("--info-record", "x.trace")])
def test_without_the_shadow_extra_the_error_names_the_package_to_install(option: tuple[str, str]) -> None:
    outcome = run(*torchrun(1), *MODEL, *option)
    assert outcome.status == 2
    assert "pip install" in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_rank_outside_the_world_is_an_error() -> None:
    assert_refused(run(*torchrun(1), *MODEL, "--info-record", "x.trace", "--info-rank", "1"), "--info-rank")


@pytest.mark.parametrize("option", [("--info-allocator", "malloc"), ("--info-allocator", "malloc", "--info-record", "x.trace")])
def test_an_allocator_without_a_gpu_is_an_error(option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analyzer.cli.record.has_gpu", lambda: False)
    assert_refused(run(*torchrun(1), *MODEL, *option), "--info-allocator")


@pytest.mark.parametrize(
    ("given", "mode"), [((), "pool"), (("--info-allocator", "pool"), "pool"), (("--info-allocator", "malloc"), "malloc")]
)
def test_the_cuda_recorder_uses_the_requested_allocator(
    given: tuple[str, ...], mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def record(_job: object, *, path: Path, mode: str, **_rest: object) -> None:
        modes.append(mode)
        path.write_bytes(b"trace")

    modes: list[str] = []
    trace = tmp_path / "x.trace"
    monkeypatch.setattr("analyzer.cli.record.has_gpu", lambda: True)
    monkeypatch.setattr("allocator_hook.cuda.session.record_on_gpu", record)
    assert run(*torchrun(1), *MODEL, "--info-record", str(trace), *given).status == 0
    assert modes == [mode]
    assert [path.name for path in tmp_path.iterdir()] == ["x.trace"]


def test_a_failed_recording_keeps_the_older_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def record(_job: object, *, path: Path, **_rest: object) -> None:
        path.write_bytes(b"half")
        raise AnalyzerError("out of memory")

    monkeypatch.setattr("analyzer.cli.record.has_gpu", lambda: True)
    monkeypatch.setattr("allocator_hook.cuda.session.record_on_gpu", record)
    trace = tmp_path / "x.trace"
    assert run(*torchrun(1), *MODEL, "--info-record", str(trace)).status == 2
    assert not list(tmp_path.iterdir())
    trace.write_bytes(b"older")
    assert run(*torchrun(1), *MODEL, "--info-record", str(trace)).status == 2
    assert trace.read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1


def test_more_layers_than_the_model_has_are_an_error() -> None:
    assert_refused(run(*torchrun(1), *MODEL, "--info-record", "x.trace", "--info-layers", "5"), "--info-layers")
