"""The one error that the operations raise."""


class KernelError(ValueError):
    """The kernels cannot do what was asked; the message is one line that names the value, the rule or the fix."""
