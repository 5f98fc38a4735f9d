"""Configurations of training: what ships reads, and every mistake is told in one line that names the key."""

import numpy as np
import pytest

from rfjax.errors import InputError
from rfjax.train import latents
from rfjax.train.config import read_config, shipped_configs


@pytest.mark.parametrize("name", shipped_configs())
def test_those_that_come_with_rfjax_read(name):
    config = read_config(name)
    assert config.name == name
    assert config.stages == ("vae", "encode", "text", "first", "dit", "decoder", "export")


def test_what_a_file_says(tiny_toml):
    config = read_config(str(tiny_toml))
    assert config.name == "tiny"
    assert config.model.dit.dim == 16
    assert config.model.use.width == 64 and "COLOUR" in config.model.use.prompt_hint
    assert config.vae.phases[0].chunk_frames == 4
    assert config.rollout.own == (1.0, 1.0)
    assert config.fresh == ("dit", "text")
    assert config.export.dtype == "float16"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("videos = 5", "video = 5", r"unknown key encode\.video; did you mean videos\?"),
        ("[samples]", "[sample]", r"unknown key sample; did you mean samples\?"),
        ("dim = 16\n", "dimension = 16\n", "model config section 'dit' has unknown fields"),
        ("[model.text]", "[model.txt]", r"unknown key model\.txt; did you mean text\?"),
        ("chunks = 0,", "chunk = 0,", r"unknown key vae\.phases\.chunk; did you mean"),
        ("chunks = 0,", "", r"vae\.phases\.chunks is missing"),
        ("blocks = 4", "", r"encode\.blocks is missing"),
        ("steps = 4", "steps = 0", r"dit\.steps is 0; int above 0 is needed"),
        ("steps = 4", "steps = 4.0", r"dit\.steps is 4\.0; int above 0"),
        ("steps = 4", "steps = true", r"dit\.steps is True; int"),
        ("own = [1, 1]", "own = 1", r"rollout\.own is 1; a list of 2 numbers is needed"),
        ("own = [1, 1]", "own = [1]", r"rollout\.own is \[1\]; a list of 2 numbers"),
        ("own = [1, 1]", "own = [0.5, 2]", r"rollout\.own must be shares from 0 to 1"),
        ("own = [1, 1]", "own = [-0.5, 1]", r"rollout\.own is -0\.5; float of 0 or more"),
        ("lanes = 1", "average = 1.0", r"rollout\.average must be below 1"),
        ("size = 16", "size = 18", r"vae\.phases: size must be a multiple of 4"),
        ("chunk_frames = 4", "chunk_frames = 6", r"vae\.phases: chunk_frames must be a multiple of 4"),
        ("phases = [{ end = 4", "phases = [{end=9,batch=1,size=8,chunks=0},{ end = 4", "end must grow from phase"),
        ("phases = [{", "x = [{", r"unknown key vae\.x"),
        ("frames = 9", 'frames = "9"', r"samples\.frames is '9'; int above 0"),
        ("a red circle still", "a red circle", "does not read: a COLOUR SHAPE MOTION"),
        ("a red circle still", "a black circle still", "cannot be seen on a black background"),
        ('world = "shapes"', 'world = "cubes"', "no world 'cubes'; there is shapes"),
        ('world = "shapes"', 'world = "shapes"\nlatents = "x"', "needs either world, or both latents and checkpoint"),
        ('world = "shapes"', 'latents = "x"', "needs either world, or both latents and checkpoint"),
        ('world = "shapes"', 'latents = "x"\ncheckpoint = "nowhere"', "model.vae: the VAE is that of data.checkpoint"),
        ('[data]\nworld = "shapes"', "", r"section \[data\] is missing"),
        ("temporal_downsample = [true, true]", "temporal_downsample = [true, false]", "4 blocks are 23 frames to the"),
        ("in_dim = 4", "in_dim = 8", "the DiT works on 8 latent channels, the VAE on 4"),
        ("num_heads = 2", "num_heads = 3", "dim 16 does not split into 3 heads"),
        ("dim_ffn = 8", "dim_ffn = 8\nvocab_size = 9", r"model\.text\.vocab_size is found out"),
        ("[encode]\nvideos = 5\nblocks = 4\nfirst_blocks = 3", "", r"\[vae\] and \[encode\] go together"),
        ("[vae]", "[[vae]]", "vae is .*; a table is needed"),
        ("[vae]", "[vae", "changed.toml: Expected"),
    ],
)
def test_a_mistake_is_told_in_one_line(old, new, message, write_toml):
    with pytest.raises(InputError, match=message) as told:
        read_config(str(write_toml(old, new)))
    assert "changed.toml" in str(told.value) and "\n" not in str(told.value)


def test_an_unknown_name_is_told_with_those_that_there_are():
    with pytest.raises(InputError, match=r"no configuration 'shapes'; rfjax has shapes-tiny, or give a \.toml file"):
        read_config("shapes")


def test_a_storage_that_there_is_not(write_toml):
    with pytest.raises(InputError, match="export.dtype is 'int8'; 'float32' or 'float16' or 'bfloat16' is needed"):
        read_config(str(write_toml(new='\n[export]\ndtype = "int8"\n')))


LATENTS = """
[data]
latents = "data"
checkpoint = "{checkpoint}"
{model}
[dit]
steps = 2
batch = 2
lanes = 1
[samples]
prompts = ["a red circle still"]
frames = 9
"""


@pytest.fixture
def write_latents_toml(tmp_path, monkeypatch, word_checkpoint):
    """`write(model="")`: a configuration that goes on from a checkpoint, in a folder to work in."""
    monkeypatch.chdir(tmp_path)

    def write(model=""):
        (tmp_path / "more.toml").write_text(LATENTS.format(checkpoint=word_checkpoint, model=model))
        return read_config("more.toml")

    return write


def test_data_on_disk_take_their_model_from_a_checkpoint(write_latents_toml):
    config = write_latents_toml()
    assert config.stages == ("dit", "export")
    assert config.fresh == ()
    assert config.model.vae.dim == 4


def test_a_part_can_be_made_afresh(write_latents_toml):
    sizes = "dim = 16\nffn_dim = 16\nnum_heads = 2\nnum_layers = 1\ntext_dim = 16\ntext_len = 16"
    config = write_latents_toml(f"[model.dit]\n{sizes}")
    assert config.fresh == ("dit",)
    assert config.model.dit.dim == 16 and config.model.text.dim == 16


@pytest.mark.parametrize(
    "shape, prompts, message",
    [
        ((12, 16, 8, 8), 2, "12 latent frames with 2 prompts; the model takes a prompt for each block of 3"),
        ((12, 4, 8, 8), 4, "latents of 4 channels and 8x8; the model takes 16 channels"),
        ((12, 16, 8, 7), 4, "sides that are multiples of 2"),
    ],
)
def test_data_that_do_not_fit_the_model_are_told(shape, prompts, message, write_latents_toml, tmp_path):
    from rfjax.train.run import Run

    texts = ["a red circle still"] * prompts
    video = latents.Video(np.zeros(shape, np.float16), texts, np.zeros((1, 2), int))
    latents.write(tmp_path / "data", iter([video]), 1)
    with pytest.raises(InputError, match=message):
        Run(write_latents_toml(), tmp_path / "run")("dit")


def test_prompts_that_are_too_long_are_told(write_latents_toml, tmp_path):
    from rfjax.train.run import Run

    video = latents.Video(np.zeros((12, 16, 8, 8), np.float16), ["a " * 20] * 4, np.zeros((1, 2), int))
    latents.write(tmp_path / "data", iter([video]), 1)
    with pytest.raises(InputError, match="have up to 21 tokens, dit.text_len is 16"):
        Run(write_latents_toml(), tmp_path / "run")("dit")
