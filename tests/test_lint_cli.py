"""`rfjax lint` as users meet it: what it prints for each program, its exit codes, and one line for every mistake."""

import os
import re

import jax
import pytest

from nki_ops import dispatch
from rfjax.cli import main

PROGRAMS = ["encode_text", "text_kv", "step", "decode_first", "decode_next", "encode_video"]
CALLS = {"attention": 3, "rms_norm_rope_3d": 1, "rotate": 1, "update_cache": 1}


@pytest.fixture
def lint(capfd, monkeypatch):
    """`lint(*words) -> (exit code, lines on stdout, lines on stderr)`."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch._from_environment.cache_clear()

    def run(*words):
        code = main(["lint", *map(str, words)])
        return code, *(text.splitlines() for text in capfd.readouterr())

    return run


def test_every_program_is_listed_with_its_custom_calls(lint):
    code, out, err = lint("--preset", "tiny", "--size", "96x64")
    *programs, total = out
    assert (code, err) == (0, [])
    assert [line.partition(":")[0] for line in programs] == PROGRAMS
    calls = {line.partition(":")[0]: line.partition("custom calls: ")[2] for line in programs}
    assert calls.pop("step") == ", ".join(f"{n} nki_ops_stand_in.{kernel}" for kernel, n in CALLS.items())
    assert set(calls.values()) == {"none"}
    operations = sum(int(re.search(r": (\d+) operations", line).group(1)) for line in programs)
    assert total == f"6 programs, {operations} operations: 0 violations of the rules of Neuron's compiler"


def test_a_checkpoint_needs_no_weights(lint, tiny_checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    assert os.listdir(tmp_path) == ["config.json"]
    assert lint("-c", tmp_path, "--size", "96x64") == lint("--preset", "tiny", "--size", "96x64")


def test_the_form_of_the_operations_can_be_chosen(lint, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "xla")
    code, out, _ = lint("--preset", "tiny", "--size", "96x64")
    assert code == 0 and "stand_in" not in " ".join(out)


def test_a_violation_is_printed_with_its_source_line(lint, monkeypatch):
    def rounded(x, eps):
        return jax.lax.reduce_precision(x, 8, 7)

    monkeypatch.setattr("rfjax.dit.model.layer_norm", rounded)
    code, out, _ = lint("--preset", "tiny", "--size", "96x64")
    assert code == 1
    (violation,) = [line for line in out if line.startswith("  ")]
    assert out[PROGRAMS.index("step") + 1] == violation
    line = rounded.__code__.co_firstlineno + 1
    assert violation.startswith(f"  {__file__}:{line}, ") and "reduced precision" in violation
    assert out[-1].endswith(": 1 violation of the rules of Neuron's compiler")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--preset", "wan"], "no preset 'wan'; the presets are wan-1.3b, wan-14b, tiny"),
        (["--preset", "tiny", "-c", "here"], "lint takes one of --checkpoint DIR and --preset NAME"),
        (["-c", "no/such"], "no/such: no such checkpoint"),
        (["--preset", "tiny", "--size", "97x64"], "size 97x64: .* multiples of 16"),
        (["--preset", "wan-1.3b", "--dtype", "float32"], "NKI kernel attention: .* need 378348 B of the 212728 B"),
    ],
)
def test_bad_input_is_one_line(lint, words, message):
    code, out, err = lint(*words)
    assert (code, out, len(err)) == (2, [], 1)
    assert re.match(f"rfjax: {message}", err[0])


@pytest.mark.parametrize(
    "value, message", [("cuda", "RFJAX_KERNELS=cuda is not"), ("simulate", "NKI kernel .*callback")]
)
def test_kernels_that_are_not_for_trainium_are_one_line(lint, monkeypatch, value, message):
    monkeypatch.setenv(dispatch.VARIABLE, value)
    code, out, err = lint("--preset", "tiny", "--size", "96x64")
    assert (code, out) == (2, []) and re.match(f"rfjax: {message}", err[-1])
