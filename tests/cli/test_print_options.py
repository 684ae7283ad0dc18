"""`--info-print-options`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from analyzer import analyze
from analyzer.cli.main import main
from analyzer.cli.print_options import WIDTH, lines_of
from analyzer.results import Report
from tests.command import run
from tests.test_structure import ROOT

MODELS = (
    "meta-llama/Llama-3.2-1B",
    "openai-community/gpt2",
    "deepseek-ai/DeepSeek-V2-Lite",
    pytest.param("openai/gpt-oss-20b", marks=pytest.mark.slow),
    "google/gemma-2b",
)


def printed(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*line.split(), "--info-print-options"]) == 0
    return capsys.readouterr().out


def without_assumptions(report: Report) -> Report:
    job = dataclasses.replace(report.job, assumptions=())
    return dataclasses.replace(report, job=job, assumptions=())


@pytest.mark.parametrize("model", MODELS)
def test_the_printed_options_give_the_same_report(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    launch = "--nproc-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 1024"
    text = printed(f"{launch} --info-model {model}", capsys)
    assert max(map(len, text.splitlines())) <= WIDTH
    given = analyze(f"{launch} --info-model {model}", gpu="H100-80GB", environ={}, folder="/nowhere")
    again = analyze(f"--nproc-per-node 8 {text}", gpu="H100-80GB", environ={}, folder="/nowhere")
    assert without_assumptions(again) == without_assumptions(given)


def test_an_option_is_printed_once_with_the_value_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(printed("--info-model gpt2 --num-layers 3 --num-layers=5 --bf16", capsys))
    assert [word for word in words if word.startswith("--num-layers")] == ["--num-layers=5"]
    assert words.count("--bf16") == 1


def test_differences_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--info-model", "google/gemma-2b", "--info-print-options"]) == 0
    captured = capsys.readouterr()
    assert "--quick-geglu stands for its gate with GELU" in captured.err
    assert "stands" not in captured.out


def test_a_launch_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("--nproc-per-node 8 pretrain_gpt.py --num-layers 2 --bf16", capsys) == "--num-layers 2 --bf16\n"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--info-model", "no-such-model", "--info-print-options"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_values_are_quoted_and_long_options_have_their_own_line(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * WIDTH))
    assert lines_of(["--moe-layer-freq", "([0]*1+[1]*2)", "--data-path", path, "--bf16"]) == [
        "--moe-layer-freq '([0]*1+[1]*2)'",
        f"--data-path {path}",
        "--bf16",
    ]


def test_the_page_shows_the_output_of_its_command() -> None:
    section = (ROOT / "docs" / "howto" / "model.md").read_text()
    command, shown = section.split("```")[1], section.split("```")[3].removeprefix("text")
    done = run(*shlex.split(command.removeprefix("bash"))[1:])
    assert shown.strip() in done.out


def test_what_no_option_says_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`no_fp8_weight_transpose_cache` of Primus."""
    keys = "num_layers: 2, hidden_size: 512, num_attention_heads: 8, seq_length: 512, max_position_embeddings: 512, lr: 1e-4"
    batch = "micro_batch_size: 1, global_batch_size: 8, tokenizer_type: NullTokenizer, vocab_size: 1000, bf16: true, fp8: hybrid"
    text = f"modules: {{pre_trainer: {{framework: megatron, overrides: {{{keys}, {batch}, no_fp8_weight_transpose_cache: true}}}}}}"
    file = tmp_path / "pretrain.yaml"
    for written, noted in ((text, True), (text.replace("cache: true", "cache: false"), False)):
        file.write_text(written)
        assert main([str(file), "--info-gpu", "MI300X", "--info-print-options"]) == 0
        assert ("transposed copies of weights in FP8 are freed" in capsys.readouterr().err) is noted
