"""Which form of an operation runs: "xla", "nki" (kernels on Trainium) or "simulate" (the kernels, on the CPU).

The choice is made while a function is traced. A function that is compiled already keeps the form it has.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, ParamSpec, TypeVar, cast, get_args

import jax

from nki_ops.errors import KernelError

logger = logging.getLogger("nki_ops")

Backend = Literal["xla", "nki", "simulate"]
VARIABLE = "RFJAX_KERNELS"

P = ParamSpec("P")
R = TypeVar("R")

_used: ContextVar[Backend | None] = ContextVar("nki_ops_backend", default=None)


def backend() -> Backend:
    """The form that operations take from here on: "nki" on a Neuron device, otherwise "xla", unless told otherwise.

    Raises:
        KernelError: the environment variable RFJAX_KERNELS is set to something else than a backend.
    """
    return forced() or ("nki" if jax.default_backend() == "neuron" else "xla")


def forced() -> Backend | None:
    """The backend that `using` or RFJAX_KERNELS asks for, whatever the device."""
    return _used.get() or _from_environment(os.environ.get(VARIABLE, ""))


@contextmanager
def using(choice: Backend) -> Iterator[None]:
    """A context in which `backend()` is `choice`."""
    token = _used.set(choice)
    try:
        yield
    finally:
        _used.reset(token)


@functools.cache
def _from_environment(value: str) -> Backend | None:
    if not value:
        return None
    if value not in get_args(Backend):
        raise KernelError(f"{VARIABLE}={value} is not a backend; choose {', '.join(get_args(Backend))}, or unset it")
    logger.warning("%s=%s: attention, rotation and cache updates run so on every device", VARIABLE, value)
    return cast(Backend, value)


def switched(xla_form: Callable[P, R], kernel_form: Callable[P, R]) -> Callable[P, R]:
    """One function with the signature of both forms, which calls the one that `backend()` says."""

    @functools.wraps(xla_form)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        form = xla_form if backend() == "xla" else kernel_form
        return form(*args, **kwargs)

    return call
