"""Every layout of names that is found in the wild becomes the release's."""

import json

import pytest
from diffusers_names import RENAMES, transformers_text

from rfjax.errors import InputError
from rfjax.weights.names import identify, image_to_video, release_names

PREFIXES = ["", "model.", "model.diffusion_model.", "module.", "model._fsdp_wrapped_module.", "_orig_mod.model."]


@pytest.fixture(scope="module")
def full(golden) -> dict[str, list[str]]:
    lists = {"dit": "keys_full_dit.json", "vae": "keys_full_vae.json", "text": "keys_full_t5.json"}
    names = {part: list(json.loads((golden / file).read_text())["keys"]) for part, file in lists.items()}
    names["dit"] = [name.removeprefix("model.") for name in names["dit"]]
    return names


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("part", ["dit", "vae", "text"])
def test_wrapper_prefixes(full, part, prefix):
    assert list(release_names(prefix + name for name in full[part]).values()) == full[part]


def test_wrappers_inside_names():
    name = "model._fsdp_wrapped_module.blocks.7._fsdp_wrapped_module._checkpoint_wrapped_module.ffn.0.weight"
    assert release_names([name]) == {name: "blocks.7.ffn.0.weight"}


@pytest.mark.parametrize("part", RENAMES)
def test_diffusers_and_transformers_names(full, part):
    theirs = [RENAMES[part](name) for name in full[part]]
    assert len(set(theirs)) == len(theirs) and theirs != full[part]
    ours = release_names(theirs)
    assert [ours[name] for name in theirs] == full[part]
    assert identify(ours.values()) == part


def test_second_copy_of_the_token_embedding(full):
    theirs = [transformers_text(name) for name in full["text"]]
    tied = "encoder.embed_tokens.weight"
    assert set(release_names([*theirs, tied]).values()) == set(full["text"])
    alone = [tied if name == "shared.weight" else name for name in theirs]
    assert release_names(alone)[tied] == "token_embedding.weight"


def test_one_tensor_under_two_names():
    with pytest.raises(InputError, match="holds blocks.0.ffn.0.bias twice"):
        release_names(["model.blocks.0.ffn.0.bias", "blocks.0.ffn.0.bias"])


def test_image_to_video_models_are_known():
    assert image_to_video({"img_emb.proj.0.weight": 0}) and not image_to_video({"head.head.weight": 0})
