"""Errors that the user can fix, and exit statuses. The command line prints an error as one line."""

from __future__ import annotations

from typing import Final

FITS: Final = 0
DOES_NOT_FIT: Final = 1
WRONG_INPUT: Final = 2
CHECK_FAILED: Final = 3
INTERNAL_ERROR: Final = 70
"""EX_SOFTWARE of sysexits.h."""
INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report it."""


class AnalyzerError(Exception):
    """Base class of errors with a message for the user. `exit_code` is the exit status of the process."""

    exit_code = WRONG_INPUT


class InputError(AnalyzerError):
    """An option is invalid, contradicts another option, or is not modelled.

    The message has three parts, the option, the fault and the remedy:
    ``--num-attention-heads: 30 heads cannot be split over 4 tensor-parallel ranks; use a multiple of 4``.
    """

    def __init__(self, option: str, fault: str, remedy: str) -> None:
        super().__init__(f"{option}: {fault}; {remedy}")
        self.option = option
        self.fault = fault
        self.remedy = remedy


class UnsupportedError(InputError):
    """Megatron accepts the option, and this program does not model it."""
