"""What stands for each kind of command: which run, which are only named, and what they answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from analyzer.script.stand_ins import gpus, launchers, network
from analyzer.script.stand_ins.dispatch import GROUPS, names
from analyzer.script.stand_ins.python_command import launch_of, prepares
from tests.script.commands import LAUNCH, MODEL, executable, printed, run_text

STARTS = (
    "torchrun a.py", "/opt/conda/bin/torchrun a.py", "A=1 B='c d' torchrun a.py", "cd /x && torchrun a.py",
    "touch f; torchrun a.py", "(torchrun a.py)", "if true; then torchrun a.py; fi", "for i in 1 2; do torchrun a.py; done",
    "x=$(torchrun a.py)", "`torchrun a.py`", "nohup torchrun a.py > log 2>&1 &", "2>/dev/null; exec torchrun a.py",
    "timeout 10 torchrun a.py", "env -i A=b torchrun a.py", "bash -c 'cd /x; torchrun a.py'", "bash -lc \"torchrun a.py\"",
    "sudo -E bash -c 'torchrun a.py'", "su - user -c 'torchrun a.py'", "uv run torchrun a.py",
    "uv run --frozen pretrain_gpt.py", "conda run -n x --no-capture-output torchrun a.py", "eval 'torchrun a.py'",
    "python -m torch.distributed.run a.py", "python3 -u -m torch.distributed.launch a.py", "python /usr/bin/torchrun a.py",
    "python pretrain_gpt.py", "/opt/bin/python3.11 train.py", "python -m deepspeed.launcher.runner a.py", "deepspeed a.py",
    "accelerate launch a.py", "python -m accelerate.commands.launch a.py", "srun a", "sbatch a.sh", "mpirun -np 8 a",
    "ray job submit -- a", "nsys profile -o x torchrun a.py", "docker exec c torchrun a.py",
    "docker run img bash -c 'torchrun a.py'", "bash missing.sh", "./missing.sh", "bash -x missing.slurm 1",
    "ssh node 'torchrun a.py'", "echo don't; torchrun a.py", "# don't\ntorchrun a.py", "echo a # torchrun\ntorchrun a.py",
    "cat <<E | bash\ntorchrun a.py\nE", "torchrun \\\n --x a.py", "L='torchrun --x'; $L a.py",
    "python -c \"import os; os.system('torchrun a.py')\"", "llamafactory-cli train x.yaml", "xargs -I{} ssh {} 'torchrun a.py'",
)  # fmt: skip
STARTS_NONE = (
    "", ": > f", "touch f", "echo x > f", "rm -rf data", "cp a b", "echo torchrun", "pip install deepspeed", "which torchrun",
    "pkill -f torchrun", "xargs rm", "sudo xargs rm", "bash", "bash -c 'rm -rf x'", "sh -c ': > f'", "python -V",
    "python helper.py", "python -c 'print(1)'", "ls # torchrun", "echo 'a; torchrun b'", "accelerate env", "ray stop",
    "ray start --head", "nsys --version", "docker exec c ls", "llamafactory-cli version", "cat train.log", "nvidia-smi",
    "python tools/preprocess_data.py", "$X -c y",
)  # fmt: skip


@pytest.mark.parametrize("text", STARTS)
def test_a_text_with_a_launcher(text: str) -> None:
    assert launchers.contains_launcher(text)


@pytest.mark.parametrize("text", STARTS_NONE)
def test_a_text_without_a_launcher(text: str) -> None:
    assert not launchers.contains_launcher(text)


def test_scripts_are_read(tmp_path: Path) -> None:
    files = {"launches.sh": "cd /x\ntorchrun a.py\n", "other.sh": "# torchrun a.py\nrm -rf x\n", "launch": "#!/bin/bash\nsrun a\n"}
    files |= {"launch.py": "import subprocess\nsubprocess.run(['torchrun', 'a.py'])\n", "helper.py": "print(8)\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    expected = {f"bash {tmp_path}/launches.sh": True, f"{tmp_path}/launches.sh": True, f"source {tmp_path}/launches.sh": True}
    expected |= {f"bash {tmp_path}/other.sh": False, f"{tmp_path}/launch 3": True, f"python {tmp_path}/launch.py": True}
    expected |= {f"python {tmp_path}/helper.py": False, f"source {tmp_path}/missing.sh": False}
    assert {text: launchers.contains_launcher(text) for text in expected} == expected


def test_no_plain_local_program_is_replaced() -> None:
    local = "rm unlink shred mv cp dd truncate kill find ipcrm touch mkdir ln chmod tee sed awk perl tar bash make cat sort".split()
    assert not set(local) & set(names(run_all=False))
    assert len(names(run_all=False)) == len(set(names(run_all=False))) == sum(len(members) for members in GROUPS.values())


def test_with_run_all_only_launchers_and_what_starts_them_are_replaced() -> None:
    kept = set(names(run_all=True))
    assert {"torchrun", "python3", "srun", "docker", "ssh", "uv", "ray", "nvidia-smi"} <= kept
    assert not kept & {"git", "pip", "curl", "pkill", "nc", "ping", "hostname", "sleep", "squeue", "scancel", "apt"}


@pytest.mark.parametrize(
    ("words", "local"),
    [
        ("status", True), ("branch -D x", True), ("-C a -c b=c commit -m x", True), ("clone ../x .", True), ("clone . copy", True),
        ("submodule status", True), ("remote -v", True), ("remote add x https://a/b", True), ("--git-dir x reset --hard", True),
        ("checkout -b fetch", True), ("clone https://a/b", False), ("clone git@a:b.git", False), ("-C a fetch", False),
        ("-c a=b pull --rebase", False), ("push origin x", False), ("submodule update --init", False), ("lfs pull", False),
        ("ls-remote", False), ("remote update", False),
    ],
)  # fmt: skip
def test_git_runs_unless_it_needs_the_network(words: str, local: bool) -> None:
    assert network._is_local("git", words.split()) is local


@pytest.mark.parametrize(
    ("name", "words", "local"),
    [
        ("rsync", "-a a/ b/", True), ("rsync", "-a a host:/b", False), ("scp", "x ./a:b", True), ("scp", "x user@host:y", False),
        ("pip", "list", True), ("pip3", "install x", False), ("crontab", "-l", True), ("crontab", "-r", False), ("mount", "", True),
        ("mount", "-t tmpfs x y", False), ("curl", "-s x", False),
    ],
)  # fmt: skip
def test_other_commands_that_are_local_with_some_words(name: str, words: str, local: bool) -> None:
    assert network._is_local(name, words.split()) is local


PREPARES = (
    "tools/preprocess_data.py --input x", "tools/checkpoint/convert.py", "-u convert_hf.py", "download_model.py",
    "merge_datasets.py", "data/prepare.py", "hf2mcore.py", "-m nltk.downloader punkt", "-m huggingface_hub.commands.cli",
    "-m a.convert", "-m b convert", "train_tokenizer.py", "-m wandb login", "tools/anything.py",
)  # fmt: skip
COMPUTES = (
    "helper.py", "compute_args.py", "split_layers.py", "prepare_env.py", "-c print(1)", "-m json.tool", "get_gpus.py", "-V", "",
    "-m venv x", "-m site",
)  # fmt: skip


def test_python_that_prepares_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [words for words in PREPARES if not prepares(words.split())] == []
    assert [words for words in COMPUTES if prepares(words.split())] == []
    assert prepares(["-c", "from huggingface_hub import snapshot_download; snapshot_download('x')"])
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "sizes.py").touch()
    assert not prepares(["tools/sizes.py"])
    (tmp_path / "megatron").mkdir()
    assert prepares(["tools/sizes.py"])
    assert prepares([f"{tmp_path}/tools/sizes.py"])


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("/usr/bin/torchrun --x a.py", "torchrun --x a.py"), ("-u /x/deepspeed a.py", "deepspeed a.py"),
        ("/x/accelerate launch a.py", "accelerate launch a.py"), ("/x/accelerate env", None),
        ("/x/accelerate-launch a.py", "accelerate launch a.py"),
        ("/x/torch/distributed/run.py a.py", "torch.distributed.run a.py"),
        ("-u -m torch.distributed.run a.py", "torch.distributed.run a.py"),
        ("-m deepspeed.launcher.runner a.py", "deepspeed a.py"),
        ("-m accelerate.commands.launch a.py", "accelerate launch a.py"),
    ],
)  # fmt: skip
def test_launchers_that_python_runs(words: str, argv: str | None) -> None:
    assert launch_of(words.split()) == (None if argv is None else argv.split())


def test_the_gpus_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for index in range(4):
        (tmp_path / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
        text = f"Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 11\nGPU UUID: \t GPU-{index}\n"
        (tmp_path / "gpus" / f"0000:0{index}:00.0" / "information").write_text(text)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat\n")
    monkeypatch.setattr(gpus, "DRIVER", str(tmp_path))
    monkeypatch.delenv("INFO_SCRIPT_RUN_ALL", raising=False)
    assert gpus.nvidia_smi(["-L"]) == 0
    assert capfd.readouterr() == ("".join(f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-{i})\n" for i in range(4)), "")
    gpus.nvidia_smi(["--query-gpu=index,memory.total,driver_version,compute_cap,memory.used", "--format=csv", "-i", "1"])
    assert capfd.readouterr().out == (
        "index, memory.total [MiB], driver_version, compute_cap, memory.used [MiB]\n1, 81920 MiB, 535.104.05, 8.0, 0 MiB\n"
    )
    gpus.nvidia_smi(["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    assert capfd.readouterr().out == "NVIDIA A100-SXM4-80GB, 81920\n" * 4
    gpus.nvidia_smi(["-q"])
    assert capfd.readouterr().out.count("Product Name") == 4
    for words in (
        "-pm 1",
        "-lgc 1000",
        "--power-limit=300",
        "--lock-gpu-clocks 1",
        "mig -cgi 9",
        "-i 0 -mig 1",
        "--unknown",
        "drain",
    ):
        gpus.nvidia_smi(words.split())
        assert capfd.readouterr() == ("", f"get-training-info: not run: nvidia-smi {words}\n")
    for words in ("topo -m", "nvlink --status", "--query-compute-apps=pid --format=csv"):
        gpus.nvidia_smi(words.split())
        assert capfd.readouterr() == ("", "")


def sizes(output: str) -> list[str]:
    """The number of processes of each launch in the output of --info-dry."""
    return [each.value("--nproc_per_node") for each in printed(output)]


def launch(number: int) -> str:
    """A launch with `number` processes."""
    return f"torchrun --nproc_per_node {number} pretrain_gpt.py {MODEL}"


def not_run(output: str) -> list[str]:
    """The commands that were named and not run."""
    return [line.partition(": not run: ")[2] for line in output.splitlines() if ": not run: " in line]


def marks(folder: Path, *commands: str) -> Path:
    """A folder with commands that leave a line in `called` if they run."""
    for name in commands:
        executable(folder / "bin" / name, f'#!/bin/sh\necho "{name} $*" >> {folder}/called\n')
    return folder / "bin"


NETWORK = " : the network is not used (--info-run-all uses it)"


@pytest.mark.slow
def test_a_command_with_an_address_says_that_the_network_is_not_used(tmp_path: Path) -> None:
    text = """set -euo pipefail
curl -sSL https://a.b/c
wget -q https://a.b/c -O - | tar xz 2> /dev/null || true
git clone https://a.b/c
pip install git+https://a.b/c
aria2c https://a.b/c
source <(curl -s https://a.b/env.sh)
test "$(curl -s -o /dev/null -w '%{http_code}' localhost:80/health)" = 200
pip install x
"""
    done = run_text(text + LAUNCH, "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1, done.stderr
    named = not_run(done.stderr)
    assert named[0] == f"curl -sSL https://a.b/c{NETWORK}"
    assert [NETWORK in line for line in named] == [True] * 7 + [False]


@pytest.mark.slow
def test_a_command_inside_another_runs_only_with_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "plain.sh").write_text("touch canary\n")
    other = (
        "docker exec c sh -c ': > canary'", "docker run --rm -v $PWD:/w img cp a canary", "docker compose exec c touch canary",
        "podman run img touch canary", "singularity exec image.sif touch canary",
        "apptainer exec --nv image.sif sh -c ': > canary'", "enroot start image touch canary", "shifter --image=x touch canary",
        "ch-run image -- touch canary", "kubectl exec p -- touch canary", "sudo touch canary", "sudo sh -c 'echo x > canary'",
        "echo canary | sudo xargs touch", "su -c 'touch canary'", "ssh node touch canary", "ssh -p 22 node 'touch canary'",
        "ssh node bash plain.sh", "ssh node bash -s < plain.sh", "ssh node <<< 'touch canary'",
        "pdsh -w node[1-2] touch canary", "clush -w n touch canary", "tmux new-session -d 'touch canary'",
        "tmux send-keys -t x 'touch canary' Enter", "screen -dm touch canary", "parallel touch ::: canary",
        "sudo bash plain.sh", "docker exec -i c bash < plain.sh", "uvx touch canary",
    )  # fmt: skip
    text = "\n".join(f"{command}\nif [ -e canary ]; then echo 'ran: {index}'; rm canary; fi" for index, command in enumerate(other))
    done = run_text(f"set -e\n{text}\n{LAUNCH}", "--info-dry", folder=tmp_path)
    assert len(printed(done.stdout)) == 1, done.stderr
    assert "ran: " not in done.stderr
    assert len(not_run(done.stderr)) == len(other)


@pytest.mark.slow
def test_a_command_inside_another_with_a_launcher_runs(tmp_path: Path) -> None:
    (tmp_path / "launch_all.sh").write_text(f"#!/bin/bash\n{launch(20)}\n")
    commands = [
        f"docker exec -it -e A=b c bash -c 'cd /w; {launch(1)}'", f"docker run --gpus all --ipc=host img {launch(2)}",
        f"docker compose run --rm service {launch(3)}", f"kubectl exec -it pod -c main -- {launch(4)}",
        f"ch-run -w image -- {launch(5)}", f"shifter --image=x {launch(6)}", f"sudo -E {launch(7)}",
        f"sudo docker exec c {launch(8)}", f"su - user -c '{launch(9)}'", f"ssh -o A=b node 'touch f; {launch(10)}'",
        f"ssh node bash -s <<'EOF'\n{launch(11)}\nEOF", f"ssh node <<'EOF'\n{launch(12)}\nEOF",
        f"pdsh -w node[1-2] {launch(13)}", f"tmux new-session -d -s x; tmux send-keys -t x '{launch(14)}' C-m",
        f"tmux has-session -t x || tmux new -d -s x '{launch(15)}'", f"screen -dmS x bash -c '{launch(16)}'",
        f"parallel -j 2 ssh {{}} '{launch(17)}' ::: node1 node2", f"flock /tmp/lock {launch(18)}",
        f"flock -n lock -c '{launch(19)}'", "ssh node bash launch_all.sh", f"singularity exec --nv x.sif {launch(21)}",
        f"docker run --entrypoint torchrun img {launch(22)[9:]}",
        f"printf '%s\\n' node1 node2 | xargs -I{{}} ssh {{}} '{launch(23)}'", f"screen -S x -X stuff '{launch(24)}\\n'",
    ]  # fmt: skip
    done = run_text("set -e\n" + "\n".join(commands), "--info-dry", folder=tmp_path)
    assert sizes(done.stdout) == [str(number) for number in range(1, 25)], done.stderr
    said = [
        line.split(" in ")[1].split(" runs here")[0] for line in done.stderr.splitlines() if "runs here: its paths are " in line
    ]
    assert len(said) == len(set(said))
    assert {"docker exec", "docker run", "ssh", "kubectl exec", "singularity exec"} <= set(said)


@pytest.mark.slow
def test_a_tunnel_does_not_read_the_input_of_a_loop(tmp_path: Path) -> None:
    text = (
        f"printf '%s\\n' 1 2 | while read n; do ssh -fN -L 1:a:1 node; torchrun --nproc_per_node $n pretrain_gpt.py {MODEL}; done"
    )
    assert sizes(run_text(text, "--info-dry", folder=tmp_path).stdout) == ["1", "2"]


@pytest.mark.slow
def test_managers_of_environments(tmp_path: Path) -> None:
    starters = (
        "uv run --all-packages --all-groups --no-default-groups --managed-python --frozen --no-sync --isolated --active --exact",
        "uv run --no-env-file --no-editable --only-dev -q --offline --native-tls --no-config --no-cache --refresh --reinstall -U",
        "uv --quiet --project x run --with a --with-requirements b.txt --extra c --group d --python 3.12 --package e -i f --",
        "uv run --compile-bytecode --no-build-isolation --no-build --no-binary --no-sources --no-index --env-file .env -p 3.11",
        "uvx --from torch", "uv tool run --from torch", "pixi run -e gpu", "poetry run", "pdm run", "rye run", "hatch run",
        "hatch run gpu:", "pipenv run", "conda run -n x --no-capture-output", "conda run --live-stream -p /x",
        "micromamba run -n x", "mamba run -n x",
    )  # fmt: skip
    forms = [f"{starter}{'' if starter.endswith(':') else ' '}{launch(number)}" for number, starter in enumerate(starters, 1)]
    count = len(forms)
    forms += [
        f"uv run -m torch.distributed.run {launch(count + 1)[9:]}",
        f"uv run --module torch.distributed.run {launch(count + 2)[9:]}",
        f"uv run python -u -m torch.distributed.run {launch(count + 3)[9:]}",
        f"uv run python $(which torchrun) {launch(count + 4)[9:]}",
        f"uv run accelerate launch --nproc_per_node {count + 5} --num_processes 2 train.py {MODEL}",
        f"uv run pretrain_gpt.py --nproc_per_node {count + 6} {MODEL}",
        f"uv run --script pretrain_gpt.py --nproc_per_node {count + 7} {MODEL}",
    ]  # fmt: skip
    refused = ("uv sync", "uv pip install x", "uvx ruff", "pixi run no_such_task", "poetry install", "conda install x", "uv run -")
    done = run_text("set -e\n" + "\n".join([*forms, *refused]), "--info-dry", folder=tmp_path)
    assert sizes(done.stdout) == [str(number) for number in range(1, count + 8)], done.stderr
    assert not_run(done.stderr) == list(refused)


@pytest.mark.slow
def test_a_launcher_that_a_python_file_starts(tmp_path: Path) -> None:
    words = [launch(number).split() for number in range(1, 5)]
    (tmp_path / "launch.py").write_text(
        f"import os, subprocess\nsubprocess.run({words[0]})\nos.system({launch(2)!r})\n"
        f"subprocess.check_call({launch(3)!r}, shell=True)\nos.execvp('torchrun', {words[3]})\n"
    )
    done = run_text("set -e\npython launch.py\npython3 $(which torchrun) " + launch(5)[9:], "--info-dry", folder=tmp_path)
    assert sizes(done.stdout) == ["1", "2", "3", "4", "5"], done.stderr


@pytest.mark.slow
def test_python_that_prepares_data_is_not_run_and_helpers_run(tmp_path: Path) -> None:
    for folder in ("tools/checkpoint", "megatron"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("tools/preprocess_data.py", "tools/checkpoint/convert.py", "tools/sizes.py", "download.py"):
        (tmp_path / name).write_text("print('it converts')\nraise SystemExit(3)\n")
    (tmp_path / "helper.py").write_text("print(4)\n")
    prepared = (
        "python tools/preprocess_data.py --input x", "python tools/checkpoint/convert.py --model-type GPT",
        "python3 tools/sizes.py", "python download.py", "python -m nltk.downloader punkt",
    )  # fmt: skip
    text = "set -e\n" + "\n".join(prepared) + f"\nN=$(python helper.py)\n{LAUNCH.replace('8', '$N', 1)}"
    done = run_text(text, "--info-dry", folder=tmp_path)
    assert sizes(done.stdout) == ["4"], done.stderr
    assert not_run(done.stderr) == list(prepared)
    assert "it converts" not in done.stderr


WAITS = (
    "nc -z node1 6379", "nc node1 1", "ncat -z node1 1", "telnet node1 22", "ping -c 1 node1", "getent hosts no_such_node",
    "nslookup no_such_node", "host no_such_node", "dig +short no_such_node", "curl -sf http://node1:8000/health",
    "wget -q --spider node1", "ray status | grep -q GPU", "test $(ray status | grep -c ' node_') -eq 4",
    "ray status | grep -q '0.0/32.0 GPU'", "test $(ray list nodes | grep -c ALIVE) -eq 4", "ray start --head",
    "ray start --address=x", "ray health-check", "redis-cli ping | grep -q PONG", "etcdctl endpoint health", "pg_isready",
    "kubectl wait --for=condition=Ready pod/x", "docker inspect x", "docker ps -q", "inotifywait -e create .",
    "! squeue -h -j 7 | grep -q 7", "test -z \"$(scontrol show job 7)\"", "squeue --me", "flock -n 9",
    "test $(getent hosts no_such_node | awk '{print $1}') = 127.0.0.1", "test $(dig +short no_such_node) = 127.0.0.1",
    "ping -c 1 node1 | grep -q '(127.0.0.1)'", "test $(hostname -I | awk '{print $1}') = 127.0.0.1", "hostname -i",
    "hostname -f", "test $(hostname) = $(uname -n)", "ip route get 8.8.8.8", "ip -4 addr show ib0 | grep -q 'inet 127'",
    "getent passwd root | grep -q :0:", "test $(ip route | awk '/default/ {print $5}') = eth0", "ifconfig bond0 | grep -q inet",
    "host no_such_node | grep -q 'has address'", "nslookup no_such_node | awk '/^Address: / {print $2}' | grep -q 127",
)  # fmt: skip


@pytest.mark.slow
def test_commands_that_wait_or_ask_are_answered_at_once(tmp_path: Path) -> None:
    text = "\n".join(f"until {command}; do echo waits; exit 9; done" for command in WAITS)
    environ = {"SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_PER_NODE": "8"}
    done = run_text(f"set -eo pipefail\n{text}\n{LAUNCH}", "--info-dry", folder=tmp_path, environ=environ)
    assert len(printed(done.stdout)) == 1, done.stderr
    assert "waits" not in done.stderr


@pytest.mark.slow
def test_the_state_of_the_cluster(tmp_path: Path) -> None:
    text = f"""
scontrol show job $SLURM_JOB_ID | grep Command=
scontrol show hostnames $SLURM_JOB_NODELIST
ray list nodes --format=json
nvidia-smi -L | wc -l
WORLD_SIZE=4 ray status
{LAUNCH}"""
    done = run_text(f"#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n{text}", "--info-dry", folder=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[:3] == [f"   Command={tmp_path}/launch.sh", "node001", "node002"]
    assert [node["state"] for node in json.loads(lines[3])] == ["ALIVE", "ALIVE"]
    assert "4" in lines
    assert lines[lines.index("Active:") + 3] == "Pending:"
    assert " 0.0/8.0 GPU" in lines


@pytest.mark.slow
def test_with_run_all_every_command_but_launchers_runs(tmp_path: Path) -> None:
    commands = [
        "docker exec c ls",
        "ssh node ls",
        "sudo ls",
        "ping x",
        "curl x",
        "ray status",
        "uv sync",
        "scontrol ping",
        "tmux ls",
    ]
    commands += ["nvidia-smi -pm 1", "pkill x", "squeue -a", "hostname -I", "git push", "parallel ls", "nc x"]
    place = marks(tmp_path, *{command.split()[0] for command in commands})
    text = "\n".join(commands) + f"\npython tools/preprocess_data.py\n{LAUNCH}\nssh node '{launch(2)}'"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "preprocess_data.py").write_text("open('called', 'a').write('python\\n')")
    done = run_text(text, "--info-dry", "--info-run-all", folder=tmp_path, path=[place])
    assert sizes(done.stdout) == ["8", "2"], done.stderr
    assert (tmp_path / "called").read_text().splitlines() == [*commands, "python"]


def test_a_stand_in_imports_little() -> None:
    """A script may start hundreds of them."""
    root = Path(launchers.__file__).parent
    heavy = ("re", "json", "typing", "dataclasses", "subprocess", "shlex", "pathlib", "shutil")
    for name in ("dispatch", "launchers", "inner", "context", "python_command", "words", "start"):
        lines = (root / f"{name}.py").read_text().splitlines()
        assert not [line for line in lines if line.startswith(tuple(f"import {module}" for module in heavy))]
    assert os.path.exists(root / "start.py")
