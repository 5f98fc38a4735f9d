"""The exceptions and warnings of the simulator."""


class NkiValidationError(AssertionError):
    """A kernel breaks a rule of the hardware or of the language.

    Raised as `nisa.NkiValidationError`. It is an `AssertionError` too, since that is what the documentation of
    `nki.simulate` shows; either name catches it.
    """


class SimulatorError(RuntimeError):
    """The simulator was asked for something it cannot do (wrong target, real package present, bad call)."""


class NkiAmbiguityWarning(UserWarning):
    """A kernel does something that AWS's documents describe in two ways; the device may do the other."""


class NkiRangeWarning(RuntimeWarning):
    """An activation function was given values outside its documented range; those results are NaN (sin: a cubic)."""
