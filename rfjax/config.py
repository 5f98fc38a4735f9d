"""Model configuration: frozen dataclasses, presets, and their JSON form.

Letters used throughout the package: B batch, F latent frames, H W latent height and width (pixels / 8), T tokens
(patches of 1x2x2 latents), N heads, D head dim, C channels or model dim, L layers.

Configs are static (hashable): everything that varies from step to step travels in arrays.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from rfjax.errors import InputError

# Mean and standard deviation of each of the 16 latent channels of the Wan2.1 VAE, fixed by that release.
WAN_LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
WAN_LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip


_SIGNED = ("latents_mean",)  # every other number is above 0


class _Section:
    """Checks each field against its annotation, then for `_faults`: values that together make no model."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value, signed = getattr(self, f.name), f.name in _SIGNED
            if not _is(value, f.type, signed):
                raise InputError(f"model config: {f.name} is {value!r}; {_wanted(f.type, signed)} is needed")
        for fault, found in self._faults().items():
            if found:
                raise InputError(f"model config: {fault}")

    def _faults(self) -> Mapping[str, bool]:
        return {}


def _wanted(kind: Any, signed: bool) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is str:
        return "text of one line"
    name = str(kind) if get_origin(kind) else getattr(kind, "__name__", kind)
    return f"{name}{'' if signed else ' above 0'}"


def _is(value: Any, kind: Any, signed: bool) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is str:
        return isinstance(value, str) and len(value.splitlines()) <= 1
    if get_origin(kind) is tuple:
        *kinds, last = get_args(kind)
        kinds = kinds * len(value) if last is ... and isinstance(value, tuple) else [*kinds, last]
        same_length = isinstance(value, tuple) and len(value) == len(kinds)
        return same_length and all(_is(v, k, signed) for v, k in zip(value, kinds, strict=True))
    if kind is bool:
        return isinstance(value, bool)
    is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    return is_number and (signed or value > 0)


@dataclass(frozen=True, kw_only=True)
class DiTConfig(_Section):
    """WAN diffusion transformer (Wan2.1 T2V)."""

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    freq_dim: int = 256  # width of the sinusoidal timestep features
    text_dim: int = 4096  # width of the text encoder's output
    text_len: int = 512  # text tokens attended, padding included
    in_dim: int = 16  # latent channels
    out_dim: int = 16
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def _faults(self) -> Mapping[str, bool]:
        time, height, width = self.patch_size
        return {
            f"dim {self.dim} does not split into {self.num_heads} heads (num_heads) of even width": (
                self.dim % (2 * self.num_heads) != 0
            ),
            f"freq_dim {self.freq_dim} is odd": self.freq_dim % 2 != 0,
            f"patch_size {self.patch_size} is not one frame and a square": time != 1 or height != width,
        }


@dataclass(frozen=True, kw_only=True)
class VAEConfig(_Section):
    """Wan2.1 causal video VAE."""

    dim: int
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = WAN_LATENTS_MEAN
    latents_std: tuple[float, ...] = WAN_LATENTS_STD

    def _faults(self) -> Mapping[str, bool]:
        return {
            f"dim_mult {self.dim_mult} needs one temporal_downsample less": (
                len(self.temporal_downsample) != len(self.dim_mult) - 1 or not self.dim_mult
            ),
            f"latents_mean and latents_std do not have z_dim {self.z_dim} values": (
                not len(self.latents_mean) == len(self.latents_std) == self.z_dim
            ),
        }

    @property
    def spatial_stride(self) -> int:
        """Pixels per latent along height and width."""
        return 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_stride(self) -> int:
        """Pixel frames per latent frame, but for the first latent frame of a video, which is one pixel frame."""
        return 2 ** sum(self.temporal_downsample)


@dataclass(frozen=True, kw_only=True)
class TextConfig(_Section):
    """umT5 encoder."""

    vocab_size: int
    dim: int
    dim_attn: int
    dim_ffn: int
    num_heads: int
    num_layers: int
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6

    def _faults(self) -> Mapping[str, bool]:
        return {
            f"dim_attn {self.dim_attn} does not split into {self.num_heads} heads (num_heads)": (
                self.dim_attn % self.num_heads != 0
            ),
            f"num_buckets {self.num_buckets} is not from 4 to twice max_distance {self.max_distance}": (
                not 4 <= self.num_buckets < 2 * self.max_distance
            ),
        }


@dataclass(frozen=True, kw_only=True)
class RollingConfig(_Section):
    """The rolling window: what is denoised together, what it sees, and the few-step schedule."""

    block_frames: int = 3  # latent frames in a block
    max_attention_blocks: int = 7  # key blocks any query may see: sink, working blocks and window together
    denoising_steps: tuple[int, ...] = (1000, 800, 600, 400, 200)  # before the shift; one window block each
    timestep_shift: float = 5.0
    num_train_timesteps: int = 1000
    prediction: Literal["flow", "clean"] = "flow"  # what the DiT gives: noise - x0, or x0 itself

    def _faults(self) -> Mapping[str, bool]:
        steps = self.denoising_steps
        return {
            f"denoising_steps {steps} do not fall from at most {self.num_train_timesteps}": (
                not steps or steps[0] > self.num_train_timesteps or any(a <= b for a, b in pairwise(steps))
            ),
            f"max_attention_blocks {self.max_attention_blocks} is not above the {len(steps)} denoising_steps": (
                self.max_attention_blocks <= len(steps)
            ),
        }

    @property
    def window_blocks(self) -> int:
        """Blocks denoised together: one for each entry of the step list."""
        return len(self.denoising_steps)

    @property
    def cache_slots(self) -> int:
        """Cache slots a layer holds: the sink, and a ring of as many blocks as a clean pass may see."""
        return self.max_attention_blocks + 1


@dataclass(frozen=True, kw_only=True)
class UseConfig(_Section):
    """How a model that was trained at one size, on few words, is to be used."""

    height: int  # pixels
    width: int
    fps: int = 16  # pixel frames a second
    prompt_hint: str = ""  # how prompts are written; said where one has words that the model does not know


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that makes up one checkpoint."""

    dit: DiTConfig
    vae: VAEConfig
    text: TextConfig
    rolling: RollingConfig = field(default_factory=RollingConfig)
    use: UseConfig | None = None  # None: the release, which takes prompts of every kind and does well at many sizes

    def __post_init__(self) -> None:
        dit = self.dit
        if dit.text_dim != self.text.dim:
            raise InputError(
                f"the DiT takes text features of width {dit.text_dim}, the text encoder gives {self.text.dim}; "
                "these files are of different models"
            )
        if dit.in_dim != self.vae.z_dim or dit.out_dim != self.vae.z_dim:
            raise InputError(
                f"the DiT works on {dit.in_dim} latent channels, the VAE on {self.vae.z_dim}; "
                "these files are of different models"
            )
        if any(side % self.spatial_multiple for side in self.default_size):
            height, width = self.default_size
            raise InputError(
                f"model config: use has width {width} and height {height}; they must be multiples of "
                f"{self.spatial_multiple}"
            )

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width in pixels, where none are asked for: those trained at, 480 x 832 for the release."""
        return (self.use.height, self.use.width) if self.use else (480, 832)

    @property
    def fps(self) -> int:
        """Pixel frames a second."""
        return self.use.fps if self.use else 16

    @property
    def spatial_multiple(self) -> int:
        """Height and width in pixels must be multiples of this: VAE stride times patch size."""
        return self.vae.spatial_stride * self.dit.patch_size[1]

    def pixel_frames(self, blocks: int) -> int:
        """Pixel frames of a video's first `blocks` blocks: 9, then 12 a block, for Wan's VAE and 3-frame blocks."""
        return 1 + self.vae.temporal_stride * (blocks * self.rolling.block_frames - 1) if blocks else 0

    def whole_blocks(self, pixel_frames: int) -> int:
        """Whole blocks that so many pixel frames fill."""
        return ((pixel_frames - 1) // self.vae.temporal_stride + 1) // self.rolling.block_frames

    def to_json(self) -> dict[str, Any]:
        """A plain dict of dicts that `from_json` reads back."""
        sections = dataclasses.asdict(self)
        return {name: fields for name, fields in sections.items() if fields is not None}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """Reads what `to_json` wrote.

        Raises:
            InputError: a section or a field is unknown, missing (only "use" may be) or of the wrong type.
        """
        sections = {"dit": DiTConfig, "vae": VAEConfig, "text": TextConfig, "rolling": RollingConfig}
        if set(data) - {"use"} != set(sections):
            raise InputError(f"model config has sections {sorted(data)}, expected {sorted(sections)}")
        kinds = sections | {"use": UseConfig}
        return cls(**{name: _read_section(name, kinds[name], fields) for name, fields in data.items()})


def _read_section(name: str, kind: type, data: Mapping[str, Any]) -> Any:
    if not isinstance(data, Mapping):
        raise InputError(f"model config section {name!r} is {data!r:.60}, not an object")
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = set(data) - known
    if unknown:
        raise InputError(f"model config section {name!r} has unknown fields {sorted(unknown)}")
    try:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})
    except TypeError as error:
        raise InputError(f"model config section {name!r}: {error}") from None


UMT5_XXL = TextConfig(vocab_size=256384, dim=4096, dim_attn=4096, dim_ffn=10240, num_heads=64, num_layers=24)

PRESETS: dict[str, ModelConfig] = {
    "wan-1.3b": ModelConfig(
        dit=DiTConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
        vae=VAEConfig(dim=96),
        text=UMT5_XXL,
    ),
    "wan-14b": ModelConfig(
        dit=DiTConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
        vae=VAEConfig(dim=96),
        text=UMT5_XXL,
    ),
    # The sizes of the tiny release in tests/golden.
    "tiny": ModelConfig(
        dit=DiTConfig(dim=192, ffn_dim=256, num_heads=12, num_layers=3, freq_dim=64, text_dim=64, text_len=32),
        vae=VAEConfig(dim=6),
        text=TextConfig(vocab_size=512, dim=64, dim_attn=64, dim_ffn=128, num_heads=4, num_layers=2),
    ),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a known model: "wan-1.3b", "wan-14b" or "tiny".

    Raises:
        InputError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
