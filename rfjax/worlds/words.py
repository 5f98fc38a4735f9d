"""The words of the shapes world as a tokenizer: one token a word."""

from pathlib import Path

from rfjax.text.tokenizer import EOS_ID, PAD_ID, UNKNOWN
from rfjax.worlds.shapes import COLOURS, DIRECTIONS, SHAPES, SPEEDS

# In the order of their ids, which trained weights are bound to.
SPECIAL = {"<pad>": PAD_ID, "</s>": EOS_ID, UNKNOWN: 2}
WORDS = ("a", "and", "on", "background", "still", "moving", *COLOURS, *SHAPES, *DIRECTIONS, *filter(None, SPEEDS))

PROMPT_HINT = (
    "a prompt reads: a COLOUR SHAPE MOTION [and a COLOUR SHAPE MOTION] [on a COLOUR background], "
    "MOTION being moving right, left, up or down [slowly or fast], or still"
)


def build_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` into a folder: the special tokens, then `WORDS`.

    Case does not matter, commas and full stops do not count, and every prompt ends with `</s>`.
    """
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    vocabulary = SPECIAL | {word: i for i, word in enumerate(WORDS, len(SPECIAL))}
    encoder = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    encoder.add_special_tokens(list(SPECIAL))
    encoder.normalizer = normalizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [normalizers.Lowercase(), normalizers.Replace(tokenizers.Regex("[,.]"), " ")]
    )
    encoder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    encoder.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="$A </s>", special_tokens=[("</s>", EOS_ID)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save(str(folder / "tokenizer.json"))
