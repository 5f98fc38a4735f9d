"""Say what a model needs and does on each device of a mesh, before anything is loaded: memory, traffic, modelled time.

  rfjax plan --preset wan-1.3b --size 832x480 --mesh 4x2 --dtype bf16
  rfjax plan -c CHECKPOINT --mesh 2x1 --device l4

The programs are compiled for as many virtual CPU devices; no other device and no weights are needed. The exit code is
1 if the model does not fit.
"""

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

from rfjax.cli.options import Parser, add_cache, add_mesh, add_model, add_preset, add_size, integer, size_to_make
from rfjax.cli.session import chosen_config

if TYPE_CHECKING:
    from rfjax.planning.devices import Device
    from rfjax.planning.plan import Cost, Plan

DOES_NOT_FIT = 1  # exit code
_GB = 1e9


def add_arguments(parser: Parser) -> None:
    add_model(parser, default_dtype="bfloat16")
    add_size(parser)
    add_mesh(parser)
    add_preset(parser)
    parser.add_argument("--device", default="trn2", metavar="NAME", help="which device; default: %(default)s")
    parser.add_argument("--data", type=integer, default=1, metavar="N", help="groups of devices, a stream each")
    add_cache(parser)
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")


def run(args: argparse.Namespace) -> int:
    head, seq = args.mesh or (1, 1)
    with args.interrupts.delayed():
        _use_virtual_devices(args.data * head * seq)
        from rfjax.parallel import Layout, make_mesh
        from rfjax.planning.devices import find_device
        from rfjax.planning.plan import plan

    device = find_device(args.device)
    config = chosen_config(args)
    width, height = size_to_make(args, config)
    layout = Layout(make_mesh(args.data, head, seq), args.cache_cut or "both")
    dtype = args.dtype or "bfloat16"
    found = plan(config, dtype, height, width, layout, args.data, max(1, device.cores), args.cache_dtype)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        print(f"{width}x{height}, {dtype}, mesh {head}x{seq}" + (f", {args.data} streams" if args.data > 1 else ""))
        print(_as_text(found, device))
    return 0 if found.total <= device.memory else DOES_NOT_FIT


def _use_virtual_devices(count: int) -> None:
    import jax

    with contextlib.suppress(RuntimeError):  # JAX has started in this process, and has the devices it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(1, count))


def _as_text(found: "Plan", device: "Device") -> str:
    total, free = found.total, device.memory - found.total
    rows = [*found.resident.items(), ("activations, at most", found.activations), ("in all, on each device", total)]
    lines = ["", "memory of a device, GB", *(f"  {name:<24}{size / _GB:8.2f}" for name, size in rows)]
    lines.append(f"  {f'on all {found.devices}':<24}{total * found.devices / _GB:8.2f}")
    lines.append(f"  text encoder, if it is there too: {found.text_encoder / _GB:.2f} more")
    verdict = f"fits, with {free / _GB:.2f} left" if free >= 0 else f"does not fit: {-free / _GB:.2f} too much"
    if 0 <= free < found.text_encoder:
        verdict += "; not with the text encoder"
    lines += [f"{device.about} ({device.memory / _GB:.0f} GB): {verdict}", ""]
    step, decode = found.costs["step"], found.costs["decode_next"]
    lines += _work("a step", step) + _work("a block decoded", decode)
    return "\n".join(lines + (_modelled(found) if device.cores else []))


def _modelled(found: "Plan") -> list[str]:
    from rfjax.planning.trainium2 import ASSUMPTIONS

    step, decode = found.costs["step"], found.costs["decode_next"]
    lines = ["", "modelled on Trainium2, not measured, ms"]
    for name, cost in (("step", step), ("decode", decode)):
        lines += [f"  {name + ', ' + part:<32}{1e3 * seconds:8.1f}" for part, seconds in cost.modelled.items()]
    in_all = f"in all, for {found.frames} frames"
    lines.append(f"  {in_all:<32}{1e3 * (step.seconds + decode.seconds):8.1f}   ({found.modelled_fps:.1f} frames/s)")
    return [*lines, "assumed:", *(f"  {text}" for text in ASSUMPTIONS)]


def _work(name: str, cost: "Cost") -> list[str]:
    sent = ", ".join(
        f"{count} {kind} of {size / 1e6:.0f} MB in all" for kind, (count, size) in cost.collectives.items()
    )
    share = f"{cost.share:.3f} of an equal share"
    return [f"{name}: {cost.flops / 1e12:.2f} TFLOP on each device ({share}); sends {sent or 'nothing'}"]
