"""How a launch script runs: what is replaced, how it ends, and what is printed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analyzer.script.preload_library import COMPILERS
from tests.script.commands import LAUNCH, MODEL, PROGRAM, executable, printed, run, run_text, script_output

pytestmark = pytest.mark.slow

SECOND = LAUNCH.replace("--lr 1e-4", "--lr 2e-4")
INVALID = f"{LAUNCH} --tensor-model-parallel-size 3"
TOO_LARGE = LAUNCH.replace("--num-layers 2 --hidden-size 64", "--num-layers 96 --hidden-size 12288")
CHANGING = (
    "rm -rf marker", "rm -f $PWD/marker", "/bin/rm marker", "find . -name marker -delete", "mv marker elsewhere", "sudo rm marker",
    "xargs rm <<< marker", "env rm marker", "bash -c 'rm marker'", "dd if=/dev/null of=marker", "srun rm marker",
)  # fmt: skip
"""Commands that would remove or empty the file `marker`."""
NAMED = (
    "pkill -f pretrain_gpt", "killall python", "ray stop", "pip install torch", "pip3 install torch",
    "python -m pip install torch", "conda install -y numpy", "ssh node2 reboot", "pdsh -w node[1-2] rm /dev/shm/x", "scp a b:/c",
    "rsync -a a b:/c", "scancel 12", "docker stop trainer", "mkfs.ext4 /dev/sdb", "shutdown now", "reboot", "apt update",
    "apt-get install -y gcc", "yum install gcc", "git clone https://example.com/x", "wget https://example.com/x",
    "curl -O https://example.com/x", "aws s3 rm s3://bucket/x", "gsutil rm gs://bucket/x", "sudo hostnamectl set-hostname x",
)  # fmt: skip


@pytest.mark.parametrize("command", CHANGING)
def test_commands_that_change_files_change_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("kept")
    done = run_text(f"{command}\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1
    assert (tmp_path / "marker").read_text() == "kept"


def test_replaced_commands_are_named_and_succeed(tmp_path: Path) -> None:
    done = run_text("set -e\n" + "\n".join(NAMED) + f"\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1, done.stderr
    lines = [line.partition("not run: ")[2].replace("'", "") for line in done.stderr.splitlines() if "not run: " in line]
    named = [line.removesuffix(" : the network is not used (--info-run-all uses it)") for line in lines]
    assert named == list(NAMED)


def test_with_run_all_they_run_and_launchers_do_not(tmp_path: Path) -> None:
    (tmp_path / "marker").touch()
    executable(tmp_path / "bin" / "torchrun", "#!/bin/sh\ntouch started\n")
    executable(tmp_path / "bin" / "pip", "#!/bin/sh\ntouch installed\n")
    text = f"rm marker\npip install x\n{LAUNCH}\n{tmp_path}/bin/{SECOND}"
    done = run_text(text, "--info-dry", "--info-run-all", folder=tmp_path, path=[tmp_path / "bin"])
    assert len(printed(done.stdout)) == 2
    assert not (tmp_path / "marker").exists()
    assert (tmp_path / "installed").exists()
    assert not (tmp_path / "started").exists()


def test_other_programs_run_as_usual(tmp_path: Path) -> None:
    text = f'mkdir -p a/b\necho "$(python3 -c "print(6 * 7)")" > a/b/answer\nseq 3 | sort -r | tee a/list\ncat a/b/answer\n{LAUNCH}'
    done = run_text(text, "--info-dry", folder=tmp_path)
    assert done.stderr.startswith("3\n2\n1\n42\n")
    assert not (tmp_path / "a").exists()


ABSOLUTE = (
    "{real} {options}", "R={real}; $R {options}", 'R={real}; "${{R}}" {options}', "A=({real} {options}); ${{A[@]}}",
    "exec {real} {options}", "env A=b {real} {options}", "nohup {real} {options}", "timeout 9 {real} {options}",
    "command {real} {options}", "eval '{real} {options}'", "A=1 B='c d' {real} {options}", "E=; $E {real} {options}",
    "if {real} {options}; then :; fi", "x=$({real} {options})", "bash -c '{real} {options}'", "sh -c '{real} {options}'",
    "srun {real} {options}", "srun bash -c '{real} {options}'", 'f() {{ {real} "$@"; }}; f {options}',
    "echo {options} | xargs {real}", "PATH={folder}:$PATH torchrun {options}", "export PATH={folder}:$PATH; torchrun {options}",
    "PATH={folder}:$PATH\ntorchrun {options}", "env -i PATH={folder}:/usr/bin:/bin torchrun {options}",
    "unset BASH_ENV; bash -c '{real} {options}'", "{folder}/python -m torch.distributed.run {options}",
    "( {real} {options} ) | cat", "setsid {real} {options}",
    "printf '#!/bin/sh\\n{real} {options}\\n' > x.sh; chmod +x x.sh; ./x.sh", 'set -- {options}; {real} "$@" &',
    "cd {folder} && ./torchrun {options}", "set -eux; {real} {options}",
    "mpirun -np 2 {folder}/python -m torch.distributed.run {options}",
)  # fmt: skip


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH without a C compiler, so that only bash and PATH lead to the stand-ins."""
    folder = tmp_path_factory.mktemp("bin")
    for place in (Path(sys.executable).parent, Path("/usr/local/bin"), Path("/usr/bin"), Path("/bin")):
        for program in place.iterdir():
            if program.name not in COMPILERS and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return str(folder)


@pytest.mark.parametrize("form", ABSOLUTE)
def test_the_real_launcher_never_starts(form: str, tmp_path: Path, without_compiler: str) -> None:
    folder = tmp_path / "real"
    for name in ("torchrun", "python"):
        executable(folder / name, f"#!/bin/sh\ntouch {tmp_path}/started\n")
    text = form.format(real=folder / "torchrun", folder=folder, options="--nproc_per_node 2 pretrain_gpt.py --num-layers 2")
    environ = {"PATH": without_compiler, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_text(text, "--info-dry", folder=tmp_path, environ=environ)
    assert [each.shape for each in printed(done.stdout)] == [(1, 2)], done.stderr
    assert not (tmp_path / "started").exists()


ENDS = (
    ("set -e\ncd /nonexistent", "cd /nonexistent (line 3 of launch.sh) failed with status 1"),
    ("set -u\necho\necho $UNSET", "echo $UNSET (line 4 of launch.sh) failed with status 1"),
    ("set -e\nfalse | cat\nfalse", "false (line 4 of launch.sh) failed with status 1"),
    ("set -eo pipefail\nfalse | cat", "failed with status 1"),
    (": ${NAME:?is missing}", ": ${NAME:?is missing} (line 2 of launch.sh) failed"),
    ("no_such_program", "no_such_program (line 2 of launch.sh) failed with status 127"),
    ("test -d /nonexistent || exit 4", "test -d /nonexistent (line 2 of launch.sh) failed with status 1"),
    ("set -e\ntrap 'echo ends' EXIT\nfalse", "false (line 4 of launch.sh) failed with status 1"),
    ("set -e\nf() {\n  ls /nonexistent\n}\nf", "ls /nonexistent (line 4 of launch.sh) failed with status 2"),
    ("if then", "ended with status 2"),
)


@pytest.mark.parametrize(("text", "named"), ENDS)
def test_a_script_that_ends_before_a_launch_is_an_error_that_names_the_command(text: str, named: str, tmp_path: Path) -> None:
    done = run_text(f"{text}\n", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("get-training-info: ")]
    assert len(lines) == 1
    assert named in lines[0].replace(f"{tmp_path}/", "")


def test_a_script_without_a_launch_is_an_error(tmp_path: Path) -> None:
    done = run_text("echo nothing", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"get-training-info: {tmp_path}/launch.sh: ended without starting a training")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (LAUNCH, 0),
        (f"{LAUNCH}\nexit 9", 0),
        (TOO_LARGE, 1),
        (f"{LAUNCH}\n{TOO_LARGE}", 1),
        (f"{TOO_LARGE}\n{INVALID}\n{LAUNCH}", 2),
    ],
)
def test_exit_status(text: str, status: int, tmp_path: Path) -> None:
    assert run_text(text, "--info-gpu", "A100-80GB", folder=tmp_path).returncode == status


def test_several_launches_have_headings_and_files_of_their_own(tmp_path: Path) -> None:
    text = f"{LAUNCH}\n\n{SECOND}\n{LAUNCH} --log-interval 7"
    done = run_text(text, "--info-json", "out/report.v1.json", "--info-gpu", "H100-80GB", folder=tmp_path)
    assert done.returncode == 2
    assert "out/report.v1.json" in done.stderr
    (tmp_path / "out").mkdir()
    done = run_text(text, "--info-json=out/report.v1.json", "--info-gpu", "H100-80GB", folder=tmp_path)
    assert done.returncode == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.v1.json", "report.v1-2.json", "report.v1-3.json"}
    headings = [line for line in done.stdout.splitlines() if line.startswith("Launch ")]
    assert headings == [f"Launch {number} of 3: line {line} of {tmp_path}/launch.sh" for number, line in ((1, 2), (2, 4), (3, 5))]
    assert done.stdout.count("It fits: ") == 3


def test_several_launches_have_pages_and_timelines_of_their_own(tmp_path: Path) -> None:
    options = ("--info-html", "page.html", "--info-timeline", "lines.json", "--info-json", "/dev/null", "--info-gpu", "H100-80GB")
    done = run_text(f"{LAUNCH}\n{SECOND}", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir() if path.suffix in (".html", ".json")}
    assert names == {"page.html", "page-2.html", "lines.json", "lines-2.json"}
    assert not Path("/dev/null-2").exists()


def test_json_documents_on_standard_output_follow_each_other(tmp_path: Path) -> None:
    done = run_text(f"echo text\n{LAUNCH}\n{SECOND}", "--info-json", "-", folder=tmp_path)
    first, end = json.JSONDecoder().raw_decode(done.stdout)
    second, _ = json.JSONDecoder().raw_decode(done.stdout[end:].lstrip())
    assert first["world"] == second["world"] == {"size": 8, "nodes": 1, "gpus_per_node": 8}
    assert script_output(done.stderr) == "text\n"


def test_a_script_that_repeats_a_launch_or_waits_is_ended(tmp_path: Path) -> None:
    done = run_text(f"while :; do {LAUNCH} --master_port $RANDOM; done", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1
    assert "started 10 times" in done.stdout
    done = run_text("until [ -f ready ]; do sleep 60; done", folder=tmp_path)
    assert done.returncode == 2
    assert "a loop that waits was left (sleep in line 2 of " in done.stderr


def test_a_script_that_submits_itself_runs_once(tmp_path: Path) -> None:
    batch = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun -l python pretrain_gpt.py {MODEL}"
    done = run_text(f"sbatch --dependency=singleton $0\nsbatch <<EOF\n{batch}\nEOF\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert [each.shape for each in printed(done.stdout)] == [(2, 8), (1, 8)]
    assert "not run: sbatch --dependency=singleton" in done.stderr


def test_the_number_of_gpus_is_eight_if_a_script_counts_them_on_a_machine_without(tmp_path: Path) -> None:
    count = 'python -c "import torch; print(torch.cuda.device_count())"'
    done = run_text(f"set -e\nGPUS=`{count}`\n{LAUNCH.replace('8', '$GPUS', 1)}", "--info-dry", folder=tmp_path)
    assert [each.shape for each in printed(done.stdout)] == [(1, 8)]


def test_no_process_and_no_file_is_left(tmp_path: Path) -> None:
    mark = f"left_by_{tmp_path.parent.name}"
    loop = f"bash -c \"trap '' TERM; while :; do :; done\" {mark} &"
    text = f"{loop}\nset -m\n{loop}\nsetsid {loop}\n{LAUNCH}"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = run_text(text, "--info-dry", folder=tmp_path, environ={"TMPDIR": str(temporary)})
    assert len(printed(done.stdout)) == 1
    assert list(temporary.iterdir()) == []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert mark.encode() not in (process / "cmdline").read_bytes()


def test_a_script_that_reads_gets_no_input(tmp_path: Path) -> None:
    done = run_text(f"read -r answer || answer=none\n{LAUNCH} --save $answer", "--info-dry", folder=tmp_path)
    assert printed(done.stdout)[0].value("--save") == "none"


def test_the_state_of_the_shell_does_not_change(tmp_path: Path) -> None:
    """$?, $_, PIPESTATUS, set -x and traps are those of a run without this program."""
    text = """
f() { return 3; }
f a b; echo "$? $_"
true one two; echo "$_"
false | true | false; echo "${PIPESTATUS[*]} $?"
[[ abc =~ b(.) ]] && echo "${BASH_REMATCH[1]}"
for i in 1 2; do x=$((i * 2)); done; echo "$x"
trap 'echo "ERR $?"' ERR; false; trap - ERR
trap 'echo "EXIT $?"' EXIT
local_test() { local a=5; a=$((a + 1)); echo $a; }; local_test
IFS=,; read -r p q <<< "1,2"; echo "$p $q"; unset IFS
set -x; true x; set +x
set -eu
(exit 5) || echo "status $?"
in_substitution() { (cd /; y=1; while [ -n "$y" ]; do y=; done; false; echo "goes on in $PWD"); }
echo "$(in_substitution)"
exported() { echo "exported $1"; }
export -f exported
echo 1 2 | xargs -n 1 bash -c 'exported $0'
env A=b bash -c 'exported $A'
set -f; echo *; set +f
"""
    done = run_text(f"{text}{LAUNCH}\nexit 6", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1
    (tmp_path / "plain.sh").write_text(f"#!/bin/bash\n{text}torchrun() {{ :; }}; torchrun\nexit 6\n")
    plain = subprocess.run(
        ["bash", str(tmp_path / "plain.sh")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, check=False
    )
    assert script_output(done.stderr) == plain.stdout


def test_the_header_gives_the_variables_of_slurm_that_are_not_set(tmp_path: Path) -> None:
    script = tmp_path / "job.slurm"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N 4\n#SBATCH --gpus-per-node=h100:8\n#SBATCH -J name # comment\n\necho $SLURM_JOB_NAME\n"
        f"#SBATCH --nodes=9\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node 8 pretrain_gpt.py {MODEL}\n"
    )
    own = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for environ, nodes in ((own, 4), ({**own, "SLURM_NNODES": "2"}, 2)):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "--info-dry", "job.slurm"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert printed(done.stdout)[0].shape == (nodes, 8)
        assert script_output(done.stderr) == "name\n"


def test_world_size_option(tmp_path: Path) -> None:
    text = f"torchrun --nnodes $NOTHING --nproc_per_node gpu pretrain_gpt.py {MODEL}"
    done = run_text(text, folder=tmp_path)
    assert done.returncode == 2
    assert "--info-world-size" in done.stderr
    done = run_text(text, "--info-world-size", "24", "--info-json", "-", folder=tmp_path)
    assert json.loads(done.stdout)["world"] == {"size": 24, "nodes": 3, "gpus_per_node": 8}


def test_info_options_before_and_after_the_script(tmp_path: Path) -> None:
    script = tmp_path / "a script"
    script.write_text(f'#!/usr/bin/env bash\n{LAUNCH} --log-interval "$1" "${{@:2}}"\n')
    environ = {**os.environ, "COLUMNS": "100"}
    for words in (["--info-gpu", "H100-80GB", "a script", "3"], ["a script", "3", "--info-gpu=H100-80GB", "--log-throughput"]):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("It fits: ")


def test_a_script_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run(Path("missing.slurm"), "--info-gpu", "H100-80GB", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "get-training-info: missing.slurm: is not a file; give the path of the launch script\n",
    )


@pytest.mark.parametrize("option", ["--info-dry", "--info-run-all"])
def test_options_of_scripts_are_refused_without_a_script(option: str, tmp_path: Path) -> None:
    done = run(Path("pretrain_gpt.py"), *MODEL.split(), option, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"get-training-info: {option}: is only used with a launch script; ")


def test_info_launch_is_refused(tmp_path: Path) -> None:
    done = run_text(LAUNCH, "--info-launch", "--info-gpu", "H100-80GB", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("get-training-info: --info-launch: ")


SED = (
    ("s%torchrun %{program} %", LAUNCH),
    ("s%/opt/conda/bin/torchrun %{program} %", f"/opt/conda/bin/{LAUNCH}"),
    ("s%/opt/conda/bin/torchrun%{program}%", f'RUN="/opt/conda/bin/torchrun"\n$RUN {LAUNCH.removeprefix("torchrun ")}'),
    ("s%python -m torch.distributed.run %{program} %", LAUNCH.replace("torchrun", "python -m torch.distributed.run")),
    ("s%python %{program} %", LAUNCH.replace("torchrun", "python -m torch.distributed.launch")),
    ("s%deepspeed %{program} %", f"deepspeed --num_gpus 8 pretrain_gpt.py {MODEL}"),
    ("s%accelerate %{program} %", f"accelerate launch --num_processes 8 train.py {MODEL}"),
    ("s%accelerate launch %{program} %", f"accelerate launch --num_processes 8 train.py {MODEL}"),
)


@pytest.mark.parametrize(("sed", "launch"), SED)
def test_the_sed_way(sed: str, launch: str, tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(f'GPU=$1\nshift\n{launch} --info-gpu $GPU "$@"\n')
    replaced = sed.format(program=f"{sys.executable} {PROGRAM}")
    command = f"sed '{replaced}' launch.sh | bash -s -- H100-80GB --info-json -"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"]["size"] == 8


def test_folders_of_a_container_need_not_exist(tmp_path: Path) -> None:
    for start in ('docker run image bash -c "cd /workspace && {}"', 'ssh node1 "cd /code; {}"'):
        done = run_text(start.format(LAUNCH), "--info-dry", folder=tmp_path)
        assert [each.shape for each in printed(done.stdout)] == [(1, 8)], done.stderr
        assert "not here: cd /" in done.stderr


def test_files_that_set_up_software_of_the_cluster_need_not_exist(tmp_path: Path) -> None:
    (tmp_path / "own.sh").write_text("SIZE=7\n")
    text = f"set -e\nsource /opt/software/set_env.sh || exit 1\n. /etc/absent/profile --fast\nsource own.sh\n{LAUNCH} --seed $SIZE"
    done = run_text(text, "--info-dry", folder=tmp_path)
    assert printed(done.stdout)[0].value("--seed") == "7"
    assert "not here: source /opt/software/set_env.sh" in done.stderr
    assert "not here: . /etc/absent/profile" in done.stderr
    done = run_text(f"source {tmp_path}/absent.sh || exit 1\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert done.returncode == 2
    assert "absent.sh (line 2 of" in done.stderr


def test_a_remote_command_without_a_launcher_is_not_run_here(tmp_path: Path) -> None:
    text = f'ssh node1 "pkill -f pretrain_gpt.py; touch {tmp_path}/touched"\n{LAUNCH}'
    done = run_text(text, "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1
    assert not (tmp_path / "touched").exists()


def test_tools_under_a_launcher_are_not_launches(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 1 tools/checkpoint/convert.py --model-type GPT\n{LAUNCH}"
    done = run_text(text, "--info-dry", folder=tmp_path)
    assert [each.value("--nproc_per_node") for each in printed(done.stdout)] == ["8"]
    assert "not run: torchrun --nproc_per_node 1 tools/checkpoint/convert.py" in done.stderr


def test_a_folder_that_is_removed_and_made_again_is_no_error(tmp_path: Path) -> None:
    text = f"set -e\nmkdir -p a\nrm -rf a\nmkdir a\n{LAUNCH}"
    assert run_text(text, "--info-dry", folder=tmp_path).returncode == 0


def test_the_number_of_gpus_of_the_job_is_that_of_the_header(tmp_path: Path) -> None:
    text = f"#SBATCH --gres=gpu:4\n{LAUNCH.replace('--nproc_per_node 8', '--nproc_per_node gpu')} --save $CUDA_VISIBLE_DEVICES"
    [launch] = printed(run_text(text, "--info-dry", folder=tmp_path).stdout)
    assert (launch.shape, launch.value("--save")) == ((1, 4), "0,1,2,3")


def test_a_training_without_megatron_in_a_script_is_refused(tmp_path: Path) -> None:
    done = run_text("NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-8B --max_length 2048", folder=tmp_path)
    assert done.returncode == 2
    assert "swift sft: trains with the Trainer of transformers" in done.stderr


@pytest.mark.parametrize("starter", ["bash", "sbatch"])
def test_the_command_that_starts_the_script_may_stand_before_it(starter: str, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(f"{LAUNCH}\n")
    done = run(Path(starter), "launch.sh", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(f"echo started >&2\nwhile true; do :; done\n{LAUNCH}\n")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), "launch.sh"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"started\n"
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert b"Traceback" not in process.stderr.read()
    assert not list(tmp_path.glob("get_training_info_*"))
