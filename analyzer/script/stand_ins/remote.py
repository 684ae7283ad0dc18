"""Commands that run a command on another machine, or in another terminal."""

from __future__ import annotations

import os
import re

from analyzer.script.stand_ins import context, inner
from analyzer.script.stand_ins.words import Syntax, split_words

SYNTAX = {
    "ssh": Syntax(short="BbcDEeFIiJLlmOopQRSWw"),
    "pdsh": Syntax(short="wxglfutRr", flags="help"),
    "clush": Syntax(short="wxgfotu", flags="all nostdin dshbak"),
}
LAUNCHER = re.compile(
    r"(?:^|[;&|(\"']|\b(?:nohup|exec|env|then|do|time|timeout \S+|\w+=\S*))\s*(?:\S*/)?"
    r"(?:torchrun|deepspeed|srun|mpirun|mpiexec|accelerate +launch|(?:ba)?sh +\S+\.\w+"
    r"|python[\d.]* +(?:-\w+ +)*(?:\S*train\S*|-m +(?:torch\.distributed|deepspeed)\S*))(?=\s|$)"
)
"""A launcher, or a script, as the first word of a command."""


def remote(name: str, words: list[str]) -> int:
    """Runs a command here that contains a launcher. Any other command is not run."""
    command = split_words(words, SYNTAX[name])[1]
    if name == "ssh":
        command = split_words(command[1:], SYNTAX[name])[1]
    text = " ".join(command)
    if LAUNCHER.search(text):
        os.environ[context.ELSEWHERE_VARIABLE] = "1"
        return inner.start_text(text)
    return context.run_behind(name, words) if context.run_all() else context.not_run([name, *words])


def terminal(name: str, words: list[str]) -> int:
    """Runs the command that `tmux new`, `tmux send-keys` or `screen -dm` would run in another terminal."""
    if name == "screen":
        command = split_words(words, Syntax(short="cehpsStTX"))[1]
        return inner.start(command) if command else 0
    position = next((index for index, word in enumerate(words) if word in ("new", "new-session", "send-keys", "send")), None)
    if position is None:
        return 0
    command = split_words(words[position + 1 :], Syntax(short="ctsnxyFfe"))[1]
    command = [word for word in command if word not in ("C-m", "Enter", "ENTER")]
    os.environ.pop("TMUX", None)
    return inner.start_text(" ".join(command)) if command else 0
