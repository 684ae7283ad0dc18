"""The commands: what they stand for, where their options may stand, and what they refuse."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from analyzer.cli.commands.help import commands_text, help_text
from analyzer.cli.commands.table import COMMANDS, fields_of, flag_of_field
from analyzer.cli.commands.words import drop_in_words, two_launches
from analyzer.errors import InputError
from analyzer.frameworks.recognize import recognize
from analyzer.launch.info_options import OPTIONS
from analyzer.launch.options.catalogue import load_catalogue
from tests.command import assert_refused, run
from tests.job_of import BASE

EXAMPLE = "examples/pretrain_llama3_8b.sh"
SCRIPT = str(Path(__file__).parents[2] / EXAMPLE)
MODEL = "meta-llama/Llama-3.1-8B"
FIT = "--info-faster --info-detail memory"
BATCH = "--info-search --info-search-max micro-batch-size"
GLOBAL = "--global-batch-size 64"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fit train.sh 64 --gpu H200", f"{FIT} --info-gpu H200 train.sh 64"),
        ("fit --gpu=H200 train.sh", f"{FIT} --info-gpu H200 train.sh"),
        ("fit train.sh -- --gpu H200", f"{FIT} train.sh --gpu H200"),
        ("fit --detail full train.sh --info-margin 5%", "--info-faster --info-detail full --info-margin 5% train.sh"),
        (f"fit --info-gpu H200 --info-world-size 8 {MODEL}", f"{FIT} --info-gpu H200 --info-world-size 8 --info-model {MODEL}"),
        ("batch --gpu H200 torchrun x.py --gpu 8", f"{BATCH} --info-gpu H200 torchrun x.py --gpu 8"),
        ("time train.sh --tokens 15T --price 2.5", "--info-faster --info-detail time --info-tokens 15T --info-price 2.5 train.sh"),
        ("search train.sh --over tp,pp --thorough", "--info-search --info-search-over tp,pp --info-search-thorough train.sh"),
        ("search train.sh --compare-gpus 64,128", "--info-search --info-search-gpus 64,128 train.sh"),
        ("gpus train.sh --days 30", "--info-search-fewest-gpus --info-search-days 30 train.sh"),
        ("context train.sh --gpus 64", "--info-search --info-search-max seq-length --info-world-size 64 train.sh"),
        ("fit train.sh --unset --bf16", f"{FIT} --info-unset --bf16 train.sh"),
        ("batch train.sh", f"{BATCH} train.sh"),
        (
            f"serve {MODEL} --batch 8 --prompt 2048 --generate 256 --gpus 2",
            f"--info-inference batch=8,prompt=2048,generate=256 --info-world-size 2 --info-model {MODEL}",
        ),
        (f"search {MODEL} --gpus 8 {GLOBAL}", f"--info-search --info-world-size 8 --info-model {MODEL} {GLOBAL}"),
        (f"gpus {MODEL} {GLOBAL}", f"--info-search-fewest-gpus --info-model {MODEL} {GLOBAL} --info-world-size 8"),
        ("models", "--info-model list"),
        ("hardware", "--info-gpu list"),
    ],
)  # fmt: skip
def test_a_command_stands_for_options_of_the_drop_in_form(command: str, words: str) -> None:
    name, *rest = command.split()
    assert drop_in_words(name, rest) == words.split()


@pytest.mark.parametrize(
    ("command", "named", "remedy"),
    [
        ("fit", "fit", "get-training-info fit train.sh"),
        ("fit --gp H200 train.sh", "--gp", "did you mean --gpu?"),
        ("fit train.sh --gpu", "--gpu", "get-training-info fit --help"),
        ("fit --gpu= train.sh", "--gpu", "get-training-info fit --help"),
        ("fit train.sh --strict=no", "--strict", "write --strict, or leave it out"),
        ("fit --info-margin 5% --gp H200 train.sh", "--gp", "did you mean --gpu?"),
        ("compare old.json 8 new.sh", "8", "write it after the launch"),
        (f"fit {MODEL} --gpu H200", MODEL, f"get-training-info gpus {MODEL}"),
        ("models train.sh", "train.sh", "get-training-info models"),
        ("compare train.sh", "compare", "get-training-info compare old.sh new.sh"),
        ("completion fish", "completion", "get-training-info completion bash|zsh|tcsh"),
        ("", "launch", "get-training-info fit"),
    ],
)
def test_wrong_words_are_refused_with_a_remedy(command: str, named: str, remedy: str) -> None:
    outcome = run(*command.split())
    assert_refused(outcome, named)
    assert remedy in outcome.err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_its_options_and_an_example(name: str) -> None:
    text = help_text(name)
    assert COMMANDS[name].help in " ".join(text.split())
    for field in fields_of(name):
        assert flag_of_field(field) in text
    assert name in commands_text()
    assert run(name, "--help").out == text.rstrip() + "\n"


def test_the_options_of_a_command_are_no_options_of_megatron() -> None:
    """They may stand after a script and among options of Megatron."""
    known = load_catalogue().newest
    for name in COMMANDS:
        flags = [flag_of_field(field) for field in fields_of(name)]
        assert len(set(flags)) == len(flags)
        assert not set(flags) & set(known), name
        assert all(field in OPTIONS for field in fields_of(name))


def test_a_command_prints_what_the_drop_in_form_prints() -> None:
    assert run("fit", SCRIPT, "--gpu", "H100-80GB").out == run(SCRIPT, "--info-gpu", "H100-80GB", *FIT.split()).out


@pytest.mark.slow
def test_two_launches_are_compared(tmp_path: Path) -> None:
    changed = tmp_path / "changed.sh"
    changed.write_text(Path(SCRIPT).read_text().replace("--global-batch-size 128", "--global-batch-size 256"))
    assert "--global-batch-size 256" in changed.read_text()
    outcome = run("compare", SCRIPT, str(changed), "--gpu", "H100-80GB")
    assert "Memory of the highest-memory rank" not in outcome.out, "the report of the second launch is one line"
    whole = run("compare", SCRIPT, str(changed), "--gpu", "H100-80GB", "--detail", "summary")
    assert "Memory of the highest-memory rank" in whole.out
    assert outcome.status == 0
    report = tmp_path / "old.json"
    run(SCRIPT, "--info-gpu", "H100-80GB", "--info-json", str(report))
    of_report = run("compare", str(report), str(changed), "--gpu", "H100-80GB")
    assert "global batch" in outcome.out
    assert (
        outcome.out.partition("Changes since")[2].splitlines()[1:] == of_report.out.partition("Changes since")[2].splitlines()[1:]
    )


@pytest.mark.parametrize(
    ("words", "old", "new"),
    [
        ("old.sh new.sh", "old.sh", "new.sh"),
        ("old.sh 8 new.sh 8 --gpus 8", "old.sh 8", "new.sh 8"),
        ("-- old.sh new.sh", "old.sh", "new.sh"),
        ("old.sh --gpus 8 torchrun x.py", "old.sh", "torchrun x.py"),
        ("a.yaml x=b.json y=1 c.yaml x=d.json", "a.yaml x=b.json y=1", "c.yaml x=d.json"),
        ("torchrun x.py --seed 1 new.sh", "torchrun x.py --seed 1", "new.sh"),
        (f"a/b {MODEL} --num-layers 8 --gpus 8", "a/b --num-layers 8", f"{MODEL} --num-layers 8"),
        (f"{MODEL} --num-layers 4 {MODEL} --num-layers 8", f"{MODEL} --num-layers 4", f"{MODEL} --num-layers 8"),
    ],
)
def test_each_of_two_launches_has_its_words(words: str, old: str, new: str) -> None:
    found = two_launches("compare", words.split())
    assert [" ".join(each.target) for each in found] == [old, new]


def test_a_comparison_writes_the_report_of_the_new_launch_and_names_the_old_one(tmp_path: Path) -> None:
    old, new, report = tmp_path / "old launch.json", tmp_path / "new.sh", tmp_path / "report.json"
    new.write_text(Path(SCRIPT).read_text())
    outcome = run("compare", SCRIPT, str(new), "--gpu", "H100-80GB", "--json", str(report), "--detail", "line")
    assert outcome.status == 0
    assert f"Changes since {SCRIPT}"[:60] in outcome.out
    assert json.loads(report.read_text())["against"]["file"] == SCRIPT
    report.rename(old)
    assert "Nothing changed." in run("compare", str(old), str(new), "--gpu", "H100-80GB").out


@pytest.mark.slow
@pytest.mark.parametrize("order", [("one.sh", "two.sh"), ("two.sh", "one.sh")])
def test_scripts_with_different_numbers_of_launches_are_compared_as_far_as_both_go(order: tuple[str, str], tmp_path: Path) -> None:
    launch = f"torchrun --nproc-per-node 8 pretrain_gpt.py {BASE} --global-batch-size"
    for name, batches in (("one.sh", (16,)), ("two.sh", (32, 64))):
        (tmp_path / name).write_text("".join(f"{launch} {batch}\n" for batch in batches))
    old, new = (str(tmp_path / name) for name in order)
    outcome = run("compare", old, new, "--gpu", "H100-80GB", "--detail", "line")
    numbers = (1, 2) if order[0] == "one.sh" else (2, 1)
    assert f"{old} starts {numbers[0]} and {new} {numbers[1]} launches: the first ones are compared" in outcome.err
    assert outcome.out.count("Changes since") == 1
    assert outcome.status == 0


def test_a_command_ends_with_the_exit_status_of_its_launch() -> None:
    document = run("fit", SCRIPT, "--gpu", "A100-40GB", "--json", "-")
    assert document.status == 1
    assert json.loads(document.out)["verdict"]["fits"] is False


def test_a_shell_completes_the_commands_and_their_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "completion.bash"
    script.write_text(run("completion", "bash").out)
    words = "COMP_WORDS=(get-training-info fit --gpu-m); COMP_CWORD=2"
    function = "$(complete -p get-training-info | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
    command = f"source {shlex.quote(str(script))}; {words}; {function}; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "--gpu-memory" in found.stdout, found.stderr


def test_a_number_of_gpus_is_needed_with_a_model() -> None:
    with pytest.raises(InputError, match="the number of GPUs is not given"):
        drop_in_words("time", [MODEL])


def test_a_model_is_given_by_the_folder_of_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert drop_in_words("fit", [str(tmp_path), "--gpus", "8"]) == [
        *FIT.split(),
        *f"--info-world-size 8 --info-model {tmp_path}".split(),
    ]


def test_options_beside_a_configuration_of_a_framework_may_begin_with_dashes() -> None:
    words = ["--info-set", "--micro-batch-size=2", "--info-unset", "--bf16", "config.yaml", "--info-json", "r.json", "x=1"]
    found = recognize(words)
    assert found is not None
    assert (found.program, found.words, found.rest) == ("config.yaml", ("x=1",), (*words[:4], *words[5:7]))


def test_the_first_screen_has_the_verdict_the_time_and_a_faster_layout() -> None:
    lines = run("fit", SCRIPT, "--gpu", "H100-80GB").out.splitlines()[:24]
    text = "\n".join(lines)
    assert lines[0].startswith("It fits: ")
    for name in ("iteration", "training", "faster", "layout", "headroom", "assumptions"):
        assert f"\n  {name} " in text
    (change,) = re.findall(r"(\d+)% less time with (--.*)", text)
    before, after = (run(SCRIPT, "--info-gpu", "H100-80GB", "--info-json", "-", *more) for more in ((), ("--info-set", change[1])))
    seconds = [json.loads(each.out)["time"]["iteration_seconds"] for each in (before, after)]
    assert round(100 * (1 - seconds[1] / seconds[0])) == int(change[0])


def test_a_report_of_one_line() -> None:
    outcome = run("fit", SCRIPT, "--gpu", "H100-80GB", "--detail", "line")
    assert re.fullmatch(r"It fits: rank \d+ \(stage 0\) needs .* remain free\. [\d.]+ s for an iteration\.\n", outcome.out)
