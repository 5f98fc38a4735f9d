"""The test oracle itself against the release's recorded calls, so that what it proves counts."""

import numpy as np
from oracle import Oracle

from rfjax.config import preset

CONFIG = preset("tiny")


def test_oracle_equals_the_release_call_by_call(tiny_dit, load_golden):
    arrays, description = load_golden("dit_seq")
    oracle = Oracle(CONFIG, *tiny_dit, arrays["context"], 8, 12)
    checked = 0
    for call in description["calls"]:
        start, n = call["pool_offset"], call["n_frames"]
        latents = arrays["pool"][start : start + n]
        if call["kind"] == "denoise":
            flow = oracle.denoise(latents, call["t"], call["start_block"])
        else:
            flow = oracle.clean(latents, call["start_block"])
        if call["flow_key"]:
            np.testing.assert_allclose(flow, arrays[call["flow_key"]][0], rtol=0, atol=1e-5)
            checked += 1
    assert checked == 18
