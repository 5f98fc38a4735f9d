"""The tokenizer against recorded ids of the PyTorch release."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.text import Tokenizer, clean_prompt

TINY = Path(__file__).parents[1] / "golden" / "tiny_a"
FOLDER = TINY / "wan_models/Wan2.1-T2V-1.3B/google/umt5-xxl"
RECORD = json.loads((TINY / "golden/tokenizer_golden.json").read_text())
PROMPTS = [case["prompt"] for case in RECORD["prompts"]]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(FOLDER)


@pytest.mark.parametrize(("text_len", "suffix"), [(RECORD["text_len"], ""), (512, "_512")])
def test_ids_equal_the_release(tokenizer, text_len, suffix):
    golden = np.load(TINY / "golden/tokenizer_golden.npz")
    text = tokenizer(PROMPTS, text_len)
    assert text.ids.dtype == text.lengths.dtype == np.int32
    np.testing.assert_array_equal(text.ids, golden[f"ids{suffix}"])
    np.testing.assert_array_equal(text.lengths, golden[f"mask{suffix}"].sum(1))
    full = tokenizer(PROMPTS, 4096).lengths
    assert text.dropped == tuple(max(int(n) - text_len, 0) for n in full)


@pytest.mark.parametrize("case", RECORD["prompts"], ids=range(len(PROMPTS)))
def test_cleaning_equals_the_release(case):
    assert clean_prompt(case["prompt"]) == case["cleaned"]


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  two\u00a0\u3000words\r\n ", "two words"),
        ("<b> &amp;amp;lt;", "<b> &lt;"),  # in text with tags ftfy leaves escapes alone: two layers come off
        ("\u201ccurly\u201d it\u2019s", '"curly" it\'s'),
        ("caf\u00c3\u00a9", "caf\u00e9"),
        ("bell\x07 half \ud800 pair", "bell half \ufffd pair"),
    ],
)
def test_cleaning(prompt, cleaned):
    assert clean_prompt(prompt) == cleaned


def test_an_empty_prompt_is_the_end_token_alone(tokenizer):
    text = tokenizer(["", " \n"], 4)
    np.testing.assert_array_equal(text.ids, [[1, 0, 0, 0]] * 2)
    assert text.lengths.tolist() == [1, 1] and text.dropped == (0, 0)


@pytest.mark.parametrize("text_len", [1, 2, 7, 8])
def test_a_cut_prompt_keeps_its_end_token(tokenizer, text_len):
    whole = tokenizer(PROMPTS[:1], 64)
    text = tokenizer(PROMPTS[:1], text_len)
    assert text.lengths[0] == text_len and text.ids[0, -1] == 1
    np.testing.assert_array_equal(text.ids[0, :-1], whole.ids[0, : text_len - 1])
    assert text.dropped == (int(whole.lengths[0]) - text_len,)


def test_special_tokens_in_a_prompt_become_those_tokens(tokenizer):
    assert 511 in tokenizer(["a <extra_id_0> boat"], 16).ids
    assert tokenizer.vocab_size == 512


@pytest.mark.parametrize("prompts", ["a boat", [], [None], [b"a boat"], ["a boat", 3], None])
def test_bad_prompts_are_refused(tokenizer, prompts):
    with pytest.raises(InputError, match="prompt"):
        tokenizer(prompts, 8)


@pytest.mark.parametrize("text_len", [0, -1, 8.0, None])
def test_bad_text_len_is_refused(tokenizer, text_len):
    with pytest.raises(InputError, match="text_len"):
        tokenizer(["a boat"], text_len)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no tokenizer.json in .*umt5-xxl"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("size", [0, 5000])
def test_a_damaged_file_is_named(tmp_path, size):
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes()[:size])
    with pytest.raises(InputError, match=r"tokenizer.json.* is damaged") as error:
        Tokenizer.from_dir(tmp_path)
    assert "\n" not in str(error.value)


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    content = json.loads((FOLDER / "tokenizer.json").read_text())
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="not that of umT5"):
        Tokenizer.from_dir(tmp_path)


def test_importing_costs_no_tokenizer_library():
    check = "import sys, rfjax.text; print({'ftfy', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
