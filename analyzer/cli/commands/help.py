"""The help of the commands, and the argument parser from which shells complete them."""

from __future__ import annotations

import argparse
from typing import Final

from analyzer.cli.commands.table import COMMANDS, COMMON, EXPLORE, GENERATION, OF_EXPLORE, Command, fields_of, flag_of_field
from analyzer.launch.info_options import OPTIONS

PROGRAM: Final = "get-training-info"
WIDTH: Final = 100
TARGETS: Final = {"launch": "TARGET", "two launches": "OLD NEW", "none": ""}
TARGET_HELP: Final = (
    "TARGET is a launch script with its arguments, the Hugging Face name or config.json of a model with options of Megatron-LM, a "
    "configuration file of a framework, or a launch command such as torchrun … pretrain_gpt.py …. Options of the command may stand "
    "before or after it; with a launch command before it. All words after -- belong to the launch."
)
OF_SERVE: Final = {
    "batch": ("N", "requests that each replica generates together; max is the largest that fits"),
    "prompt": ("N", "tokens of a prompt, such as 2048 or 32k (k is 1,024 tokens)"),
    "generate": ("N", "tokens that are generated for each request, such as 256 or 1k"),
}


def commands_text() -> str:
    """The lines of `--help` about the commands."""
    lines = [f"  {name:<9} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["Commands:", "", *lines, "", f"{PROGRAM} COMMAND --help shows the options and an example of a command."])


def help_text(name: str) -> str:
    """The help of one command."""
    return parser(name).format_help()


def parser(name: str) -> argparse.ArgumentParser:
    """A parser with the options of a command, for its help and for completion; the words themselves are read in `words`."""
    command = COMMANDS[name]
    found = argparse.ArgumentParser(
        prog=f"{PROGRAM} {name}",
        usage=f"{PROGRAM} {name} {TARGETS[command.target]} [options]".replace("  ", " "),
        description=f"{command.help} {'' if command.target == 'none' else TARGET_HELP}".strip(),
        epilog=f"Example: {PROGRAM} {name} {command.example}" if command.example else None,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=WIDTH),
    )
    _add_options(found, name, command)
    return found


def _add_options(found: argparse.ArgumentParser, name: str, command: Command) -> None:
    own = found.add_argument_group("options of the command")
    common = found.add_argument_group("options of every command")
    if name == "serve":
        for part in GENERATION:
            metavar, text = OF_SERVE[part]
            own.add_argument(f"--{part}", metavar=metavar, help=text)
    for flag, (metavar, text) in OF_EXPLORE.items() if name == EXPLORE else ():
        if metavar:
            own.add_argument(flag, metavar=metavar, help=text)
        else:
            own.add_argument(flag, action="store_true", help=text)
    for field in fields_of(name):
        option = OPTIONS[field]
        group = common if field in COMMON and field not in command.options else own
        text = option.help.replace("%", "%%")
        if option.value:
            group.add_argument(flag_of_field(field), metavar=option.value, help=text)
        else:
            group.add_argument(flag_of_field(field), action="store_true", help=text)


def completion_parser() -> argparse.ArgumentParser:
    """A parser of all commands."""
    found = argparse.ArgumentParser(prog=PROGRAM)
    commands = found.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        _add_options(sub, name, command)
        if command.target != "none":
            sub.add_argument("target", nargs="*")
    return found
