"""What is lowered for the device keeps to what Trainium's compiler takes (jax-neuronx: known limits).

Every device function of the engine is lowered and its StableHLO scanned. Scans over layers and heads are allowed:
their trip count is a constant in the loop's condition.
"""

import re

import pytest

from rfjax.engine import Shape

FORBIDDEN = {
    "a conditional": r"stablehlo\.(case|if)\b",
    "a host callback": r"callback",
    "a custom call": r"stablehlo\.custom_call(?! @Sharding| @SPMD)",
    "a complex number": r"complex<|stablehlo\.complex",
    "a 64-bit number": r"tensor<(\d+x)*(f64|i64|ui64)>",
    "a reduction over several operands": r"stablehlo\.reduce\(%\S+ init: %\S+\), \(",
    "a sort": r"stablehlo\.sort|chlo\.top_k",
    "random bits": r"rng_bit_generator|stablehlo\.rng|shift_left",
    "reduced precision": r"stablehlo\.reduce_precision",
    "an 8-bit float": r"f8E4M3FN|FNUZ",
    "an integer product": r"dot_general.*tensor<(\d+x)*u?i\d+>",
    "a dynamic shape": r"tensor<[^>]*\?",
    "a gather": r"stablehlo\.(gather|dynamic_gather|scatter)",
    "a dilated convolution": r"(lhs_dilate|rhs_dilate) = \[[^\]]*[2-9]",
}
# Token embeddings are looked up by ids from the tokenizer, which stay below the table's length.
ALLOWED = {"encode_text": {"a gather"}}


@pytest.fixture(scope="module")
def lowered(pipe):
    engine, shape = pipe.engine, Shape(1, 4, 4)
    return {"encode_text": engine._lower_text()} | engine._lower_rolling(shape) | engine._lower_decode(shape)


@pytest.mark.parametrize("name", ["encode_text", "text_kv", "step", "decode_first", "decode_next"])
def test_device_functions_keep_to_the_rules(lowered, name):
    text = lowered[name].as_text()
    for what, pattern in FORBIDDEN.items():
        if what in ALLOWED.get(name, ()):
            continue
        found = re.search(f".*({pattern}).*", text)
        assert not found, f"{name} has {what}: {found.group(0).strip()[:200]}"


@pytest.mark.parametrize("name", ["encode_text", "text_kv", "step"])
def test_every_loop_has_a_constant_trip_count(lowered, name):
    text = lowered[name].as_text()
    conditions = re.findall(r"cond \{(.*?)\} do \{", text, re.DOTALL)
    assert len(conditions) == text.count("stablehlo.while") > 0
    for condition in conditions:
        assert re.search(r"stablehlo\.constant dense<\d+>", condition), condition
        assert len(re.findall(r"%iterArg", condition)) == 1, condition


def test_no_convolution_has_three_spatial_axes(lowered):
    for name in ("decode_first", "decode_next"):
        layouts = re.findall(r"dim_numbers = (\[[^\]]*\])", lowered[name].as_text())
        assert layouts and all(len(layout.split(",")) == 4 for layout in layouts)
