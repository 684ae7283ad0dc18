"""The answers of the explorer have the figures of the command line, and its choices are those that the engine accepts."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from analyzer.cli.explorer.answer import answer
from analyzer.cli.explorer.controls import controls_json
from analyzer.cli.explorer.state import read, state_of
from analyzer.hardware.gpus import GPUS
from tests.cli.explorer.known import known_report as report
from tests.command import run

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("pretrain_*.sh"))
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1 --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 --global-batch-size 64"
COMMAND = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 "
    "--seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 32000 "
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --recompute-activations "
    "--use-distributed-optimizer"
)
FIELDS = ("megatron", "software", "world", "parallel", "batch", "verdict", "warnings", "assumptions")


def ask(question: str, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = answer({"ask": question, "state": state, **more})
    json.dumps(found)
    return found


def check_equal(figures: dict[str, Any], document: dict[str, Any]) -> None:
    """The figures of the page equal those of a JSON report."""
    shown = json.loads(json.dumps(figures["report"]))
    for name in FIELDS:
        assert shown[name] == document[name], name
    assert [rank["memory"] for rank in shown["ranks"]] == [rank["memory"] for rank in document["ranks"]]
    time = dict(document["time"])
    del time["timelines"]
    assert shown["time"] == time
    assert shown["model"]["parameters"] == document["model"]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_figures_of_a_script_are_those_of_the_command_line(path: Path) -> None:
    """The text of the script is not run, and gives what running it gives."""
    check_equal(ask("figures", {"launch": path.read_text()}), report(str(path), "--info-gpu", "H100-80GB"))


def check_choices(state: dict[str, Any], *names: str) -> int:
    """Each choice that can be made gives a launch with the value that it names, and with the figures of its command line."""
    found = 0
    for control in controls_json(read(state_of(state)), names=names):
        for choice in control["choices"]:
            if choice["selected"] or "reason" in choice:
                continue
            figures = ask("figures", {**state, **choice["change"]})
            assert "error" not in figures, (control["name"], choice)
            shown = figures["report"]
            values = {
                "gpu": shown["verdict"]["gpu"],
                "gpus": shown["world"]["size"],
                "tensor": shown["parallel"]["tensor"],
                "pipeline": shown["parallel"]["pipeline"],
                "virtual": shown["parallel"]["virtual_pipeline"] or 1,
                "context": shown["parallel"]["context"],
                "expert": shown["parallel"]["expert"],
                "micro_batch": shown["batch"]["micro"],
                "global_batch": shown["batch"]["global"],
                "sequence": shown["batch"]["sequence_length"],
            }
            [again] = controls_json(read(state_of(figures["state"])), names=[control["name"]])
            assert str(again["value"]) == str(choice["value"])
            if control["name"] in values:
                assert values[control["name"]] == choice["value"]
            if control["name"] not in ("global_batch", "gpu"):
                assert shown["batch"]["global"] == 64
            found += 1
    return found


@pytest.mark.slow
def test_each_choice_is_legal() -> None:
    assert check_choices({"launch": MIXTRAL, "gpus": 32, "gpu": "H200-141GB"}) > 60


@pytest.mark.slow
def test_each_choice_of_a_command_replaces_its_options() -> None:
    assert check_choices({"launch": COMMAND}) > 60


def test_a_choice_replaces_options_with_another_name() -> None:
    """Such as layers per virtual stage, and recomputation by another option."""
    assert check_choices({"launch": COMMAND}, "virtual", "recompute", "pipeline") >= 6


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("pipeline", 8, "--pipeline-model-parallel-size 8"),
        ("pipeline", 16, "--pipeline-model-parallel-size 16"),
        ("tensor", 16, "--tensor-model-parallel-size 16"),
        ("context", 16, "--context-parallel-size 16"),
        ("micro_batch", 16, "--micro-batch-size 16"),
    ],
)
def test_the_reason_is_the_error_of_the_command_line(name: str, value: int, option: str) -> None:
    """A choice is refused if and only if the command line refuses the option, and with its message."""
    state = {"launch": COMMAND.replace("--num-layers-per-virtual-pipeline-stage 1 ", "")}
    control = next(each for each in ask("controls", state)["controls"] if each["name"] == name)
    choice = next((each for each in control["choices"] if each["value"] == value), None)
    outcome = run(*shlex.split(state["launch"]), "--info-gpu", "H100-80GB", "--info-set", option)
    if choice is None or "reason" not in choice:
        assert outcome.status in (0, 1), outcome.err
    else:
        assert outcome.status == 2
        assert outcome.err == f"get-training-info: {choice['reason']}\n"


def test_several_choices_one_after_the_other_equal_the_command_line() -> None:
    state: dict[str, Any] = {"launch": COMMAND}
    for name, value in (
        ("virtual", 1),
        ("tensor", 2),
        ("recompute", "full"),
        ("precision", "delayed"),
        ("gpus", 32),
        ("gpu", "B200-180GB"),
    ):
        controls = {each["name"]: each for each in ask("controls", state)["controls"]}
        choices = controls[name]["choices"]
        choice = next(
            each for each in choices if each["value"] == value or (name == "recompute" and each["text"].startswith("full"))
        )
        state = {**state, **choice["change"]}
    figures = ask("figures", state)
    words = shlex.split(figures["paste"]["command"])
    assert words[0] == "get-training-info"
    check_equal(figures, report(*words[1:]))
    complete = shlex.split(figures["paste"]["launch"])
    assert "--recompute-activations" not in complete
    assert "--num-layers-per-virtual-pipeline-stage" not in complete
    document = report(*complete, "--info-gpu", "B200-180GB")
    assert [rank["memory"] for rank in document["ranks"]] == [rank["memory"] for rank in figures["report"]["ranks"]]
    assert document["world"] == figures["report"]["world"]
    assert document["time"]["parts_seconds"] == figures["report"]["time"]["parts_seconds"]


def test_a_choice_and_back_gives_the_same_options() -> None:
    controls = {each["name"]: each for each in ask("controls", {"launch": COMMAND})["controls"]}
    change = next(each for each in controls["pipeline"]["choices"] if each["value"] == 2)["change"]
    state = {"launch": COMMAND, **change}
    assert state["set"]
    again = {each["name"]: each for each in ask("controls", state)["controls"]}
    back = next(each for each in again["pipeline"]["choices"] if each["value"] == 4)["change"]
    assert "--pipeline-model-parallel-size" not in back["set"]


def test_another_number_of_gpus_keeps_the_gpus_of_a_node() -> None:
    """Nodes of four, for which other links count."""
    state: dict[str, Any] = {"launch": COMMAND.replace("--nnodes 2 --nproc-per-node 8", "--nnodes 4 --nproc-per-node 4")}
    first = ask("figures", state)
    assert first["state"]["gpus"] is None
    for size in (32, 16):
        control = next(each for each in ask("controls", state)["controls"] if each["name"] == "gpus")
        state |= next(each for each in control["choices"] if each["value"] == size)["change"]
        shown = ask("figures", state)
        assert shown["report"]["world"] == {"size": size, "nodes": size // 4, "gpus_per_node": 4}
        check_equal(shown, report(*shlex.split(shown["paste"]["command"])[1:]))
    assert shown["report"]["time"] == first["report"]["time"]


def test_any_number_can_be_chosen_if_it_is_legal() -> None:
    state = {"launch": COMMAND}
    found = ask("choose", state, name="global_batch", value=96)
    assert ask("figures", found["state"])["report"]["batch"]["global"] == 96
    assert "--global-batch-size" in ask("choose", state, name="global_batch", value=97)["error"]
    assert "error" in ask("choose", state, name="global_batch", value="96")
    assert "error" in ask("choose", state, name="launch", value=96)


def test_the_name_of_a_model_gets_a_layout_whose_states_fit() -> None:
    for model in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B", "mistralai/Mixtral-8x7B-v0.1"):
        state = ask("open", {"launch": model})["state"]
        assert ask("figures", state)["report"]["verdict"]["fits"]


def test_a_search_has_layouts_that_can_be_taken() -> None:
    state = {"launch": COMMAND}
    found = ask("search", state, over="quick", seconds=60)
    assert found["complete"]
    assert len(found["points"]) > 3
    for point in found["points"][:5]:
        shown = ask("figures", {**state, **point["change"]})["report"]
        assert shown["time"]["iteration_seconds"] == pytest.approx(point["iteration_seconds"])
        assert max(rank["memory"]["device_bytes"] for rank in shown["ranks"]) == point["device_bytes"]


def test_the_schedule_has_all_passes_in_the_time_of_the_iteration() -> None:
    found = ask("schedule", {"launch": COMMAND})
    assert found["complete"]
    shown = ask("figures", {"launch": COMMAND})["report"]
    assert len(found["stages"]) == 4
    assert all(len(line) == 2 * shown["batch"]["microbatches"] * 2 for line in found["stages"])
    assert max(end for line in found["stages"] for _, end, *_ in line) <= found["seconds"]
    for line in found["stages"]:
        ordered = sorted(line)
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(ordered))


def test_controls_and_schedule_are_those_of_their_state() -> None:
    """Not those of the launch whose figures were asked for last."""
    state = {"launch": COMMAND, "set": {"--micro-batch-size": 2}}
    alone = {question: ask(question, state) for question in ("controls", "schedule")}
    ask("figures", {"launch": COMMAND})
    assert {question: ask(question, state) for question in alone} == alone
    assert alone["schedule"] != ask("schedule", {"launch": COMMAND})
    ask("figures", state)
    assert {question: ask(question, state) for question in alone} == alone


def test_all_gpus_can_be_chosen_and_one_without_speeds_has_no_time() -> None:
    control = ask("controls", {"launch": COMMAND})["controls"][0]
    assert [each["value"] for each in control["choices"]] == [gpu.name for gpu in GPUS]
    refused = [each for each in control["choices"] if "reason" in each]
    assert all(": " in each["reason"] for each in refused)


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        ("", "launch"),
        ("torchrun 'x", "launch"),
        ("train.sh", "train.sh"),
        ("torchrun pretrain_gpt.py --info-hardware /etc/passwd", "--info-hardware"),
        ("torchrun pretrain_gpt.py --info-json /tmp/x", "--info-json"),
        ("torchrun pretrain_gpt.py --info-megatron /tmp/x", "--info-megatron"),
        ("torchrun pretrain_gpt.py --info-megatron=./x", "--info-megatron"),
        ("get-training-info search meta-llama/Llama-3.1-8B --gpus 8 --csv /tmp/x", "--info-search-csv"),
        ("someone/no-such-model", "--info-model"),
        ("conf.yaml", "conf.yaml"),
    ],
)
def test_a_text_that_cannot_be_analyzed_is_refused_with_a_reason(launch: str, named: str) -> None:
    assert ask("open", {"launch": launch}).get("error", ask("figures", {"launch": launch}).get("error", "")).startswith(named)


def test_a_pasted_launch_runs_no_parser_of_a_checkout(tmp_path: Path) -> None:
    """Neither beside its script nor on PYTHONPATH, which the program would run for a launch of the command line."""
    parser = tmp_path / "megatron" / "training" / "arguments.py"
    parser.parent.mkdir(parents=True)
    mark = tmp_path / "ran"
    parser.write_text(f"open({str(mark)!r}, 'w')\n")
    words = COMMAND.replace("pretrain_gpt.py", f"{tmp_path}/pretrain_gpt.py")
    for text in (words, f"cd {tmp_path}\n{words}", f"PYTHONPATH={tmp_path} {COMMAND}", f"export PYTHONPATH={tmp_path}\n{COMMAND}"):
        assert "error" not in ask("figures", {"launch": text}), text
    dots = "../" * 12 + str(tmp_path).lstrip("/")
    ask("figures", {"launch": COMMAND.replace("pretrain_gpt.py", f"{dots}/pretrain_gpt.py")})
    assert not mark.exists()


@pytest.mark.parametrize(
    "state",
    [None, [], {}, {"launch": 1}, {"launch": "x", "more": 1}, {"launch": "x", "gpus": True}, {"launch": "x", "gpus": -1},
     {"launch": "x", "gpu": 1}, {"launch": "x", "set": {"--info-json": "x"}}, {"launch": "x", "set": {"--a": None}},
     {"launch": "x", "set": [1]}, {"launch": "x", "unset": ["a"]}, {"launch": "x" * 300_000}],
)  # fmt: skip
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    assert "error" in ask("figures", state)


@pytest.mark.parametrize("question", [None, 1, {}, {"ask": "x"}, {"ask": ["figures"]}])
def test_an_unknown_question_is_refused(question: Any) -> None:
    assert "error" in answer(question)
