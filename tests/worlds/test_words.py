"""The shapes world's tokenizer, and what is said about words it does not have."""

import numpy as np
import pytest

from rfjax.text import Tokenizer
from rfjax.worlds.shapes import MOTIONS, sample_scene
from rfjax.worlds.words import WORDS, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    build_tokenizer(folder)
    return Tokenizer.from_dir(folder)


def test_every_prompt_of_the_world_is_known_word_by_word(tokenizer):
    rng = np.random.default_rng(0)
    prompts = [sample_scene(rng, 1 + i % 2).prompt() for i in range(200)]
    prompts += [f"a red circle {motion}" for motion in MOTIONS]
    text = tokenizer(prompts, 24)
    assert not any(text.unknown) and not any(text.dropped)
    assert text.lengths.tolist() == [len(prompt.split()) + 1 for prompt in prompts]
    assert {WORDS[i - 3] for i in np.unique(text.ids[text.ids > 2])} == set(WORDS)


def test_the_ids_are_a_promise_to_trained_weights(tokenizer):
    words = "a and on background still moving red green blue yellow cyan magenta white black circle square triangle "
    assert tokenizer.words == list(WORDS) == (words + "right left up down slowly fast").split()
    assert tokenizer.vocab_size == 26
    ids = tokenizer(["a fast dragon"], 6).ids
    np.testing.assert_array_equal(ids, [[3, 25, 2, 1, 0, 0]])


def test_case_commas_and_full_stops_do_not_count(tokenizer):
    plain, written = tokenizer(
        ["a red circle still and a blue square still", "A RED,circle Still , and a blue square still."], 16
    ).ids
    np.testing.assert_array_equal(plain, written)


def test_unknown_words_are_named_as_written(tokenizer):
    text = tokenizer(["a Dragon, swimming with dragons' a dragon.", "a red circle still", "red,dragon <unk>"], 16)
    assert text.unknown == (("Dragon", "swimming", "with", "dragons'", "dragon"), (), ("dragon", "<unk>"))


def test_a_prompt_of_unknown_words_runs_and_gets_one_line(word_pipe, caplog):
    prompts = ["a red dragon", "a dragon swimming", "a red circle right"]
    word_pipe(prompts, num_frames=9, seed=0, output_type="latent")
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        'the prompt has words this model does not know: "dragon", "swimming"; it knows: a, and, on, '
    )
    assert line.endswith(f"; {word_pipe.config.use.prompt_hint}") and "<unk>" not in line and "\n" not in line
    with word_pipe.stream("a red circle still", seed=0) as stream:
        assert len(caplog.records) == 1
        stream.set_prompt("a red fish still")
    assert '"fish"' in caplog.records[1].message


def test_a_large_vocabulary_is_not_listed(pipe, caplog):
    pipe("a 漢字 fox", num_frames=9, height=64, width=96, seed=0, output_type="latent")
    assert [record.message for record in caplog.records] == ['the prompt has words this model does not know: "漢字"']
