"""The check of a kernel's source: each rule broken once, and kernels that keep them all."""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest

from nki_ops.simulator import check_subset, jit, nki

nl, nisa = nki.language, nki.isa
TABLE = [1, 2, 3]
WIDTH = 512


class Mode(Enum):
    fast = 1


@dataclass
class Config(nl.NKIObject):
    size: int = 4

    def half(self):
        return self.size // 2


class Foreign(Config):
    pass


def helper(tile, config):
    assert config.half() > 0
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)


@jit
def proper(a, mode=Mode.fast, sizes=(1, 2), bias=None):
    """Uses what the language has: loops, conditions, helpers, classes, dictionaries, closures over registers."""
    out: nl.ndarray = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    config = Config(size=min(len(sizes), WIDTH))
    names = {"x": 1, "y": 2}
    reg = nisa.register_alloc(2)
    print(f"shape {a.shape} {names['x']}")

    def body(i):
        tile = nl.ndarray((1, a.shape[1]), a.dtype)
        nisa.dma_copy(tile, a.ap([[1, 1], [1, a.shape[1]]], scalar_offset=i))
        helper(tile, config)
        nisa.dma_copy(out.select(0, i), tile)

    nl.fori_loop(0, reg, body)
    with nl.no_reorder():
        for i in range(2):
            if mode == Mode.fast and bias == None:  # noqa: E711 - the language has no `is`
                nisa.dma_copy(out[i], a[i])
    return out


def test_a_proper_kernel_has_no_violations():
    assert check_subset(proper) == []


def identity(a):
    if a is None:
        return


def keyword_only(a, *, flag=True):
    pass


def list_argument(a, sizes=[1, 2]):  # noqa: B006
    pass


def dict_key(a):
    return {1: a}


def class_base(a):
    return Foreign(size=2)


def local_class(a):
    class Plain:
        pass

    return Plain


def wide_integer(a):
    return a.shape[0] + 2**40 * 0 + 1099511627776


def complex_value(a):
    return 1j


def numpy_call(a):
    return np.zeros(a.shape)


def library_call(a):
    return math.sqrt(a.shape[0])


def removed(a):
    return nl.arange(4)


def mask(a):
    nisa.tensor_copy(a, a, mask=True)


def tries(a):
    try:
        return a
    except ValueError:
        return None


def yields(a):
    yield a


def imports(a):
    import os

    return os


def opens(a):
    with open(a) as f:
        return f


def changes_global(a):
    global WIDTH
    WIDTH = 3


def arithmetic(a):
    def body(i):
        nisa.dma_copy(a, a.ap([[1, 1]], scalar_offset=i + 1))

    nl.fori_loop(0, 4, body)


def condition(a):
    reg = nisa.register_alloc(1)
    while reg:
        pass


def counts(a):
    reg = nisa.register_alloc(1)
    for _ in range(reg):
        pass


def compares(a):
    for i in nl.dynamic_range(4):
        assert i < 3


def decorated(a):
    return proper(a)


def mutable_global(a):
    return TABLE[0]


def alias(a):
    return [nl.affine_range(3), nisa.vector_engine, nl.tile_size.psum_fmax]


def calls_bad_helper(a):
    return numpy_call(a)


BROKEN = {
    identity: "identity",
    keyword_only: "keyword-only",
    list_argument: "list-argument",
    dict_key: "dict-key",
    class_base: "class-base",
    local_class: "class-base",
    wide_integer: "value",
    complex_value: "value",
    numpy_call: "library",
    library_call: "library",
    removed: "removed",
    mask: "removed",
    tries: "statement",
    yields: "statement",
    imports: "statement",
    opens: "statement",
    changes_global: "statement",
    arithmetic: "register",
    condition: "register",
    counts: "register",
    compares: "register",
    decorated: "decorated",
    mutable_global: "mutable-global",
    alias: "deprecated",
    calls_bad_helper: "library",
}


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda k: k.__name__)
def test_each_rule_is_found(kernel):
    found = check_subset(kernel)
    assert BROKEN[kernel] in {v.rule for v in found}


def test_violations_name_file_line_and_fix():
    (found,) = check_subset(jit(identity))
    first = identity.__code__.co_firstlineno
    assert (found.line, found.rule) == (first + 1, "identity")
    assert str(found) == f"{__file__}:{first + 1}: a is None: `is` and `is not` are not supported; use == and !="
    (inner,) = check_subset(calls_bad_helper)
    assert inner.line == numpy_call.__code__.co_firstlineno + 1
