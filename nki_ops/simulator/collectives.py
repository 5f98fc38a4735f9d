"""`nki.collectives`: not simulated (AWS's simulator has none either). Importing works; using raises."""

from typing import Any

from nki_ops.simulator.errors import SimulatorError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise SimulatorError(f"nki.collectives.{name} is not simulated")

    return refuse
