"""The preloaded library by itself: writing goes to a private copy, and other processes and the network are left alone."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from analyzer.script.preload_library import COMPILERS, write_library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(all(shutil.which(name) is None for name in COMPILERS), reason="there is no C compiler"),
]

FILES = {
    "echo hi > a.txt; cat a.txt": "hi",
    "echo hi >> a.txt; cat a.txt": "content of a.txt\nhi",
    ": > a.txt; wc -c < a.txt": "0",
    "exec > log; echo x; exec >&2; cat log": "",
    "cat > new.txt <<'END'\none\nEND\ncat new.txt; test -f new.txt && echo yes": "one\nyes",
    "set -o noclobber; echo x > a.txt || echo refused; echo x > n.txt; cat n.txt": "refused\nx",
    "cp a.txt c.txt; cp -r data d2; cp -a data d3; cat c.txt d2/sub/z.txt; ls d3": (
        "content of a.txt\ncontent of data/sub/z.txt\nsub\nx.txt\ny.txt"
    ),
    "mv a.txt m.txt; cat m.txt; test -e a.txt || echo gone": "content of a.txt\ngone",
    "mv data moved && cat moved/sub/z.txt; test -e data || echo gone; ls": (
        "content of data/sub/z.txt\ngone\na.txt\nb.txt\nempty\nlatest\nlink\nmoved"
    ),
    "rm -rf data; ls; test -d data || echo gone": "a.txt\nb.txt\nempty\nlatest\nlink\ngone",
    "rm -rf *; ls; mkdir data; ls data; touch data/n; ls data": "n",
    "rm -rf data; mkdir new; touch new/n; mv new data; ls data": "n",
    "ln -sf b.txt latest; cat latest; ln -s x lock || exit 1; readlink lock; rm -f lock; ln -s y lock && readlink lock": (
        "content of b.txt\nx\ny"
    ),
    "sed -i s/content/changed/ a.txt; cat a.txt": "changed of a.txt",
    'mkdir -p d/x/y && cd d/x/y && test "$(pwd -P)" = "$WORK/d/x/y" && echo q > z && cd ../.. && cat x/y/z && cd .. && cat a.txt': (
        "q\ncontent of a.txt"
    ),
    "tar cf t.tar data && rm -rf data && tar xf t.tar && cat data/sub/z.txt && ls data": (
        "content of data/sub/z.txt\nsub\nx.txt\ny.txt"
    ),
    "printf 'b\\na\\n' > s; sort -o s s; cat s; sort -o a.txt a.txt; echo t | tee b.txt; cat b.txt": "a\nb\nt\nt",
    "touch a.txt n; ls n; install -m 600 a.txt i; stat -c %a i; truncate -s 3 a.txt; cat a.txt": "n\n600\ncon",
    "dd if=/dev/zero of=b.txt bs=1 count=2 2> /dev/null; wc -c < b.txt": "2",
    "T=$(mktemp -d); echo x > $T/f; cat $T/f; ls $T; rm -rf $T; test -e $T || echo gone": "x\nf\ngone",
    "find . -name '*.txt' -delete; find . -type f": "",
    "find . -name '*.txt' -exec rm {} +; find . -type f": "",
    'perl -i -pe s/content/perl/ a.txt; cat a.txt; awk \'BEGIN { print "x" > "aw" }\'; cat aw': "perl of a.txt\nx",
    'perl -e \'unlink "a.txt"; mkdir "made"; print -e "a.txt" ? "there" : "gone"\'; ls -d made': "gonemade",
    "cat > x.sh <<'END'\n#!/bin/bash -e\necho $0 $1\nEND\nchmod +x x.sh; ./x.sh 1; bash x.sh 2; source x.sh; cd data; ../x.sh 3": (
        "./x.sh 1\nx.sh 2\nbash\n../x.sh 3"
    ),
    "mkdir b; printf '#!/bin/sh\\necho own\\n' > b/tool; chmod +x b/tool; PATH=$PWD/b:$PATH; tool; rm b/tool; tool || echo no": (
        "own\nno"
    ),
    "mkdir new; touch new/1.txt new/2.txt data/n.txt; echo new/*.txt data/*.txt": (
        "new/1.txt new/2.txt data/n.txt data/x.txt data/y.txt"
    ),
    "echo x > link/n; cat data/n; ls link/; echo y > latest; cat a.txt; rm latest; cat a.txt": "x\nn\nsub\nx.txt\ny.txt\ny\ny",
    "ln a.txt hard; echo more >> hard; cat a.txt; rm a.txt; tail -n 1 hard": "content of a.txt\nmore\nmore",
    "ln -s $WORK/data far; echo x > far/x.txt; cat data/x.txt; rm -r far/sub; ls data": "x\nx.txt\ny.txt",
    "mkfifo p; (echo through > p &); cat p; rm p": "through",
    "diff <(echo a) <(echo a) && echo same; echo o > /dev/stdout; echo fd > /dev/fd/1": "same\no\nfd",
    "(sleep 0.1; echo bg > bg) & wait; cat bg": "bg",
    "exec 3<> a.txt; echo NEW >&3; exec 3>&-; cat a.txt": "NEW\nent of a.txt",
    "chmod 600 a.txt; chmod -R 700 data; stat -c %a a.txt data data/x.txt; touch -d 2001-01-01 b.txt; date -r b.txt +%Y": (
        "600\n700\n700\n2001"
    ),
    "rmdir empty; test -d empty || echo gone; rmdir data 2> /dev/null || echo full; mkdir a.txt 2> /dev/null || echo exists": (
        "gone\nfull\nexists"
    ),
    "mkdir d && mv d e && touch e/f && mv e/f e/g && mv e empty/ && ls empty/e": "g",
    "echo 1 > /proc/self/root$WORK/a.txt; cat a.txt": "1",
    "echo 1 > /proc/sys/vm/drop_caches || echo refused": "refused",
    "dash -c 'echo x > a.txt; cat a.txt; echo data/*; [ -f other ] || echo no'": "x\ndata/sub data/x.txt data/y.txt\nno",
    "gzip a.txt && gunzip a.txt.gz && cat a.txt; shred -u b.txt; ls b.txt 2> /dev/null || echo gone": "content of a.txt\ngone",
    "rm -rf $WORK/../*; ls -A ..; ls -A $FOLDER/bin | wc -l": "0",
    "cd data && rm -rf $WORK/data; cd ..; ls -d data 2> /dev/null || echo gone": "gone",
    "unset LD_PRELOAD INFO_SCRIPT_FOLDER INFO_SCRIPT_PROTECT INFO_SCRIPT_PRELOAD; sh -c ': > a.txt'; wc -c < a.txt": "0",
    "env -i /bin/sh -c ': > a.txt'; wc -c < a.txt": "0",
    "git init -q g && cd g && git config user.name x && git config user.email x && echo a > f && git add f && git commit -qm m"
    " && git log --format=%s && git checkout -qb other && git status --short && rm -rf .git && ls -A": "m\nf",
    "head -c 70M /dev/zero > large; mv large other; stat -c %s other": str(70 << 20),
    "echo x >> large_file; echo status $?; mv large_file other; stat -c %s other": f"status 1\n{65 << 20}",
}
SHORT = "import os; os.environ['TMPDIR'] = '/tmp'; "  # the path of a socket is short
PYTHON = {
    "open('a.txt', 'w').write('new'); print(open('a.txt').read())": "new",
    "import os, shutil; shutil.rmtree('data'); print(os.path.exists('data'), sorted(os.listdir('.')))": (
        "False ['a.txt', 'b.txt', 'empty', 'large_file', 'latest', 'link']"
    ),
    "import os; os.rename('b.txt', 'c.txt'); print(open('c.txt').read(), os.path.exists('b.txt'))": "content of b.txt\n False",
    "from pathlib import Path; p = Path('n/m'); p.mkdir(parents=True); f = p / 'f'; f.write_text('t'); print(f.read_text())": "t",
    "import os, tempfile\nwith tempfile.TemporaryDirectory() as t:\n  open(t + '/z', 'w').close(); print(os.listdir(t))": "['z']",
    "import os; os.makedirs('q/r/s'); os.chdir('q/r'); print(os.getcwd()[-4:], os.listdir(), os.path.realpath('s')[-6:])": (
        "/q/r ['s'] /q/r/s"
    ),
    "import mmap; f = open('a.txt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0:1] = b'X'; print(open('a.txt').read(3))": "Xon",
    "import os; d = os.open('data', 0); os.unlink('x.txt', dir_fd=d); print(sorted(os.listdir(d)), sorted(os.listdir('data')))": (
        "['sub', 'y.txt'] ['sub', 'y.txt']"
    ),
    "import os; f = os.open('b.txt', 0); os.fchmod(f, 0); os.utime(f); os.truncate('b.txt', 2); print(open('b.txt').read())": "co",
    "import multiprocessing as m; print(m.Pool(2).map(abs, [-1, 2]))": "[1, 2]",
    SHORT + "from multiprocessing import Manager; d = Manager().dict(); d['x'] = 1; print(d)": "{'x': 1}",
    SHORT + "import multiprocessing as m; d = m.get_context('spawn').Manager().list('ab'); print(d)": "['a', 'b']",
    SHORT + "from multiprocessing.connection import Client, Listener; s = Listener(); c = Client(s.address); s.accept().send(1);"
    " print(c.recv(), s.address[:5])": "1 /tmp/",
    "import subprocess; subprocess.run('rm -rf data', shell=True); subprocess.run(['cp', '/dev/null', 'a.txt'])": "",
    "import os; os.system('rm -rf data'); print(os.popen('ls -d data 2> /dev/null || echo gone').read())": "gone",
}
PROCESSES = {
    "sleep 30 & P=$!; kill $P; wait $P; echo $?": "143",
    "for I in $(seq 200); do sleep 2 & P=$!; kill $P; wait $P; test $? = 143 || echo lost; done; echo ended": "ended",
    "kill -9 $VICTIM; echo $?; kill -0 $VICTIM && echo alive; kill -9 -- -$VICTIM; kill -9 -1; echo $?": "0\nalive\n0",
    "kill 999999 2> /dev/null || echo none": "none",
    "dash -c 'kill -9 $VICTIM'; perl -e 'print kill 9, $ENV{VICTIM}'; env kill -STOP $VICTIM": "1",
    'python3 -c "import os; os.kill($VICTIM, 9); os.killpg($VICTIM, 15); os.kill(os.getpid(), 0)"; echo $?': "0",
    "(sleep 50 & sleep 50 & wait) & sleep 0.2; kill -9 -1; sleep 0.1; pgrep -x -P $$ sleep; timeout 0.2 sleep 5; echo $?": "124",
    "B=$(ps -o ni= -p $VICTIM); renice -n 19 -p $VICTIM > /dev/null; test $B = $(ps -o ni= -p $VICTIM) && echo same": "same",
}
NETWORK = {
    "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); s.accept()[0].send(b'x');"
    " print(c.recv(1))": "b'x'",
    "print(code(lambda: socket.create_connection(('127.0.0.1', PORT))), code(lambda: socket.create_connection(('8.8.8.8', 53))))": (
        "ECONNREFUSED ENETUNREACH"
    ),
    "u = socket.socket(type=socket.SOCK_DGRAM); print(code(lambda: u.sendto(b'x', ('127.0.0.1', PORT))))": "ECONNREFUSED",
    "u = socket.socket(socket.AF_UNIX); print(code(lambda: u.connect('../server.sock')))": "ECONNREFUSED",
    "u = socket.socket(socket.AF_UNIX); u.bind('own.sock'); u.listen(); v = socket.socket(socket.AF_UNIX); v.connect('own.sock');"
    " v.send(b'x'); print(u.accept()[0].recv(1))": "b'x'",
    "u = bound('own.sock'); print(u.getsockname(), [n for n in os.listdir('.') if 'sock' in n])": "own.sock ['own.sock']",
    "u = bound('../tmp/s'); u.listen(); v = bound('v.sock'); v.connect(u.getsockname()); c, name = u.accept();"
    " print(name, c.getpeername(), v.getpeername(), c.getsockname())": "v.sock v.sock ../tmp/s ../tmp/s",
    "u = bound('own.sock'); u.listen(); pid = os.fork()\n"
    "if pid == 0:\n    v = bound('v.sock'); v.connect(u.getsockname()); v.send(b'x'); os._exit(v.getpeername() != 'own.sock')\n"
    "c, name = u.accept(); print(name, c.recv(1), os.waitpid(pid, 0)[1])": "v.sock b'x' 0",
    "u = bound('own.sock'); u.listen(); os.set_inheritable(u.fileno(), True); import subprocess, sys\n"
    "other = 'import socket; u = socket.socket(fileno=%d);"
    " print(u.getsockname()); c, n = u.accept(); print(n, c.recv(1))' % u.fileno()\n"
    "p = subprocess.Popen([sys.executable, '-c', other], close_fds=False); v = bound('v.sock');"
    " v.connect('own.sock'); v.send(b'x'); print(p.wait())": "own.sock\nv.sock b'x'\n0",
    "u, v = (bound(name, socket.SOCK_DGRAM) for name in ('u', 'v')); v.sendto(b'a', 'u'); v.sendto(b'b', 'u'); v.sendto(b'c', 'u');"
    " print(u.recvfrom(1), u.recvfrom_into(bytearray(1)), u.recvmsg(1)[3]); os.remove('u'); print(u.getsockname())": (
        "(b'a', 'v') (1, 'v') v\nu"
    ),
    "n = 'n' * 107; u = bound(n); u.listen(); v = socket.socket(socket.AF_UNIX); v.connect(n); print(v.getpeername() == n)": "True",
    "a, b = socket.socketpair(); u = socket.socket(socket.AF_UNIX); print([a.getsockname(), a.getpeername(), u.getsockname()]);"
    " u.bind('\\0name'); print(u.getsockname() == b'\\0name')": "['', '', '']\nTrue",
    "u = bound('own.sock'); print(code(lambda: bound('own.sock')), code(lambda: u.bind('t.sock')), code(lambda: bound('no/s')),"
    " os.listdir('.').count('t.sock'), u.getsockname())": "EADDRINUSE EINVAL ENOENT 0 own.sock",
    "print(code(lambda: socket.getaddrinfo('example.com', 80)) == str(socket.EAI_AGAIN), socket.gethostbyname('localhost'))": (
        "True 127.0.0.1"
    ),
    "print(len(socket.gethostbyname(socket.gethostname())) > 6, socket.getaddrinfo('10.1.2.3', 80)[0][4])": "True ('10.1.2.3', 80)",
}


@dataclass(frozen=True)
class Machine:
    """A folder with files, a folder of the run, a process, and servers."""

    top: Path
    environ: dict[str, str]
    victim: subprocess.Popen[bytes]

    def run(self, *words: str) -> str:
        """Runs a program with the library. Returns its output; nothing outside the folder of the run may have changed."""
        before = self._state()
        done = subprocess.run(
            words, cwd=self.top / "work", env=self.environ, capture_output=True, text=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._state() == before
        assert self.victim.poll() is None
        assert Path(f"/proc/{self.victim.pid}/stat").read_text().split()[2] == "S"
        assert done.returncode >= 0, done.stderr
        return done.stdout.strip()

    def _state(self) -> dict[str, tuple[object, ...]]:
        """Permissions, size, time, number and content of each file outside the folder of the run."""
        found: dict[str, tuple[object, ...]] = {}
        for place, folders, names in os.walk(self.top):
            if place == str(self.top):
                folders.remove("run")
            for name in [*folders, *names]:
                path = Path(place, name)
                status = path.lstat()
                content = os.readlink(path) if path.is_symlink() else ""
                if path.is_file():
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, content)
        return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    path = tmp_path_factory.mktemp("library") / "preload.so"
    assert write_library(path, {"PATH": os.environ["PATH"]})
    return path


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Iterator[Machine]:
    """The files, a process that waits, and servers."""
    for name in ("work/data/sub", "work/empty", "run/bin", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a.txt", "b.txt", "data/x.txt", "data/y.txt", "data/sub/z.txt"):
        (tmp_path / "work" / name).write_text(f"content of {name}\n")
    (tmp_path / "work" / "latest").symlink_to("a.txt")
    (tmp_path / "work" / "link").symlink_to("data")
    victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    servers = (socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX))
    previous = Path.cwd()
    os.chdir(tmp_path)  # the path of a socket is short
    servers[1].bind("server.sock")
    servers[1].listen()
    os.chdir(previous)
    environ = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path / "work"), "TMPDIR": str(tmp_path / "tmp"),
        "WORK": str(tmp_path / "work"), "FOLDER": str(tmp_path / "run"), "VICTIM": str(victim.pid),
        "PORT": str(servers[0].getsockname()[1]), "INFO_SCRIPT_FOLDER": str(tmp_path / "run"),
        "INFO_SCRIPT_PRELOAD": str(library), "INFO_SCRIPT_PROTECT": "1", "LD_PRELOAD": str(library),
    }  # fmt: skip
    try:
        yield Machine(tmp_path, environ, victim)
    finally:
        victim.kill()
        victim.wait()
        for server in servers:
            server.close()


@pytest.mark.parametrize("snippet", FILES)
def test_what_bash_writes_is_private(snippet: str, machine: Machine) -> None:
    if "large_file" in snippet:
        with (machine.top / "work" / "large_file").open("wb") as file:
            file.truncate(65 << 20)
    assert machine.run("bash", "-c", snippet) == FILES[snippet]


@pytest.mark.parametrize("snippet", PYTHON)
def test_what_python_writes_is_private(snippet: str, machine: Machine) -> None:
    (machine.top / "work" / "large_file").touch()
    assert machine.run("/usr/bin/env", "python3", "-c", snippet) == PYTHON[snippet]


@pytest.mark.parametrize("snippet", PROCESSES)
def test_processes_of_others_get_no_signal(snippet: str, machine: Machine) -> None:
    assert machine.run("bash", "-c", snippet) == PROCESSES[snippet]


@pytest.mark.parametrize("snippet", NETWORK)
def test_connections_stay_in_the_run(snippet: str, machine: Machine) -> None:
    head = (
        "import errno, os, socket\nPORT = int(os.environ['PORT'])\n"
        "def code(call):\n    try:\n        call()\n    except OSError as error:\n"
        "        return errno.errorcode.get(error.errno, str(error.errno))\n"
        "def bound(path, kind=socket.SOCK_STREAM):\n    made = socket.socket(socket.AF_UNIX, kind)\n    made.bind(path)\n"
        "    return made\n"
    )
    assert machine.run("/usr/bin/env", "python3", "-c", head + snippet) == NETWORK[snippet]


@pytest.mark.parametrize("call", ["mq_open", "syscall"])
def test_no_queue_of_messages_is_made(call: str, machine: Machine) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    number = {"x86_64": 240, "aarch64": 180}.get(platform.machine())
    name = f"/test-preload-{os.getpid()}-{call}"
    if number is None or not hasattr(libc, "mq_open"):
        pytest.skip("there are no queues of messages here")
    if libc.mq_open(name.encode(), os.O_RDONLY) >= 0 or ctypes.get_errno() != errno.ENOENT:
        pytest.skip("the kernel has no queues of messages")
    words = f"{number}, b'{name[1:]}'" if call == "syscall" else f"b'{name}'"
    snippet = (
        "import ctypes, errno, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        f"for flags in (os.O_CREAT | os.O_RDWR, os.O_RDWR):\n    found = libc.{call}({words}, flags, 0o600, None)\n"
        "    print(found, errno.errorcode[ctypes.get_errno()])"
    )
    try:
        assert machine.run("/usr/bin/env", "python3", "-c", snippet) == "-1 EACCES\n-1 ENOENT"
    finally:
        made = libc.mq_unlink(name.encode()) == 0
    assert not made


def test_programs_are_noted_and_variables_restored(machine: Machine) -> None:
    found = machine.run(
        "bash", "-c", "env -i /usr/bin/env | cut -d = -f 1 | sort; other_program 2> /dev/null; cat $FOLDER/programs"
    )
    names = [line for line in found.splitlines() if not line.startswith("/")]
    assert names == ["INFO_SCRIPT_FOLDER", "INFO_SCRIPT_PRELOAD", "INFO_SCRIPT_PROTECT", "LD_PRELOAD"]
    programs = [os.path.basename(line) for line in found.splitlines() if line.startswith("/")]
    assert sorted(programs) == ["cat", "cut", "env", "env", "sort"]


def test_without_protection_files_are_written(machine: Machine) -> None:
    del machine.environ["INFO_SCRIPT_PROTECT"]
    subprocess.run(["bash", "-c", "echo x > a.txt; rm -r data"], cwd=machine.top / "work", env=machine.environ, check=True)
    assert (machine.top / "work" / "a.txt").read_text() == "x\n"
    assert not (machine.top / "work" / "data").exists()
    assert (machine.top / "run" / "programs").read_text().endswith("/rm\n")


def test_a_file_that_the_user_cannot_write_stays_so(machine: Machine) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may write every file")
    (machine.top / "work" / "a.txt").chmod(0o400)
    (machine.top / "work" / "data").chmod(0o500)
    assert (
        machine.run("bash", "-c", "echo x > a.txt || echo no; touch data/new || echo no; rm data/x.txt || echo no") == "no\nno\nno"
    )
    (machine.top / "work" / "data").chmod(0o700)
