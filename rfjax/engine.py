"""Parameters and the compiled functions that run them.

Each function is compiled ahead of time, once for a batch size and resolution, all of them side by side; a stream of
any length, prompt or seed then runs without compiling again.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

import nki_ops
from rfjax.config import ModelConfig
from rfjax.dit.model import TextKV, patchify, unpatchify
from rfjax.errors import InputError
from rfjax.layers import precision
from rfjax.parallel import mesh
from rfjax.parallel.attention import MeshAttention, gathered, own_part
from rfjax.parallel.mesh import Layout
from rfjax.rolling.plan import Roll, StepPlan, plan_step
from rfjax.rolling.step import RollingState, WindowAttention, init_state, rolling_step, rotary_of, token_grid
from rfjax.vae.model import to_uint8

EIGHT_BITS = tuple(jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e5m2"))  # what a cache can be stored in, too


class Shape(NamedTuple):
    """What a set of executables is compiled for; latent height and width are pixels / 8."""

    batch: int
    latent_height: int
    latent_width: int


class Pixels(NamedTuple):
    """One decoded chunk, in both forms; either stays on the device until somebody looks at it."""

    unit: Float[Array, "B T H W 3"]  # -1 .. 1
    uint8: Int[Array, "B T H W 3"]


class Executables(NamedTuple):
    """The compiled functions of one shape."""

    text_kv: Callable[[Any, Any], TextKV]
    step: Callable[[Any, RollingState, TextKV, StepPlan, Any], RollingState]
    decode_first: Callable[[Any, Any], tuple[Pixels, Any]]
    decode_next: Callable[[Any, Any, Any], tuple[Pixels, Any]]


def checksum(arrays: Iterable[np.ndarray | Array], text: str = "") -> str:
    """CRC-32 of a text and the bytes of arrays, in hexadecimal."""
    crc = zlib.crc32(text.encode())
    for array in arrays:
        crc = zlib.crc32(np.asarray(array, order="C").reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


class Engine:
    """One model on its devices.

    Args:
        config: of the model.
        graphs: for "dit", "vae" and "text", the NNX graph definition.
        params: likewise, the parameters, whole on each device.
        dtype: of the DiT's and the VAE decoder's activations and caches.
        layout: of all arrays; None is the default device.
        cache_dtype: of the cache alone; None is `dtype`.
        text_layout: of the text encoder; None is `layout`.

    Raises:
        InputError: the cache has 8 bits, and attention runs as a kernel that reads none such.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, nnx.GraphDef],
        params: Mapping[str, nnx.State],
        dtype: str,
        layout: Layout | None = None,
        cache_dtype: str | None = None,
        text_layout: Layout | None = None,
    ):
        self.config, self.graphs, self.params = config, graphs, params
        self.layout = layout or Layout()
        self._text_layout = text_layout or self.layout
        self._rolling: Any = RollingState(mesh.TOKENS, self.layout.cache, self.layout.cache)  # pyright: ignore
        self.dtype, self.cache_dtype = jnp.dtype(dtype), jnp.dtype(cache_dtype or dtype)
        if self.cache_dtype != self.dtype and nki_ops.backend() != "xla":
            raise InputError(
                f"cache_dtype {self.cache_dtype}: the NKI kernels read a cache of the model's dtype, {self.dtype}; "
                "leave it out"
            )
        self.text_dtype = max(jax.tree.leaves(params.get("text", params)), key=lambda leaf: leaf.size).dtype
        self.compilations = 0
        self._decoder_states: dict[Shape, Any] = {}
        self._executables: dict[Shape, Executables] = {}
        self._mergers: dict[Shape, Any] = {}
        self._encode_text: Any = None
        self._encoders: dict[tuple[int, ...], Any] = {}

    def executables(self, shape: Shape) -> Executables:
        """The compiled functions for `shape`, compiled now if they have not been.

        Raises:
            InputError: the mesh does not cut such a shape.
        """
        if shape not in self._executables:
            self.layout.check_cut(self.config, *shape)
            self._executables[shape] = self._compile(shape)
        return self._executables[shape]

    def init_state(self, shape: Shape) -> RollingState:
        """The state of a stream before its first step, all zeros."""
        return self.layout.place(self.host_state(shape), self._rolling)

    def host_state(self, shape: Shape) -> RollingState:
        """`init_state` on the host; its zeros take no memory until they are touched."""
        return init_state(self.config, *shape, dtype=self.cache_dtype)

    def drop_text_encoder(self) -> None:
        """Frees the text encoder: `encode_text` is at an end."""
        self.params = {part: params for part, params in self.params.items() if part != "text"}
        self._encode_text = None

    def decoder_state_shape(self, shape: Shape) -> Any:
        """Abstract state of a decoder that has decoded something; before, it is None."""
        self.executables(shape)
        return self._decoder_states[shape]

    def merge_decoders(self, shape: Shape) -> Callable[[Any, Any, Bool[np.ndarray, " B"]], Any]:
        """(decoder state, another, rows) -> the state that has those rows of the other; takes the first over."""
        if shape not in self._mergers:

            def merge(state: Any, other: Any, rows: Array) -> Any:
                return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), y, x), state, other)

            state, specs = self.decoder_state_shape(shape), (mesh.PIXELS, mesh.PIXELS, mesh.ROWS)
            args = state, state, jax.ShapeDtypeStruct((shape.batch,), jnp.bool)
            traced = self._trace(merge, args, specs, mesh.PIXELS, donate=(0,))
            self._mergers[shape] = self._count(self._lower(traced).compile())
        return self._mergers[shape]

    def place_stream(self, rolling: RollingState, text_kv: TextKV, decoder: Any) -> tuple[RollingState, TextKV, Any]:
        """What a stream holds, from the host to where it belongs."""
        return self.layout.place((rolling, text_kv, decoder), (self._rolling, mesh.TEXT_KV, mesh.PIXELS))

    def text_kv_shape(self, shape: Shape) -> TextKV:
        """Abstract cross-attention keys and values of a shape."""
        module = partial(self._module, "dit")
        context = jax.ShapeDtypeStruct((shape.batch, self.config.dit.text_len, self.config.dit.text_dim), jnp.float32)
        return jax.eval_shape(lambda params, x: module(params).text_keys_values(x), self.params["dit"], context)

    def encode_text(self, ids: Int[np.ndarray, " S"], length: Int[np.ndarray, ""]) -> Float[np.ndarray, "S text_dim"]:
        """Features of one tokenized prompt, on the host."""
        if self._encode_text is None:
            self._encode_text = self._count(self._lower(self._trace_text()["encode_text"]).compile())
        return np.asarray(self._encode_text(self.params["text"], ids[None], length[None]))[0]

    def text_kv(self, contexts: Float[np.ndarray, "B S text_dim"], shape: Shape) -> TextKV:
        """Cross-attention keys and values of text features, as many as the shape's batch."""
        padded = np.zeros(self._context_shape(shape).shape, np.float32)
        padded[:, : contexts.shape[1]] = contexts
        return self.executables(shape).text_kv(self.params["dit"], padded)

    def no_draws(self, shape: Shape) -> Float[np.ndarray, "B W f C h w"]:
        """Zeros in the form of what a step draws."""
        rolling = self.config.rolling
        window = (rolling.window_blocks, rolling.block_frames, self.config.dit.in_dim, *shape[1:])
        return np.zeros((shape.batch, *window), np.float32)

    def step(
        self,
        shape: Shape,
        state: RollingState,
        text_kv: TextKV,
        plan: StepPlan,
        draws: Float[np.ndarray, "B W f C h w"],
    ) -> RollingState:
        """`rolling_step`, which takes the state over; `draws` is the noise, and the given block where there is one."""
        noise = patchify(draws, self.config.dit.patch_size[1:])
        return self.executables(shape).step(self.params["dit"], state, text_kv, plan, noise)

    def finished(self, state: RollingState, shape: Shape) -> Float[np.ndarray, "B f C h w"]:
        """The front block of a window, on the host."""
        # All of the window is copied: on the device, a slice would be a program to compile.
        front = np.asarray(state.x0)[:, 0]
        return np.array(unpatchify(front, self.config.dit.patch_size[1:], shape[1:]))

    def trace(self, shape: Shape) -> dict[str, jax.stages.Traced]:
        """Every program of a shape, by name: those of `Executables`, and "encode_video" for a given first block.
        Takes no device, and the parameters may be abstract.
        """
        config = self.config
        height, width = (config.vae.spatial_stride * side for side in (shape.latent_height, shape.latent_width))
        pixels = jax.ShapeDtypeStruct((shape.batch, config.pixel_frames(1), height, width, 3), jnp.float32)
        programs = self._trace_text() | self._trace_rolling(shape) | self._trace_decode(shape)
        return programs | {"encode_video": self._trace_encode(pixels)}

    def lower(self, shape: Shape, platform: str) -> dict[str, jax.stages.Lowered]:
        """`trace`, as the compiler of a platform, such as "neuron", gets it."""
        return {name: self._lower(traced, (platform,)) for name, traced in self.trace(shape).items()}

    def abstract_stream(self, shape: Shape) -> tuple[RollingState, TextKV, Any]:
        """Shapes and places of what `place_stream` takes, of a stream that has decoded something."""
        arrays = self.host_state(shape), self.text_kv_shape(shape), self.decoder_state_shape(shape)
        return self.layout.abstract(arrays, (self._rolling, mesh.TEXT_KV, mesh.PIXELS))

    def encode_video(self, pixels: Float[np.ndarray, "1 T H W 3"]) -> Float[np.ndarray, "1 F C H W"]:
        """Normalised latents of pixels in -1 .. 1; compiled once for each shape of `pixels`."""
        if pixels.shape not in self._encoders:
            lowered = self._lower(self._trace_encode(pixels))
            self._encoders[pixels.shape] = self._count(lowered.compile())
        return np.asarray(self._encoders[pixels.shape](self.params["vae"], pixels))

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the weights that go on with a stream: the DiT's and the VAE's, in the dtypes they have here."""
        return checksum(jax.tree.leaves([self.params["dit"], self.params["vae"]]))

    def _module(self, part: str, params: nnx.State) -> Any:
        return nnx.merge(self.graphs[part], params)

    def _context_shape(self, shape: Shape) -> jax.ShapeDtypeStruct:
        """Text features, with rows added so that they divide among the devices."""
        dit, shares = self.config.dit, self.layout.shares
        rows = -(-dit.text_len // shares) * shares
        return jax.ShapeDtypeStruct((shape.batch, rows, dit.text_dim), jnp.float32)

    def _trace(
        self,
        function: Callable,
        args: tuple,
        inputs: tuple,
        outputs: Any,
        donate: tuple[int, ...] = (),
        layout: Layout | None = None,
    ) -> jax.stages.Traced:
        """A function of local parts, traced for whole arrays that lie as `inputs` and `outputs` say."""
        layout = layout or self.layout
        abstract = layout.abstract(args, inputs)
        with precision(self.dtype):
            return jax.jit(layout.shared(function, inputs, outputs), donate_argnums=donate).trace(*abstract)

    def _lower(self, traced: jax.stages.Traced, platforms: tuple[str, ...] | None = None) -> jax.stages.Lowered:
        with precision(self.dtype):
            return traced.lower(lowering_platforms=platforms)

    def _count(self, compiled: Any) -> Any:
        self.compilations += 1
        return compiled

    def _compile(self, shape: Shape) -> Executables:
        """Lowers one after the other, compiles in parallel (the compiler runs outside Python's lock)."""
        programs = {} if self._encode_text or "text" not in self.params else self._trace_text()
        programs |= self._trace_rolling(shape) | self._trace_decode(shape)
        self._decoder_states[shape] = programs["decode_first"].out_info[1]
        lowered = {name: self._lower(traced) for name, traced in programs.items()}
        with ThreadPoolExecutor(max_workers=len(lowered)) as pool:
            futures = {name: pool.submit(low.compile) for name, low in lowered.items()}
        compiled = {name: self._count(future.result()) for name, future in futures.items()}
        self._encode_text = compiled.pop("encode_text", self._encode_text)
        return Executables(**compiled)

    def _trace_text(self) -> dict[str, jax.stages.Traced]:
        def encode_text(params: nnx.State, ids: Array, lengths: Array) -> Array:
            return self._module("text", params)(ids, lengths)

        args = self.params["text"], np.zeros((1, self.config.dit.text_len), np.int32), np.zeros(1, np.int32)
        return {"encode_text": self._trace(encode_text, args, (mesh.WHOLE,) * 3, mesh.WHOLE, layout=self._text_layout)}

    def _trace_rolling(self, shape: Shape) -> dict[str, jax.stages.Traced]:
        config, cut = self.config, self.layout.shares > 1
        grid = token_grid(config, *shape[1:])

        def text_kv(params: nnx.State, context: Array) -> TextKV:
            kv = self._module("dit", params).text_keys_values(context)
            if cut:
                kv = jax.tree.map(lambda x: gathered(x, axis=3)[:, :, :, : config.dit.text_len], kv)
            return kv

        def step(params: nnx.State, state: RollingState, kv: TextKV, plan: StepPlan, noise: Array) -> RollingState:
            dit, rotary = self._module("dit", params), rotary_of(config, plan, grid)
            if cut:
                rotary = jax.tree.map(lambda x: own_part(x, axis=2), rotary)
            across = partial(MeshAttention, cuts_cached_tokens=self.layout.cuts_cached_tokens)
            attention = across if cut else WindowAttention
            return rolling_step(config, dit, state, kv, plan, noise, rotary, attention)

        params = self.params["dit"]
        plan = plan_step(0, Roll(0, None), config.rolling, config.dit.head_dim, config.dit.rope_theta)
        plan = StepPlan.of_rows([plan] * shape.batch)
        state = self.host_state(shape)
        kv = mesh.TEXT_KV
        return {
            "text_kv": self._trace(text_kv, (params, self._context_shape(shape)), (mesh.WHOLE, mesh.TEXT_ROWS), kv),
            "step": self._trace(
                step,
                (params, state, self.text_kv_shape(shape), plan, state.x0),
                (mesh.WHOLE, self._rolling, kv, mesh.ROWS, mesh.TOKENS),
                self._rolling,
                donate=(1,),
            ),
        }

    def _trace_decode(self, shape: Shape) -> dict[str, jax.stages.Traced]:
        def decode(params: nnx.State, latents: Array, state: Any = None) -> tuple[Pixels, Any]:
            unit, state = self._module("vae", params).decode(
                latents, state, first=state is None, width_axis=self.layout.width_axis
            )
            return Pixels(unit, to_uint8(unit)), state

        rolling, vae = self.config.rolling, self.config.vae
        block = (shape.batch, rolling.block_frames, vae.z_dim, shape.latent_height, shape.latent_width)
        args = self.params["vae"], jax.ShapeDtypeStruct(block, jnp.float32)
        specs, out = (mesh.WHOLE, mesh.LATENTS), mesh.PIXELS
        first = self._trace(decode, args, specs, out)
        later = (*args, first.out_info[1]), (*specs, out)
        return {"decode_first": first, "decode_next": self._trace(decode, *later, out, donate=(2,))}

    def _trace_encode(self, pixels: Any) -> jax.stages.Traced:
        def encode_video(params: nnx.State, pixels: Array) -> Array:
            return self._module("vae", params).encode(pixels, width_axis=self.layout.width_axis)

        args = self.params["vae"], pixels
        return self._trace(encode_video, args, (mesh.WHOLE, mesh.GIVEN), mesh.GIVEN_LATENTS)
