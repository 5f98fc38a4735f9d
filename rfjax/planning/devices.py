"""Devices that a plan can be held against, and their memory."""

from typing import NamedTuple

from rfjax.errors import InputError


class Device(NamedTuple):
    """What JAX shows as one device.

    Attributes:
        memory: bytes, by its data sheet.
        about: what it is.
        cores: of Trainium2; 0 is another device, for which no times are modelled.
    """

    memory: float
    about: str
    cores: int = 0


DEVICES = {
    "trn2": Device(12e9, "Trainium2 core, NEURON_LOGICAL_NC_CONFIG=1: 8 a chip, two share a bank of 24 GB", 1),
    "trn2-lnc2": Device(24e9, "Trainium2 logical core of two, the default: 4 a chip", 2),
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
