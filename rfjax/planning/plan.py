"""Memory, arithmetic, traffic and modelled time of a model on a mesh, from compiled programs and no weights."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rfjax.bench.flops import dit_tokens, rolling_step_flops
from rfjax.config import ModelConfig
from rfjax.engine import Engine, Shape
from rfjax.inputs import check_size
from rfjax.parallel import Layout
from rfjax.planning import trainium2
from rfjax.planning.hlo import Program
from rfjax.vae.flops import decode_flops
from rfjax.weights.parts import abstract_parts

PROGRAMS = ("step", "decode_first", "decode_next")


@dataclass(frozen=True)
class Cost:
    """What one run of a program takes on each device.

    Attributes:
        flops: of matrix products and convolutions; `share` is that over an equal part of the work of one device.
        temporary: bytes of activations, as XLA's CPU compiler lays them out.
        collectives: by kind, how many, and bytes that a device sends.
        modelled: seconds on Trainium2 by part; their sum is the program's.
    """

    flops: int
    share: float
    temporary: int
    collectives: dict[str, tuple[int, float]]
    modelled: dict[str, float]

    @property
    def seconds(self) -> float:
        """Modelled, of the whole program."""
        return sum(self.modelled.values())


@dataclass(frozen=True)
class Plan:
    """A model on a mesh, per device.

    Attributes:
        resident: bytes that stay on a device while a stream runs, by what they hold.
        text_encoder: bytes of the text encoder, which can live elsewhere.
        costs: of the rolling step, and of decoding the first and a later block.
        frames: pixel frames of a block.
        devices: of the mesh.
    """

    resident: dict[str, int]
    text_encoder: int
    costs: dict[str, Cost]
    frames: int
    devices: int

    @property
    def activations(self) -> int:
        """The largest temporary memory of a program; they run one after the other."""
        return max(cost.temporary for cost in self.costs.values())

    @property
    def total(self) -> int:
        """Bytes on a device, with the text encoder elsewhere."""
        return sum(self.resident.values()) + self.activations

    @property
    def modelled_fps(self) -> float:
        """Pixel frames a second of a steady stream on Trainium2, each step followed by a block's decoding."""
        return self.frames / (self.costs["step"].seconds + self.costs["decode_next"].seconds)

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        derived = {"activations": self.activations, "total": self.total, "modelled_fps": self.modelled_fps}
        return asdict(self) | derived


def plan(
    config: ModelConfig,
    dtype: str,
    height: int,
    width: int,
    layout: Layout,
    batch: int = 1,
    cores: int = 1,
    cache_dtype: str | None = None,
) -> Plan:
    """Compiles a model for a mesh with abstract arrays and reads what it takes.

    Args:
        config: of the model.
        dtype: of the DiT and the VAE's decoder: "float32" or "bfloat16". The encoder is float32.
        height, width: pixels.
        layout: of any devices that JAX has; what they are does not matter.
        batch: streams in all.
        cores: of Trainium2, that a device stands for in the modelled times.
        cache_dtype: of the cache alone; None is `dtype`.

    Raises:
        InputError: the size is not valid, or does not divide among the devices.
    """
    shape = Shape(batch, *check_size(height, width, config))
    layout.check_model(config)
    graphs, params = abstract_parts(config, dtype)
    text = params.pop("text")
    engine = Engine(config, graphs, params, dtype, layout, cache_dtype)
    compiled = engine.executables(shape)
    state, text_kv, decoder = engine.abstract_stream(shape)
    resident = {
        "DiT weights": _held(params["dit"]),
        "VAE weights": _held(params["vae"]),
        "cache": _held((state.k_cache, state.v_cache)),
        "prompt and window": _held((text_kv, state.x0)),
        "decoder state": _held(decoder),
    }
    return Plan(
        resident=resident,
        text_encoder=_held(text),
        costs={name: _cost(name, getattr(compiled, name), engine, shape, cores) for name in PROGRAMS},
        frames=config.rolling.block_frames * config.vae.temporal_stride,
        devices=layout.shares * layout.groups,
    )


def _held(arrays: Any) -> int:
    """Bytes of a device's parts."""

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize

    return sum(size(x) for x in jax.tree.leaves(arrays))


def _cost(name: str, compiled: jax.stages.Compiled, engine: Engine, shape: Shape, cores: int) -> Cost:
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # XLA's CPU compiler has both
    program, itemsize = Program(text, engine.dtype == jnp.bfloat16), engine.dtype.itemsize
    config, layout = engine.config, engine.layout
    rolling = config.rolling
    if name == "step":
        whole = rolling_step_flops(config, *shape[1:], shape.batch)
        block = rolling.block_frames * dit_tokens(config, *shape[1:]) * shape.batch // layout.groups
        keys = block * config.dit.dim // layout.head_parts
        stored = keys // layout.seq_parts if layout.cuts_cached_tokens else keys
        tokens = (rolling.window_blocks + 1) * block / layout.shares
        modelled = trainium2.step_parts(program, config, tokens, keys, stored, itemsize, cores)
    else:
        first = name == "decode_first"
        whole = decode_flops(config.vae, *shape[1:], rolling.block_frames, first=first, batch=shape.batch)
        modelled = trainium2.decode_parts(program, itemsize, cores)
    return Cost(
        flops=program.flops,
        share=program.flops * layout.shares * layout.groups / whole,
        temporary=memory.temp_size_in_bytes,
        collectives=program.traffic(),
        modelled=modelled,
    )
