"""rfjax: streamed text-to-video in JAX with the Rolling Forcing model.

from rfjax import RollingForcingPipeline

pipe = RollingForcingPipeline.from_pretrained("checkpoints/rolling-forcing")
with pipe.stream("a paper boat on a pond") as stream:
    for chunk in stream:
        show(chunk.frames)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rfjax.config import ModelConfig, preset
    from rfjax.errors import InputError
    from rfjax.parallel.mesh import make_mesh
    from rfjax.pipeline import PipelineOutput, RollingForcingPipeline
    from rfjax.slots import Slots
    from rfjax.stream import Chunk, VideoStream

_HOMES = {
    "ModelConfig": "rfjax.config",
    "preset": "rfjax.config",
    "InputError": "rfjax.errors",
    "make_mesh": "rfjax.parallel.mesh",
    "PipelineOutput": "rfjax.pipeline",
    "RollingForcingPipeline": "rfjax.pipeline",
    "Slots": "rfjax.slots",
    "Chunk": "rfjax.stream",
    "VideoStream": "rfjax.stream",
}

__all__ = [
    "Chunk",
    "InputError",
    "ModelConfig",
    "PipelineOutput",
    "RollingForcingPipeline",
    "Slots",
    "VideoStream",
    "make_mesh",
    "preset",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that the command line answers before JAX is loaded."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'rfjax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
