"""Exceptions of training runs. Each message is one sentence: the cause, and how to continue."""

__all__ = ["CheckpointError", "DivergenceError", "PeerLostError", "RunError", "RunInUseError", "RunInterrupted"]


class RunError(RuntimeError):
    """Training cannot continue; the checkpoints written so far are intact.

    Attributes:
        secondary: whether another process of the run has the cause and reports it.

    >>> issubclass(DivergenceError, RunError), RunError("the disk is full").secondary
    (True, False)
    """

    secondary = False


class DivergenceError(RunError):
    """Training produced non-finite values or unbounded routing coefficients.

    Args:
        message: step and module of the first non-finite value.
        secondary: see `RunError`.

    >>> try:
    ...     raise DivergenceError("step 7: non-finite value first produced by digit")
    ... except RunError as error:
    ...     print(error, error.secondary)
    step 7: non-finite value first produced by digit False
    """

    def __init__(self, message: str, secondary: bool = False) -> None:
        super().__init__(message)
        self.secondary = secondary


class PeerLostError(RunError):
    """Another process of a distributed run has exited."""

    secondary = True


class RunInUseError(ValueError):
    """The directory already contains a run, or another process is training in it."""


class CheckpointError(ValueError):
    """The file is not a checkpoint, is damaged, or belongs to another run.

    >>> raise CheckpointError("runs/a/checkpoints/last.safetensors is damaged")
    Traceback (most recent call last):
        ...
    torchcaps.training.errors.CheckpointError: runs/a/checkpoints/last.safetensors is damaged
    """


class RunInterrupted(Exception):
    """A signal stopped the run after it had saved a checkpoint.

    Args:
        message: the step reached and the command that resumes the run.
        signal: number of the signal.

    >>> import signal
    >>> interrupted = RunInterrupted("stopped at step 40", signal.SIGINT)
    >>> str(interrupted), interrupted.signal == 2
    ('stopped at step 40', True)
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal
