"""Training the causal VAE on streams.

Clips would teach only the first second: before a video's start every causal convolution sees zeros, and the state
of a running stream is reached after some six latent frames. So a batch of streams runs on and on, a chunk at a time,
the VAE's state handed from chunk to chunk without its gradient (truncated backpropagation through time). Before that
comes a short phase of single images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, UInt8

from rfjax.config import VAEConfig
from rfjax.train.draw import contact_sheet
from rfjax.train.initial import initial_vae
from rfjax.train.loop import Metrics, Stage
from rfjax.train.optimizer import averaged, optimizer
from rfjax.vae.model import VAE, to_uint8

Frames = UInt8[np.ndarray, "B T H W 3"]


@dataclass(frozen=True)
class Phase:
    """A part of the training: until step `end`, `batch` streams of frames of `size` x `size` pixels.

    Each stream is a first frame, then `chunks` chunks (0: the frame alone), and then another begins.
    """

    end: int
    batch: int
    size: int
    chunks: int
    chunk_frames: int = 16


@dataclass(frozen=True)
class VAERecipe:
    """How a VAE is trained.

    Attributes:
        phases: in order.
        learning_rate, adam_learning_rate: peaks, of Muon and Adam (see `rfjax.train.optimizer`).
        average: decay of the weights' moving average.
        latent_noise: standard deviation of the noise on latents, under which they must decode, in units of their own.
        latent_weight: of the latents' mean square, which keeps them small.
    """

    phases: tuple[Phase, ...]
    learning_rate: float = 0.006
    adam_learning_rate: float = 0.002
    average: float = 0.998
    latent_noise: float = 0.15
    latent_weight: float = 1e-3


class VAEState(NamedTuple):
    """Everything the next step depends on."""

    params: Any
    average: Any
    optimizer: Any
    stream: Any  # states of encoder and decoder; None at the start of a phase


# (seed, batch, size, frames) -> the pixels of `batch` streams
Source = Callable[[int, int, int, int], Frames]
UNSEEN = 10**9  # seeds from here on are for evaluation

# What is evaluated: streams of whole blocks of 3 latent frames, and from which one on their state is steady.
_SHOWN_STREAMS, _SHOWN_LATENTS, _STEADY = 8, 27, 13


def loss_terms(target: Float[Array, "B T H W 3"], output: Float[Array, "B T H W 3"]) -> tuple[Array, Array]:
    """Squared error, and an absolute one that also looks at edges (differences of neighbouring pixels).

    Pixels are clipped to -1 .. 1 when they are shown, so where the target is at an end of the range, an output beyond
    it is no error. The decoder may thus draw with steep ramps, and flat areas need no exactness.
    """
    below, above = jnp.minimum(output - target, 0), jnp.maximum(output - target, 0)
    error = jnp.where(target <= -1, above, jnp.where(target >= 1, below, output - target))
    charbonnier = jnp.mean(jnp.sqrt(jnp.square(error) + 1e-4))
    edges = sum(jnp.mean(jnp.abs(jnp.diff(error, axis=axis))) for axis in (2, 3))
    return jnp.mean(jnp.square(error)), charbonnier + edges


def vae_stage(
    config: VAEConfig, recipe: VAERecipe, source: Source, trained: nnx.State | None = None, seed: int = 0
) -> Stage:
    """The stage that trains a VAE on the streams of `source`.

    Args:
        config: of the VAE.
        recipe: how.
        source: of the videos.
        trained: parameters to go on from. Then only the decoder is trained: the latents stay what they are, and with
            them whatever was trained on them.
        seed: of all randomness.
    """
    graph = nnx.graphdef(VAE(config, rngs=nnx.Rngs(seed)))
    tx = optimizer(recipe.learning_rate, recipe.adam_learning_rate, recipe.phases[-1].end)
    fixed = nnx.State({} if trained is None else {"encoder": trained["encoder"]})

    def whole(params: nnx.State, fixed: nnx.State) -> nnx.State:
        return nnx.State({**fixed, **params})

    def loss(params: Any, fixed: nnx.State, pixels: Array, stream: Any, key: Array) -> tuple[Array, Any]:
        vae = nnx.merge(graph, whole(params, fixed))
        before = stream or (None, None)
        mean, encoder = vae.encoder(pixels, before[0])
        spread = jax.lax.stop_gradient(jnp.std(mean, axis=(0, 1, 2, 3)))
        noisy = mean + recipe.latent_noise * spread * jax.random.normal(key, mean.shape)
        output, decoder = vae.decoder(noisy, before[1])
        square, absolute = loss_terms(pixels, output)
        total = square + 0.05 * absolute + recipe.latent_weight * jnp.mean(jnp.square(mean))
        return total, ((encoder, decoder), square, jnp.std(mean))

    @jax.jit
    def update(
        state: VAEState, fixed: nnx.State, pixels: Array, stream: Any, number: Array
    ) -> tuple[VAEState, dict[str, Array]]:
        pixels = pixels.astype(jnp.float32) / 127.5 - 1
        key = jax.random.fold_in(jax.random.key(seed), number)
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params, fixed, pixels, stream, key)
        stream, square, std = aux
        updates, opt = tx.update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        average = averaged(state.average, params, number, recipe.average)
        new = VAEState(params, average, opt, jax.lax.stop_gradient(stream))
        return new, {"psnr": 10 * jnp.log10(4 / square), "std": std}

    def init(number: int) -> VAEState:
        params = initial_vae(config, seed) if trained is None else nnx.State({"decoder": trained["decoder"]})
        state = VAEState(params, params, tx.init(params), None)
        if number == 0:
            return state
        # The state of the streams is the same after any chunk; here it is that after the first.
        chunks = (chunk_of(recipe.phases, source, n) for n in range(number - 1, -1, -1))
        first = next(pixels for pixels, starts in chunks if starts)
        return jax.eval_shape(update, state, fixed, first, None, jnp.int32(0))[0]

    def step(state: VAEState, number: int) -> tuple[VAEState, dict[str, Array]]:
        pixels, starts = chunk_of(recipe.phases, source, number)
        stream = None if starts else state.stream
        return update(state._replace(stream=None), fixed, pixels, stream, jnp.int32(number))

    def show(state: VAEState, number: int, folder: Path) -> Metrics:
        frames = 1 + config.temporal_stride * (_SHOWN_LATENTS - 1)
        pixels = source(UNSEEN, _SHOWN_STREAMS, recipe.phases[-1].size, frames)
        return evaluate(config, graph, whole(state.average, fixed), pixels, folder / "samples" / f"{number:06d}.png")

    return Stage(init, step, show)


@lru_cache(2)
def _episode(source: Source, seed: int, batch: int, size: int, frames: int) -> Frames:
    return source(seed, batch, size, frames)


def chunk_of(phases: tuple[Phase, ...], source: Source, number: int) -> tuple[Frames, bool]:
    """The pixels of step `number`, and whether new streams start with them."""
    begin = 0
    for phase in phases:
        if number < phase.end:
            break
        begin = phase.end
    else:
        raise ValueError(f"step {number} is behind the last phase")
    episode, chunk = divmod(number - begin, phase.chunks + 1)
    frames = _episode(source, begin + episode, phase.batch, phase.size, 1 + phase.chunks * phase.chunk_frames)
    first = 1 + (chunk - 1) * phase.chunk_frames
    return (frames[:, :1] if chunk == 0 else frames[:, first : first + phase.chunk_frames]), chunk == 0


@partial(jax.jit, static_argnums=(0, 1))
def reconstruct(
    config: VAEConfig, graph: nnx.GraphDef, params: Any, pixels: Float[Array, "B T H W 3"]
) -> tuple[Float[Array, "B F C h w"], Float[Array, "B T H W 3"]]:
    """Latents of whole videos, and the pixels that a stream of three latent frames at a time decodes them to."""
    vae = nnx.merge(graph, params)
    latents = vae.encode(pixels)
    start, state = vae.decode(latents[:, :3], None, first=True)
    blocks = rearrange(latents[:, 3:], "b (k f) c h w -> k b f c h w", f=3)

    def decode(state: Any, block: Array) -> tuple[Any, Array]:
        output, state = vae.decode(block, state, first=False)
        return state, output

    _, later = jax.lax.scan(decode, state, blocks)
    return latents, jnp.concatenate([start, rearrange(later, "k b t h w c -> b (k t) h w c")], axis=1)


def evaluate(config: VAEConfig, graph: nnx.GraphDef, params: Any, pixels: Frames, sheet: Path) -> Metrics:
    """Errors by the age of a stream in dB, spreads of the latents, and frames drawn above their reconstructions."""
    unit = pixels.astype(np.float32) / 127.5 - 1
    latents, output = reconstruct(config, graph, params, unit)
    psnr = 10 * np.log10(4 / np.mean(np.square(np.asarray(output) - unit), axis=(2, 3, 4)))
    rows = []
    picked = np.linspace(0, pixels.shape[1] - 5, 7).astype(int)
    for video, decoded in zip(pixels[:4], np.asarray(to_uint8(output))[:4], strict=True):
        rows += [video[picked], decoded[picked]]
    contact_sheet(rows, sheet)
    std = np.asarray(latents).std(axis=(0, 3, 4)).mean(axis=1)
    start, steady = 1 + 3 * config.temporal_stride, 2 + (_STEADY - 1) * config.temporal_stride
    return {
        "psnr_start": float(psnr[:, :start].mean()),
        "psnr_steady": float(psnr[:, steady:].mean()),
        "psnr_steady_worst": float(psnr[:, steady:].mean(axis=1).min()),
        "std_start": float(std[0]),
        "std_steady": float(std[_STEADY:].mean()),
    }
