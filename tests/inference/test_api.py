"""The Python API of inference: the same documents as the command line, errors, and what is imported."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import analyzer
from analyzer.errors import InputError
from analyzer.inference.offload.estimate import NoPolicyFitsError
from analyzer.report.json.inference import inference_json
from analyzer.report.json.offload import offload_json
from tests.command import report, run
from tests.job_of import BASE
from tools.update_examples import command_of

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "--info-model meta-llama/Llama-3.1-8B --info-world-size 2 --tensor-model-parallel-size 2"
OPT = "--info-model facebook/opt-30b --info-world-size 1"
POLICY = "weights=20/80/0,cache=0/100/0,activations=0/100/0,batches=3,attention=cpu"
TRAINING = f"--nproc-per-node 8 pretrain_gpt.py {BASE} --global-batch-size 64"


def without_command(document: dict[str, Any]) -> dict[str, Any]:
    """The document as it is read, without the words of the launch."""
    read: dict[str, Any] = json.loads(json.dumps(document))
    del read["command"]
    return read


def test_a_report_is_the_document_of_the_command_line() -> None:
    found = analyzer.analyze_inference(LLAMA, batch=8, prompt=2048, generate=256, quantize="w4a16kv8", gpu="H100-80GB")
    words = f"{LLAMA} --info-inference batch=8,prompt=2048,generate=256 --info-quantize w4a16kv8 --info-gpu H100-80GB".split()
    assert without_command(inference_json(found)) == without_command(report(*words))
    assert analyzer.analyze_inference(words) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.parameters = 1  # type: ignore[misc]


def test_a_report_of_offloading_is_the_document_of_the_command_line() -> None:
    found = analyzer.analyze_offload(OPT, policy=POLICY, batch=144, prompt=512, generate=32, gpu="T4")
    words = f"{OPT} --info-gpu T4 --info-inference batch=144,prompt=512,generate=32 --info-offload {POLICY}".split()
    assert without_command(offload_json(found)) == without_command(report(*words))
    assert analyzer.analyze_offload(words) == found


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("generate_llama3_70b", "generate_mixtral_8x7b")),
        "generate_opt_30b",
    ],
)
def test_the_examples(name: str) -> None:
    """The launch of each script, with the options of the command in its comment."""
    script = ROOT / "examples" / f"{name}.sh"
    options = shlex.split(command_of(script))[3:]
    (line,) = (line for line in run(str(script), "--info-dry").out.splitlines() if line.startswith("torchrun "))
    words = [*shlex.split(line)[1:], *options]
    printed = json.loads(run(str(script), *options, "--info-json", "-").out)
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if "--info-offload" in options:
        document = offload_json(analyzer.analyze_offload(words, environ=environ))
    else:
        document = inference_json(analyzer.analyze_inference(words, environ=environ))
    assert document["command"] == words
    assert without_command(document) == without_command(printed)


@pytest.mark.parametrize("call", [analyzer.analyze, analyzer.search])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--info-inference batch=1,prompt=8,generate=8", "--info-inference: asks for inference; call analyze_inference"),
        ("tools/run_text_generation_server.py", "run_text_generation_server: asks for inference; call analyze_inference"),
        ("--info-quantize w4a16", "--info-quantize: is only used with --info-inference"),
        ("--info-offload search", "--info-offload: is only used with --info-inference"),
    ],
)
def test_functions_for_a_training_refuse_inference(call: object, options: str, named: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=named):
        call(f"{TRAINING} {options}")


def test_what_is_missing_or_given_twice_is_named() -> None:
    with pytest.raises(InputError, match=r"--info-inference: it is not given; give batch, prompt and generate"):
        analyzer.analyze_inference(LLAMA)
    with pytest.raises(InputError, match=r"--info-inference: it does not give generate"):
        analyzer.analyze_inference(LLAMA, batch=1, prompt=8)
    with pytest.raises(InputError, match=r"--info-inference: 'batch=0'"):
        analyzer.analyze_inference(LLAMA, batch=0, prompt=8, generate=8)
    with pytest.raises(InputError, match=r"--info-inference: is given in argv and as an argument"):
        analyzer.analyze_inference(f"{LLAMA} --info-inference batch=1,prompt=8,generate=8", batch=1, prompt=8, generate=8)
    with pytest.raises(InputError, match=r"--info-offload: it is not given"):
        analyzer.analyze_offload(OPT, batch=1, prompt=8, generate=8, gpu="T4")
    with pytest.raises(InputError, match=r"--info-offload: has a report of its own; call analyze_offload"):
        analyzer.analyze_inference(f"{OPT} --info-offload {POLICY}", batch=144, prompt=8, generate=8, gpu="T4")
    with pytest.raises(InputError, match=r"--info-json: belongs to the command line"):
        analyzer.analyze_inference(f"{LLAMA} --info-json -", batch=1, prompt=8, generate=8)
    with pytest.raises(InputError, match=r"--info-search: is for the analysis of a training"):
        analyzer.analyze_inference(f"{LLAMA} --info-search", batch=1, prompt=8, generate=8)


def test_a_search_in_which_nothing_fits_raises() -> None:
    pytest.importorskip("scipy")
    with pytest.raises(NoPolicyFitsError, match="no policy fits"):
        analyzer.analyze_offload(OPT, policy="search,host-memory=9,disk=1", batch=2, prompt=8, generate=8, gpu="T4")


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    analyzer.analyze_inference(LLAMA, batch=1, prompt=8, generate=8)
    assert capsys.readouterr() == ("", "")


def modules_of(program: str) -> set[str]:
    """The modules that are loaded after a program."""
    text = f"import sys\n{program}\nprint(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.slow
def test_a_training_imports_no_module_of_inference() -> None:
    inference = f"{LLAMA} --info-inference batch=1,prompt=8,generate=8"
    loaded = modules_of(f"import get_training_info\nget_training_info.main({inference.split()!r})")
    assert {"analyzer.inference.estimate", "analyzer.cli.inference"} <= loaded
    for program in (
        f"import get_training_info\nget_training_info.main({[*TRAINING.split(), '--info-gpu', 'H100-80GB']!r})",
        f"import analyzer\nanalyzer.analyze({TRAINING!r}, gpu='H100-80GB')",
        "from analyzer import analyze_inference, analyze_offload",
    ):
        loaded = modules_of(program)
        assert "analyzer.api" in loaded
        # the records of a job and the values of the options are read for every launch
        assert {name for name in loaded if "inference" in name and name.startswith("analyzer.")} <= {
            "analyzer.specs.inference",
            "analyzer.launch.inference",
            "analyzer.launch.inference.options",
            "analyzer.launch.inference.offload_options",
            "analyzer.launch.inference.serving_options",
        }


def test_a_generation_without_offloading_imports_no_module_of_offloading() -> None:
    loaded = modules_of(f"import analyzer\nanalyzer.analyze_inference({LLAMA!r}, batch=1, prompt=8, generate=8)")
    assert "analyzer.inference.estimate" in loaded
    assert not [name for name in loaded if name.startswith(("analyzer.inference.offload", "scipy", "numpy", "torch"))]
