"""`nki.typing`: `nt.tensor[128, 512]` annotates a kernel's tensor parameter."""

from nki_ops.simulator.memory import NkiTensor


class tensor(NkiTensor):
    """Subscript it with a shape."""

    def __class_getitem__(cls, shape: int | tuple[int, ...]) -> type:
        return cls
