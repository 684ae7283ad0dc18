"""Commands that run a command on another machine, or in another terminal. It runs here if it contains a launcher."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context, inner, launchers
from analyzer.script.stand_ins.words import Syntax, split_words

SYNTAX = {
    "ssh": Syntax(short="BbcDEeFIiJLlmOopQRSWw"),
    "rsh": Syntax(short="l"),
    "pdsh": Syntax(short="wxglfutRr", flags="help"),
    "clush": Syntax(short="wxgfotu", flags="all nostdin dshbak"),
    "pssh": Syntax(short="hHlpoetxOA", flags="inline print askpass inline-stdout send-input"),
}
WITH_HOST = ("ssh", "rsh")
"""Commands with the name of the machine before the command."""
WITHOUT_INPUT = frozenset("Nnf")
"""Options of ssh with which it reads no commands."""
OPENS_TERMINAL = frozenset({"new", "new-session", "new-window", "neww", "split-window", "splitw", "respawn-pane", "respawn-window"})
SENDS = frozenset({"send", "send-keys"})
KEYS = frozenset({"C-m", "Enter", "ENTER", "KPEnter", "C-c", "C-l", "^M"})
TMUX = Syntax(short="ctsnxyFfeNlp")


def remote(name: str, words: list[str]) -> int:
    """Runs a command here that contains a launcher, also from standard input. Any other command is not run."""
    syntax = SYNTAX.get(name, SYNTAX["pssh"])
    options, command = split_words(words, syntax)
    if name in WITH_HOST:
        more, command = split_words(command[1:], syntax)
        options += more
    if not command and WITHOUT_INPUT.isdisjoint(option for option, _ in options):
        command = ["bash"]
    text = " ".join(command)
    simple = text.split()
    if launchers.contains_launcher(text) or (all(map(context.SAFE.issuperset, simple)) and launchers.runs_here(simple)):
        return launchers.start_elsewhere(name, ["bash", "-c", text])
    return launchers.refuse([name, *words])


def terminal(name: str, words: list[str]) -> int:
    """Runs the command that `tmux new`, `tmux send-keys` or `screen -dm` would run in another terminal, if it has a launcher."""
    if name == "screen":
        options, command = split_words(words, Syntax(short="cehpsStTX"))
        stuffed = ("X", "stuff") in options
        text = " ".join(command) if stuffed else context.quoted(command)
        for end in ("\r", "^M", "\\n", "\\r") if stuffed else ():
            text = text.replace(end, "\n")
        return _in_terminal([name, *words], text)
    if words[:1] in (["has-session"], ["has"]) and not context.run_all():
        return 1
    texts = []
    for part in _parts(words):
        found = next((index for index, word in enumerate(part) if word in OPENS_TERMINAL | SENDS), None)
        if found is not None:
            command = split_words(part[found + 1 :], TMUX)[1]
            texts.append(" ".join(word for word in command if word not in KEYS))
    return _in_terminal([name, *words], "\n".join(filter(None, texts)))


def _parts(words: list[str]) -> list[list[str]]:
    """The commands of tmux, which a word `;` separates."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in (";", "\\;"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _in_terminal(whole: list[str], text: str) -> int:
    if launchers.contains_launcher(text):
        os.environ.pop("TMUX", None)
        return inner.start_text(text)
    return launchers.refuse(whole) if text or context.run_all() else 0
