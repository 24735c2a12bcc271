"""The one family of errors a user of this workbook meets: what was found, where, and what to do."""


class WorkbookError(Exception):
    """Base of all user errors: says what is wrong, where it is, and what mends it.

    Args:
        what: the fault, with the value found and the value expected.
        where: the file, parameter or notebook it concerns.
        do: the command or change that mends it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = ""):
        self.what, self.where, self.do = what, where, do
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if do:
            lines.append(f"  do:    {do}")
        super().__init__("\n".join(lines))


class ParameterError(WorkbookError):
    """A parameter is missing, misspelt, of the wrong type or out of range."""

    exit_code = 2


class DataError(WorkbookError):
    """A prompt file, a row or a tensor is not what it has to be."""

    exit_code = 3


class VerifierError(WorkbookError):
    """The verifier cannot be found, loaded or used (no chat template, unknown layout)."""

    exit_code = 4


class MissingInput(WorkbookError):
    """A stage was asked for before the one it reads from."""

    exit_code = 5


class StaleInput(WorkbookError):
    """A predecessor was made with other parameters than this run's."""

    exit_code = 5


class DamagedInput(WorkbookError):
    """A file of a predecessor no longer has the content its manifest recorded."""

    exit_code = 5


class AttentionError(WorkbookError):
    """The attention implementation asked for cannot train this draft here."""

    exit_code = 6


class EngineError(WorkbookError):
    """An inference engine beside the workbook (vLLM) failed, or its answer is not what it has to be."""


class LockedRun(WorkbookError):
    """Another process is writing to this stage."""

    exit_code = 7


class DiskFull(WorkbookError):
    """Writing failed for want of space; what was there before is unchanged."""

    exit_code = 8
