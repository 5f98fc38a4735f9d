"""The mesh, and how every array of the engine lies on it.

Axes: "data" holds independent streams; the devices of one stream are "seq" x "head". Their names say what
self-attention cuts: heads over "head", queries over "seq". Everything else is cut over both alike, tokens in the DiT
and columns of pixels in the VAE, so a device's share of a block is one of seq * head equal parts.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from rfjax.config import ModelConfig
from rfjax.errors import InputError

# Collectives over several axes number their devices in the order of the mesh, so SHARE must follow that of AXES.
AXES = ("data", "seq", "head")
SHARE = ("seq", "head")

CACHE_CUTS = ("both", "head")

WHOLE = P()
ROWS = P("data")  # [R, ...]
TOKENS = P("data", None, SHARE)  # [B, blocks, T, Z]
TEXT_ROWS = P("data", SHARE)  # [B, S, text_dim]
TEXT_KV = P(None, "data")  # [L, B, N, S, D]
LATENTS = P("data", None, None, None, SHARE)  # [B, F, C, h, w]
PIXELS = P("data", None, None, SHARE)  # [B, T, H, W, channels], the VAE's states likewise
GIVEN = P(None, None, None, SHARE)  # pixels of the video that all streams of a batch begin with
GIVEN_LATENTS = P(None, None, None, None, SHARE)


def make_mesh(data: int = 1, head: int = 1, seq: int = 1) -> Mesh:
    """A mesh of the first data * head * seq devices, neighbouring devices sharing a stream.

    Args:
        data: independent groups of streams.
        head: parts that the heads are cut into.
        seq: parts that each group of heads cuts its queries into.

    Raises:
        InputError: a number is not positive, or there are not so many devices.
    """
    sizes = {"data": data, "head": head, "seq": seq}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"{name}={size!r}: a mesh has a whole number of at least 1 along each axis")
    wanted, devices = data * head * seq, jax.devices()
    if wanted > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; for trials on one CPU set JAX_NUM_CPU_DEVICES={wanted} before Python starts"
        elif devices[0].platform == "neuron" and "NEURON_LOGICAL_NC_CONFIG" not in os.environ:
            hint = "; NEURON_LOGICAL_NC_CONFIG=1 makes 8 devices of a Trainium2 chip, where the default makes 4"
        raise InputError(f"a mesh of {data} x {head} x {seq} needs {wanted} devices, there are {len(devices)}{hint}")
    return Mesh(np.array(devices[:wanted]).reshape([sizes[axis] for axis in AXES]), AXES)


class Layout:
    """Where arrays are, and how functions run: on a mesh, or plainly on the default device.

    Args:
        mesh: from `make_mesh`, or any with axes among "data", "head" and "seq"; None is the default device.
        cache_cut: "both": the cache is cut over "head" by heads and over "seq" by tokens. "head": only by heads, which
            holds it seq times, and spares the gathering of a layer's cache in every step.

    Raises:
        InputError: the mesh has other axes, or there is no such cut.
    """

    def __init__(self, mesh: Mesh | None = None, cache_cut: str = "both"):
        self.mesh = None if mesh is None else _with_all_axes(mesh)
        if cache_cut not in CACHE_CUTS:
            raise InputError(f"cache_cut {cache_cut!r} is not one of {', '.join(CACHE_CUTS)}")
        self._cache_cut = cache_cut

    @property
    def head_parts(self) -> int:
        """Into how many parts the heads are cut."""
        return 1 if self.mesh is None else self.mesh.shape["head"]

    @property
    def seq_parts(self) -> int:
        """Into how many parts the queries of a part of the heads are cut."""
        return 1 if self.mesh is None else self.mesh.shape["seq"]

    @property
    def shares(self) -> int:
        """Into how many parts a stream is cut."""
        return self.seq_parts * self.head_parts

    @property
    def groups(self) -> int:
        """Into how many parts a batch is cut."""
        return 1 if self.mesh is None else self.mesh.shape["data"]

    @property
    def cuts_cached_tokens(self) -> bool:
        """Whether the devices along "seq" hold different tokens of the cache."""
        return self.seq_parts > 1 and self._cache_cut == "both"

    @property
    def cache(self) -> P:
        """Where the cache lies: [P, B, N, T, D]."""
        return P(None, "data", "head", "seq" if self.cuts_cached_tokens else None)

    @property
    def width_axis(self) -> tuple[str, ...] | None:
        """What the VAE's functions cut the width along."""
        return SHARE if self.shares > 1 else None

    def sharding(self, spec: P) -> Sharding | None:
        """None stands for the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def place(self, arrays: Any, specs: Any) -> Any:
        """Arrays from the host on their devices; `specs` may stop at any level of the tree."""
        return _map(lambda x, spec: jax.device_put(x, self.sharding(spec)), arrays, specs)

    def abstract(self, arrays: Any, specs: Any) -> Any:
        """The shapes, types and places of arrays."""
        return _map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(spec)), arrays, specs
        )

    def shared(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """A function of local parts as one of whole arrays."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)

    def check_model(self, config: ModelConfig) -> None:
        """Refuses a model that cannot be cut like this.

        Raises:
            InputError: the heads do not divide.
        """
        heads = config.dit.num_heads
        if heads % self.head_parts:
            valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise InputError(
                f"the model's {heads} heads do not divide by head={self.head_parts}; head can be {valid}, and more "
                "devices can share the queries (seq) or streams (data)"
            )

    def check_cut(self, config: ModelConfig, batch: int, latent_height: int, latent_width: int) -> None:
        """Refuses a size or a batch that cannot be cut like this.

        Raises:
            InputError: the width, the tokens of a block, or the streams do not divide.
        """
        if batch % self.groups:
            raise InputError(f"{batch} prompts do not divide by data={self.groups}; give a multiple of it")
        stride, patch = config.vae.spatial_stride, config.dit.patch_size
        tokens_of = config.rolling.block_frames * (latent_height // patch[1])

        def fits(width: int) -> bool:
            return width % self.shares == 0 and tokens_of * (width // patch[2]) % self.shares == 0

        if not fits(latent_width):
            widths = range(patch[2], latent_width + 2 * self.shares * patch[2], patch[2])
            nearest = min(filter(fits, widths), key=lambda width: abs(width - latent_width))
            raise InputError(
                f"a width of {stride * latent_width} does not divide among {self.shares} devices; the nearest that "
                f"does is {stride * nearest}"
            )


class HostLayout(Layout):
    """The CPU beside the accelerator, for what need not be on it.

    Raises:
        InputError: JAX has no CPU devices.
    """

    def __init__(self):
        super().__init__()
        try:
            self._cpu = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        except RuntimeError:
            raise InputError("JAX has no CPU device here; add cpu to JAX_PLATFORMS, as in cuda,cpu") from None

    def sharding(self, spec: P) -> Sharding:
        """The CPU's, whatever the spec."""
        return self._cpu


def _with_all_axes(mesh: Mesh) -> Mesh:
    """A mesh in the order of `AXES`, absent axes of size 1, none of them explicit, which would enter array types."""
    unknown = [axis for axis in mesh.axis_names if axis not in AXES]
    if unknown:
        raise InputError(f"mesh axis {unknown[0]!r} is not one of {', '.join(AXES)}; rfjax.make_mesh makes a mesh")
    names = [axis for axis in AXES if axis in mesh.axis_names]
    devices = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in names])
    return Mesh(devices.reshape([mesh.shape.get(axis, 1) for axis in AXES]), AXES)


def _map(function: Callable[[Any, P], Any], arrays: Any, specs: Any) -> Any:
    def below(spec: P, part: Any) -> Any:
        return jax.tree.map(lambda x: function(x, spec), part)

    return jax.tree.map(below, specs, arrays, is_leaf=lambda x: isinstance(x, P))
