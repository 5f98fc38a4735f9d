"""Makes `import nki` resolve to the simulator where AWS's package is absent."""

import importlib
import importlib.util
import sys
from types import ModuleType

from nki_ops.simulator import collectives, enums, isa, language, nki, typing
from nki_ops.simulator.errors import SimulatorError

_MODULES: dict[str, ModuleType] = {
    "nki": nki,
    "nki.language": language,
    "nki.isa": isa,
    "nki.isa.constants": enums,  # an older home of the enumerations
    "nki.typing": typing,
    "nki.collectives": collectives,
}


def install() -> None:
    """From now on `import nki`, `nki.language`, `nki.isa` and `nki.typing` give the simulator.

    `nki.collectives` imports too, and refuses to be used. Calling this twice is harmless.

    Raises:
        SimulatorError: the real package is installed; its own `nki.simulate` is to be used then.
    """
    if sys.modules.get("nki") is nki:
        return
    path = _real_package()
    if path is not None:
        raise SimulatorError(f"the real nki package is installed ({path}); use its nki.simulate, or uninstall it")
    # What is left of a placeholder package would shadow ours.
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        del sys.modules[name]
    sys.modules.update(_MODULES)


def _real_package() -> str | None:
    """Where a working nki package is; None if there is none, or only the empty one from PyPI."""
    spec = importlib.util.find_spec("nki")
    if spec is None:
        return None
    try:
        package, instructions = importlib.import_module("nki"), importlib.import_module("nki.isa")
    except ImportError:
        return None
    works = hasattr(package, "jit") and hasattr(instructions, "nc_matmul")
    return str(spec.origin or spec.submodule_search_locations) if works else None
