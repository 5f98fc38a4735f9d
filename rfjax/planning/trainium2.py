"""Modelled times on a Trainium2 core; nothing here was measured on one.

A program takes the sum of its parts, as if nothing overlapped. Rates are AWS's documented ones; what is assumed beyond
them stands in `ASSUMPTIONS`.
"""

from rfjax.config import ModelConfig
from rfjax.planning.hlo import Product, Program

MATMUL_RATE = 2 * 128 * 128 * 2.4e9  # FLOP/s of a core in bfloat16
HBM_RATE = 2.9e12 / 8  # bytes/s, a core's share
COPY_RATE = 368e9 / 2  # bytes/s, 16 DMA engines that read and write
HOP = 2e-6  # seconds a collective takes at least
SCORE_RATE = 153.6e9  # attention scores/s, where the two products and the exp tie

# Of the NKI kernels on a core's share of the 480x832 model (docs/kernels.md): seconds, for so many elements.
NORM_ROPE = 0.239e-3 / (3510 * 1536)  # of q or k; a token's channels
ROTATE = 0.039e-3 / (3 * 4680 * 128)  # of the sink's keys
UPDATE_CACHE = 0.040e-3 / (3 * 4680 * 128)  # of keys or values
ATTENTION_SHARE = 0.93  # of SCORE_RATE
MATMUL_SHARE = 0.75  # of MATMUL_RATE

ASSUMPTIONS = (
    "linear products and convolutions run at 75 % of 78.6 TFLOP/s a core, or as fast as the HBM (0.36 TB/s a core) "
    "brings their operands and takes their results, whichever is slower",
    "attention, norm with rotation and cache updates run as the simulated NKI kernels (docs/kernels.md)",
    "what stands between products reads and writes each product's result once more from HBM",
    "collectives take 2 us and 184 GB/s of sent bytes a core (no figure is published)",
    "the cores of a device share its work evenly",
    "nothing overlaps: neither engines, nor collectives, nor decoding with the next step",
    "float32 products run at a quarter of the rate",
)


def step_parts(
    program: Program, config: ModelConfig, tokens: float, keys: float, stored: float, itemsize: int, cores: int = 1
) -> dict[str, float]:
    """Seconds of one rolling step on a device, by part.

    Args:
        program: the compiled step.
        config: of the model.
        tokens: of a step, of which a device norms and rotates all channels.
        keys: elements of a block's keys that a device attends to.
        stored: elements of a block's keys in its part of the cache.
        itemsize: bytes of an activation.
        cores: of a device.
    """
    dit = config.dit
    attention = [p for p in program.products if _is_attention(p)]
    others = [p for p in program.products if not _is_attention(p)]
    scores = sum(p.flops * p.runs for p in attention) / (4 * dit.head_dim)
    kernels = NORM_ROPE * tokens * dit.dim + ROTATE * keys + UPDATE_CACHE * stored
    parts = {
        "linear products": _products(others, itemsize),
        "attention": scores / (ATTENTION_SHARE * SCORE_RATE),
        "norm, rotation, cache": dit.num_layers * kernels,
        "elementwise": _between(others, itemsize),
        "collectives": _collectives(program),
    }
    return _on(cores, parts)


def decode_parts(program: Program, itemsize: int, cores: int = 1) -> dict[str, float]:
    """Seconds of decoding a block on a device, by part; arguments as those of `step_parts`."""
    parts = {
        "convolutions": _products(program.products, itemsize),
        "elementwise": _between(program.products, itemsize),
        "collectives": _collectives(program),
    }
    return _on(cores, parts)


def _on(cores: int, parts: dict[str, float]) -> dict[str, float]:
    return {name: seconds / cores for name, seconds in parts.items()}


def _is_attention(product: Product) -> bool:
    return "/attention/" in product.scope


def _products(products: list[Product], itemsize: int) -> float:
    rate = MATMUL_SHARE * MATMUL_RATE * (1 if itemsize == 2 else 0.25)
    return sum(p.runs * max(p.flops / rate, p.elements * itemsize / HBM_RATE) for p in products)


def _between(products: list[Product], itemsize: int) -> float:
    return sum(2 * p.result * itemsize * p.runs / HBM_RATE for p in products)


def _collectives(program: Program) -> float:
    return sum(c.runs * (HOP + c.bytes_sent / COPY_RATE) for c in program.collectives)
