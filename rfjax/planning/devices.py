"""Devices that a plan can be held against, and their memory."""

from typing import NamedTuple

from rfjax.errors import InputError


class Device(NamedTuple):
    """Memory in bytes of what JAX shows as one device, by its data sheet; what that is in words."""

    memory: float
    about: str


DEVICES = {
    "trn2": Device(12e9, "Trainium2 core, NEURON_LOGICAL_NC_CONFIG=1: 8 a chip, two share a bank of 24 GB"),
    "trn2-lnc2": Device(24e9, "Trainium2 logical core of two, the default: 4 a chip"),
    "tpu-v5e": Device(16e9, "TPU v5e chip"),
    "tpu-v5p": Device(95e9, "TPU v5p chip"),
    "tpu-v6e": Device(32e9, "TPU v6e chip"),
    "l4": Device(24e9, "NVIDIA L4"),
    "rtx-4090": Device(24e9, "NVIDIA RTX 4090"),
    "a100": Device(80e9, "NVIDIA A100, 80 GB"),
    "h100": Device(80e9, "NVIDIA H100"),
    "h200": Device(141e9, "NVIDIA H200"),
}


def find_device(name: str) -> Device:
    """The device of that name.

    Raises:
        InputError: there is none.
    """
    if name not in DEVICES:
        raise InputError(f"device {name!r} is not one of {', '.join(DEVICES)}")
    return DEVICES[name]
