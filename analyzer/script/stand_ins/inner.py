"""Starts the command inside a wrapper, once, under the stand-ins."""

from __future__ import annotations

import os

from analyzer.script.shebang import interpreter
from analyzer.script.stand_ins import context

SHELLS = ("sh", "bash", "dash", "ksh", "rbash")
VALUE_OPTIONS = ("-o", "+o", "-O", "+O", "--rcfile", "--init-file")
"""Options of bash that take the next word."""


def start(words: list[str]) -> int:
    """Replaces this process by the command `words`, or by the stand-in of its name. Returns an exit status if it does not."""
    if not words:
        return 0
    if os.path.basename(words[0]) in SHELLS:
        return start_shell(words[1:])
    if is_shell_script(words[0]) and not context.has_stand_in(os.path.basename(words[0])):
        return start_shell(words)
    program, *arguments = resolved(words)
    return context.replace_by(program, arguments) if program != words[0] else context.run_behind(program, arguments)


def start_text(text: str) -> int:
    """Runs a text as a shell would."""
    return start_shell(["-c", text])


def start_shell(words: list[str]) -> int:
    """Replaces this process by bash, which reads the file of the run.

    An interactive bash would not, so `-i` is left out. So is `-l`, because the profile of the user is not part of the script.
    """
    kept: list[str] = []
    options = True
    for word in words:
        options = options and word.startswith(("-", "+")) and word not in ("-", "--")
        if options and word.startswith("-") and not word.startswith("--"):
            word = word.replace("i", "").replace("l", "")
        if word not in ("-", "--login") or not options:
            kept.append(word)
        if "c" in word and options and not word.startswith("--"):
            options = False
    context.restore_path()
    path = context.behind("bash")
    return 127 if path is None else context.replace_by(path, kept)


def text_of(words: list[str]) -> str | None:
    """The text after `-c` among the words after a shell; None without one."""
    for position, word in enumerate(words):
        if not word.startswith(("-", "+")) or word in ("-", "--"):
            return None
        if "c" in word and word[1:2] != "-":
            return next(iter(words[position + 1 :]), "")
        if word in VALUE_OPTIONS:
            return text_of(words[position + 2 :])
    return None


def script_of(words: list[str]) -> str | None:
    """The script, or the text after `-c`, among the words after a shell; None if the shell reads standard input."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            break
        if not word.startswith(("-", "+")) or word == "-":
            return None if word == "-" else word
        if word[1:2] != "-" and "c" in word:
            break
        if word[1:2] != "-" and "s" in word:
            return None
        position += word in VALUE_OPTIONS
    return next(iter(words[position:]), None)


def is_shell_script(path: str) -> bool:
    """Whether a file with a folder in its name is a script for sh, which would not read the file of the run."""
    if "/" not in path or not os.path.isfile(path):
        return False
    names = interpreter(path)
    return bool(names) and (names[0] in SHELLS or (names[0] == "env" and names[-1] in SHELLS))


def resolved(words: list[str]) -> list[str]:
    """The command with the path of its stand-in, for a program that starts it itself."""
    name = os.path.basename(words[0])
    if name in SHELLS:
        return [os.path.join(context.stand_in_folder(), "sh"), *words[1:]]
    if context.has_stand_in(name):
        if "/" in words[0]:
            os.environ[context.REAL_VARIABLE] = words[0]
        return [os.path.join(context.stand_in_folder(), name), *words[1:]]
    if is_shell_script(words[0]):
        return [os.path.join(context.stand_in_folder(), "sh"), *words]
    return words
