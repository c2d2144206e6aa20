"""What can go wrong with a tuning log, in one line for the user."""

from __future__ import annotations


class LogError(Exception):
    """The log cannot be opened, read or written; the message names the file, the cause and what to do."""


class LogWarning(UserWarning):
    """Something in the log was skipped, or could not be seen; what remains is valid."""
