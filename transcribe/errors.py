"""Every failure a user can meet, as one line and an exit code.

The message is what the user reads: it names the file, says what is wrong and what to do. The command line prints
it without a traceback and leaves with `exit_code`.
"""


class TranscribeError(Exception):
    """A failure with a message for the user. One file failed: exit code 1."""

    exit_code = 1


class AudioError(TranscribeError):
    """This recording cannot be decoded."""


class UsageError(TranscribeError):
    """The request cannot be honoured as asked: exit code 2."""

    exit_code = 2


class ModelError(TranscribeError):
    """The model cannot be loaded: exit code 3."""

    exit_code = 3
