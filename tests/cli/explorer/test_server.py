"""The local server answers its page only, and nobody else."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import pytest

from analyzer.cli.commands.explore import split
from analyzer.cli.explorer.files import INDEX, POLICY, content, names
from analyzer.cli.explorer.server import MOST_BYTES, ExplorerServer
from analyzer.errors import InputError
from tests.command import assert_refused, run

ROOT = Path(__file__).resolve().parents[3]
JSON = {"Content-Type": "application/json"}
LAUNCH = "meta-llama/Llama-3.1-8B --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 64"


@pytest.fixture
def server() -> Iterator[ExplorerServer]:
    found = ExplorerServer(0, None)
    thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def request(
    server: ExplorerServer, method: str, name: str = "", *, token: str | None = None, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    path = f"/{server.token if token is None else token}/{name}"
    connection.request(method, path, body=body, headers={key.replace("_", "-"): value for key, value in headers.items()})
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def ask(server: ExplorerServer, question: Any, **headers: str) -> tuple[int, Any]:
    status, _, body = request(
        server, "POST", "answer", body=json.dumps(question).encode(), Content_Type="application/json", **headers
    )
    return status, json.loads(body) if status == 200 else body


def test_it_serves_the_page_with_its_policy(server: ExplorerServer) -> None:
    status, headers, body = request(server, "GET")
    assert status == 200
    assert body == content(INDEX)
    assert POLICY in headers["Content-Security-Policy"]
    assert POLICY.encode() in body
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    for name in names():
        assert request(server, "GET", name)[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_it_answers_questions(server: ExplorerServer) -> None:
    status, found = ask(server, {"ask": "figures", "state": {"launch": LAUNCH, "gpus": 8}})
    assert status == 200
    assert found["report"]["world"]["size"] == 8
    assert "error" in ask(server, [])[1]
    assert "error" in json.loads(request(server, "POST", "answer", body=b"{", Content_Type="application/json")[2])
    deep = b"[" * 100_000
    assert "error" in json.loads(request(server, "POST", "answer", body=deep, Content_Type="application/json")[2])


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("token", ["", "x", "../", "é"])
def test_another_token_is_refused(server: ExplorerServer, method: str, token: str) -> None:
    from urllib.parse import quote

    assert request(server, method, "answer", token=quote(token), body=b"{}", Content_Type="application/json")[0] == 403


@pytest.mark.parametrize("host", ["example.com", "example.com:80", "127.0.0.1", "127.0.0.1:1", "localhost.example.com"])
def test_another_host_is_refused(server: ExplorerServer, host: str) -> None:
    """As of a name of someone else that resolves to this machine."""
    assert request(server, "GET", Host=host)[0] == 403
    assert ask(server, {"ask": "start"}, Host=host)[0] == 403


@pytest.mark.parametrize("origin", ["http://example.com", "null", "https://127.0.0.1"])
def test_another_origin_is_refused(server: ExplorerServer, origin: str) -> None:
    assert ask(server, {"ask": "start"}, Origin=origin)[0] == 403


def test_its_own_origin_and_localhost_are_accepted(server: ExplorerServer) -> None:
    host = f"localhost:{server.server_port}"
    assert ask(server, {"ask": "start"}, Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_of_another_page_is_refused(server: ExplorerServer, kind: str) -> None:
    assert request(server, "POST", "answer", body=b"{}", Content_Type=kind)[0] == 415


def test_a_long_question_is_refused(server: ExplorerServer) -> None:
    status, *_ = request(server, "POST", "answer", body=b"", Content_Length=str(MOST_BYTES + 1), Content_Type="application/json")
    assert status == 413
    for length in ("-1", "x", "²"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            host = f"Host: 127.0.0.1:{server.server_port}"
            head = f"POST /{server.token}/answer HTTP/1.1\r\n{host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert b"411" in connection.recv(1000).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "name", ["__init__.py", "../server.py", "..%2fserver.py", "%2e%2e/server.py", "page/index.html", "/etc/passwd", "x"]
)
def test_other_files_are_not_served(server: ExplorerServer, name: str) -> None:
    assert request(server, "GET", name)[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_other_methods_are_refused(server: ExplorerServer, method: str) -> None:
    assert request(server, method)[0] == 501


def test_a_second_search_ends_the_first_and_stop_ends_it(server: ExplorerServer) -> None:
    state = {"launch": LAUNCH, "gpus": 1024}
    answers: list[Any] = []

    def search() -> None:
        answers.append(ask(server, {"ask": "search", "state": state, "over": "complete", "seconds": 300})[1])

    threads = [Thread(target=search)]
    threads[0].start()
    while not server.search.is_running:
        sleep(0.01)
    first = server.search.count
    threads.append(Thread(target=search))
    threads[1].start()
    while server.search.count == first:
        sleep(0.01)
    threads[0].join(30)
    assert ask(server, {"ask": "figures", "state": {"launch": LAUNCH, "gpus": 8}})[1]["report"]
    request(server, "POST", "stop", body=b"{}", Content_Type="application/json")
    threads[1].join(30)
    assert answers == [{"stopped": True}, {"stopped": True}]


def test_the_words_of_the_command() -> None:
    assert split(["--port", "80", "a.sh", "--gpu", "H200", "--", "--port", "1"]) == (
        80,
        True,
        ["a.sh", "--gpu", "H200", "--", "--port", "1"],
    )
    assert split(["--port=8080", "--no-browser"]) == (8080, False, [])
    for words in (["--port"], ["--port", "0"], ["--port=99999"], ["--port", "x"]):
        with pytest.raises(InputError):
            split(words)


def test_a_script_that_does_not_exist_is_refused() -> None:
    assert_refused(run("explore", "missing.sh", "--no-browser"), "missing.sh")
    assert_refused(run("explore", "--prot", "1"), "--prot")


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        assert_refused(run("explore", "--no-browser", "--port", str(used.getsockname()[1])), "--port")


@pytest.mark.slow
def test_the_command_serves_a_script_until_it_is_interrupted() -> None:
    command = [sys.executable, "get_training_info.py", "explore", "examples/pretrain_llama3_8b.sh", "--gpu", "H200", "--no-browser"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(each for each in process.stderr if "http://" in each)
        url = urlsplit(line.split()[5])
        assert url.hostname == "127.0.0.1"
        connection = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=30)
        connection.request("POST", f"{url.path}answer", body=b'{"ask": "start"}', headers=JSON)
        text = json.loads(connection.getresponse().read())["opened"]
        assert text.startswith("get-training-info torchrun")
        question = {"ask": "figures", "state": {"launch": text}}
        connection.request("POST", f"{url.path}answer", body=json.dumps(question).encode(), headers=JSON)
        assert json.loads(connection.getresponse().read())["gpu"]["name"] == "H200-141GB"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
