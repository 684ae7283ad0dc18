"""Errors that a user can mend. Only the command line catches them, and turns them into one line."""

from __future__ import annotations

from typing import Final

FITS: Final = 0
DOES_NOT_FIT: Final = 1
WRONG_INPUT: Final = 2
CHECK_FAILED: Final = 3


class AnalyzerError(Exception):
    """Base of every error with a message for the user. `exit_code` is what the process ends with."""

    exit_code = WRONG_INPUT


class InputError(AnalyzerError):
    """An option is wrong, contradicts another, or is not modelled.

    The message names the option, what is wrong with it and what to do about it:
    ``--num-attention-heads: 30 heads cannot be split over 4 tensor-parallel ranks; use a multiple of 4``.
    """

    def __init__(self, option: str, fault: str, remedy: str) -> None:
        super().__init__(f"{option}: {fault}; {remedy}")
        self.option = option
        self.fault = fault
        self.remedy = remedy


class UnsupportedError(InputError):
    """The option is right for Megatron, and this program has no model of it yet."""
