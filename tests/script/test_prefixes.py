"""Commands that start another command and are left out."""

from __future__ import annotations

import pytest

from analyzer.script.stand_ins import inner, prefixes


@pytest.mark.parametrize(
    ("name", "words", "started"),
    [
        ("taskset", "-c 0-3 torchrun a.py", ["torchrun", "a.py"]),
        ("taskset", "0xff torchrun a.py", ["torchrun", "a.py"]),
        ("taskset", "-p 0xff 700", None),
        ("ionice", "-c 3 -p 700", None),
        ("ionice", "-c 3 torchrun a.py", ["torchrun", "a.py"]),
        ("chrt", "-f 10 torchrun a.py", ["torchrun", "a.py"]),
    ],
)
def test_with_a_process_id_there_is_no_command(
    name: str, words: str, started: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """taskset(1), ionice(1), chrt(1): `-p` changes a running process."""
    calls: list[list[str]] = []

    def start(command: list[str]) -> int:
        calls.append(command)
        return 0

    monkeypatch.setattr(inner, "start", start)
    assert prefixes.dropped(name, words.split()) == 0
    assert calls == ([] if started is None else [started])
