"""The errors Plait raises: few classes, one base.

A message says where (the user's module path and file:line), which constraint was broken, what was expected, what was
found, and what to do.
"""


class PlaitError(Exception):
    """Base of every error that Plait raises on purpose."""


class UsageError(PlaitError, ValueError):
    """An argument of the public API, or of a command, does not fit: unknown name, wrong type, wrong size."""


class NotBuiltError(UsageError):
    """A documented value whose implementation has not been built yet."""


class MissingExtraError(PlaitError, ImportError):
    """A framework was asked for that is not installed; the message names the extra to install."""


class TypeRuleError(PlaitError, TypeError):
    """Operands or attributes break a numbered constraint of an op."""


class VerifyError(PlaitError):
    """A graph or a program is malformed: undefined value, doubled definition, wrong result type, broken edge."""


class TextError(PlaitError, ValueError):
    """Text that is not a graph, a program or a schedule; the message has line and column."""


class CaptureError(PlaitError):
    """The user's model or loss cannot be captured as one program."""


class UnsupportedError(PlaitError):
    """An op, a type or a combination that a backend cannot run; raised at compile time, never replaced silently."""


class PartitionError(PlaitError):
    """The program cannot be cut into the stages that were asked for."""


class ScheduleError(PlaitError, ValueError):
    """A schedule is unknown, malformed, illegal, or does not fit the program or the ranks."""


class BatchError(UsageError):
    """A batch does not fit the compiled pipeline: structure, shape, dtype, or number of microbatches."""


class ExecutionError(PlaitError, RuntimeError):
    """A step failed while running; the message says rank, stage, microbatch and action."""
