"""Prompts to token ids, as the release does it: cleaned text through the umT5 SentencePiece model (tokenizer.json).

`ftfy` and `tokenizers` are imported where they are used: together they take longer to load than the rest of rfjax.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from rfjax.errors import InputError

if TYPE_CHECKING:
    import tokenizers

PAD_ID = 0
EOS_ID = 1  # "</s>"
UNKNOWN = "<unk>"


def clean_prompt(text: str) -> str:
    """The text the model was trained to read: mojibake and HTML escapes undone, runs of white space made one space.

    Also straightens curly quotes and narrows full-width letters (both are ftfy's defaults).

    Raises:
        InputError: `text` is not a string.
    """
    import ftfy

    if not isinstance(text, str):
        raise InputError(f"a prompt must be a string, not {type(text).__name__} ({text!r:.60})")
    # Twice: prompts scraped from web pages are often escaped twice ("&amp;amp;").
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of a batch of prompts.

    Attributes:
        ids: int32, padded on the right with `PAD_ID`.
        lengths: int32, tokens of each prompt, `</s>` included.
        dropped: tokens cut off the end of each prompt to make it fit; 0 where it fitted.
        unknown: the words of each prompt that the vocabulary has not, as they are written there. umT5's, which spells
            other words in pieces and bytes, has hardly any.
    """

    ids: Int[np.ndarray, "B S"]
    lengths: Int[np.ndarray, "B"]
    dropped: tuple[int, ...]
    unknown: tuple[tuple[str, ...], ...]


class Tokenizer:
    """The umT5 tokenizer of a checkpoint."""

    def __init__(self, encoder: "tokenizers.Tokenizer", directory: Path):
        self.directory = directory  # where its files stand
        encoder.no_padding()
        encoder.no_truncation()
        self._encoder = encoder

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` in the directory `path` (google/umt5-xxl in the release).

        Raises:
            InputError: the file is missing, unreadable, or not a T5 tokenizer.
        """
        import tokenizers

        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"no tokenizer.json in {str(path)!r}; give the directory google/umt5-xxl of the release")
        try:
            encoder = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{str(file)!r} is damaged ({error}); download it again") from None
        ids = {token: encoder.token_to_id(token) for token in ("<pad>", "</s>")}
        if ids != {"<pad>": PAD_ID, "</s>": EOS_ID} or encoder.encode("").ids != [EOS_ID]:
            raise InputError(
                f"{str(file)!r} is not that of umT5: <pad> must be {PAD_ID}, and </s> {EOS_ID} at the end of a prompt"
            )
        return cls(encoder, Path(path))

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the encoder's embedding must have at least so many rows."""
        return self._encoder.get_vocab_size(with_added_tokens=True)

    @property
    def words(self) -> list[str]:
        """The vocabulary without special tokens, in the order of the ids."""
        special = self._encoder.get_added_tokens_decoder()
        ids = self._encoder.get_vocab(with_added_tokens=True)
        return sorted((word for word, i in ids.items() if i not in special), key=ids.__getitem__)

    def __call__(self, prompts: Sequence[str], text_len: int) -> TokenizedText:
        """Cleans and tokenizes; a prompt of more than `text_len` tokens loses its end but keeps its `</s>`.

        The name of a special token in a prompt ("<extra_id_0>") becomes that token, as in the release.

        Raises:
            InputError: `prompts` is not a list of strings, or is empty; `text_len` is not a positive integer.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise InputError(f"prompts must be a list of one string or more, not {prompts!r:.60}")
        if not isinstance(text_len, int) or text_len < 1:
            raise InputError(f"text_len must be a positive integer, not {text_len!r}")
        ids = np.full((len(prompts), text_len), PAD_ID, np.int32)
        lengths = np.empty(len(prompts), np.int32)
        dropped, unknown = [], []
        unknown_id = self._encoder.token_to_id(UNKNOWN)
        for row, prompt in enumerate(prompts):
            text = clean_prompt(prompt)
            encoding = self._encoder.encode(text)
            tokens = encoding.ids
            spans = (span for i, span in zip(tokens, encoding.offsets, strict=True) if i == unknown_id)
            unknown.append(tuple(_whole_word(text, *span) for span in spans))
            dropped.append(max(len(tokens) - text_len, 0))
            if dropped[-1]:
                tokens = [*tokens[: text_len - 1], EOS_ID]
            lengths[row] = len(tokens)
            ids[row, : len(tokens)] = tokens
        return TokenizedText(ids, lengths, tuple(dropped), tuple(unknown))


def _whole_word(text: str, start: int, end: int) -> str:
    """A span of a text, with the rest of the words that it begins or ends inside of."""
    while text[start - 1 : start].isalnum() and text[start : start + 1].isalnum():
        start -= 1
    while text[end - 1 : end].isalnum() and text[end : end + 1].isalnum():
        end += 1
    return text[start:end]
