"""The programs of a model as Neuron's compiler would get them, held against its rules; no Trainium is needed."""

import nki_ops
from nki_ops.dispatch import forced
from nki_ops.lint import Report, report
from nki_ops.primitives import PLATFORM
from rfjax.config import ModelConfig
from rfjax.engine import Engine, Shape
from rfjax.inputs import check_size
from rfjax.weights.parts import abstract_parts


def lint_model(config: ModelConfig, dtype: str, height: int, width: int) -> dict[str, Report]:
    """What breaks a rule in the programs of a model, by program; needs its configuration and no weights.

    Args:
        config: of the model.
        dtype: of the model, "float32" or "bfloat16"; its VAE encoder is float32, as by default.
        height, width: pixels.

    Returns:
        A report on each of the engine's programs, lowered for Trainium with the NKI kernels in it (or with what
        RFJAX_KERNELS says).

    Raises:
        InputError: the size is not valid.
        KernelError: a kernel cannot take the shapes.
    """
    shape = Shape(1, *check_size(height, width, config))
    graphs, params = abstract_parts(config, dtype)
    with nki_ops.using(forced() or "nki"):
        programs = Engine(config, graphs, params, dtype).lower(shape, PLATFORM)
    return {name: report(lowered) for name, lowered in programs.items()}
