"""Commands that need a network, a daemon, a service or other rights, as far as they do: git, pip, curl, rsync and others."""

from __future__ import annotations

import os

from analyzer.script.stand_ins import context
from analyzer.script.stand_ins.words import Syntax, split_words

DOWNLOADERS = frozenset({"wget", "wget2", "curl", "aria2c", "axel"})
NOT_USED = " : the network is not used (--info-run-all uses it)"
GIT = Syntax(
    short="Cc",
    flags="version help no-pager paginate bare no-replace-objects literal-pathspecs glob-pathspecs noglob-pathspecs "
    "icase-pathspecs no-optional-locks no-advice no-lazy-fetch html-path man-path info-path",
    attached="exec-path",
)
CLONE = Syntax(
    short="obucj",
    flags="local no-hardlinks shared dissociate quiet verbose progress no-checkout reject-shallow no-reject-shallow bare sparse "
    "mirror no-single-branch single-branch no-tags tags shallow-submodules no-shallow-submodules remote-submodules "
    "no-remote-submodules also-filter-submodules",
    attached="recurse-submodules recursive",
)
GIT_NETWORK = frozenset(
    "clone fetch pull push ls-remote svn send-email p4 request-pull fetch-pack send-pack daemon annex cvsimport lfs".split()
)
GIT_NETWORK_PARTS = {"submodule": ("update", "add"), "remote": ("update", "show", "prune"), "archive": ("--remote",)}
"""Words after a subcommand of git with which it needs the network."""
LOCAL = {
    "pip": "list show freeze check cache config inspect debug help --version -V --help",
    "crontab": "-l",
    "sysctl": "-a -n --values -N",
    "mount": "-l -V --version",
    "dpkg": "-l -s -L -S --list --status --listfiles --print-architecture --version",
    "rpm": "-q -qa -qi -ql -qf --query --version",
    "npm": "--version -v list ls",
    "nvidia-cuda-mps-control": "--version",
    "huggingface-cli": "env version --help",
    "hf": "env version --help",
}
"""Words after a command with which it reads what is on this machine."""
WITHOUT_WORDS = frozenset({"mount"})
"""Commands that read if no word follows."""


def network(name: str, words: list[str]) -> int:
    """Runs the command only if it needs no network. Otherwise says that it is not run, and succeeds."""
    if context.run_all() or _is_local(name, words):
        return context.run_behind(name, words)
    if name == "curl":
        _print_format(words)
    if name == "git":
        _make_folder_of_clone(words)
    return not_run([name, *words])


def pip(written: str, words: list[str]) -> int | None:
    """Says that `pip install` is not run. None if pip with these words only reads."""
    if context.run_all() or next(iter(words), "") in LOCAL["pip"].split():
        return None
    return not_run([*written.split(" "), *words])


def not_run(words: list[str]) -> int:
    """Says that a command is not run, and why, if it names another machine. The script sees a success."""
    away = os.path.basename(words[0]) in DOWNLOADERS or any("://" in word or word.startswith("git@") for word in words)
    context.say(f"not run: {context.quoted(words)}{NOT_USED if away else ''}")
    return 0


def _is_local(name: str, words: list[str]) -> bool:
    if name == "git":
        return _git_is_local(words)
    if name in ("rsync", "scp"):
        return not any(_names_host(word) for word in words)
    if not words:
        return name in WITHOUT_WORDS
    return words[0] in LOCAL.get("pip" if name == "pip3" else name, "").split()


def _git_is_local(words: list[str]) -> bool:
    command = split_words(words, GIT)[1]
    if not command:
        return True
    name, rest = command[0], command[1:]
    if name == "clone":
        return not any(_names_host(word) for word in rest) and any(os.path.isdir(word) for word in rest)
    parts = GIT_NETWORK_PARTS.get(name, ())
    return name not in GIT_NETWORK and not any(word.partition("=")[0] in parts for word in rest)


def _make_folder_of_clone(words: list[str]) -> None:
    """Makes the folder of `git clone URL`, empty, so that `cd` to it is no error. It is gone at the end of the run."""
    command = split_words(words, GIT)[1]
    if command[:1] != ["clone"]:
        return
    places = split_words(command[1:], CLONE)[1]
    name = places[1] if len(places) > 1 else os.path.basename((places or [""])[0].rstrip("/")).removesuffix(".git")
    if name:
        os.makedirs(name.rpartition(":")[2], exist_ok=True)


def _names_host(word: str) -> bool:
    """Whether a word is a place on another machine: host:path, host::module or a URL."""
    host, colon, _ = word.partition(":")
    return bool(colon) and bool(host) and "/" not in host and not word.startswith("-")


def _print_format(words: list[str]) -> None:
    """Prints what `curl -w FORMAT` prints for an answer without an error."""
    import re

    for position, word in enumerate(words):
        short = word[:1] == "-" and word[1:2] != "-" and word.endswith("w")
        text = words[position + 1] if (short or word == "--write-out") and position + 1 < len(words) else ""
        text = word.partition("=")[2] if word.startswith("--write-out=") else text
        text = re.sub(r"%\{(?:http_code|response_code)\}", "200", text.replace("\\n", "\n").replace("\\t", "\t"))
        os.write(1, re.sub(r"%\{\w+\}", "0", text).encode())
