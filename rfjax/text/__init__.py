"""Text: the umT5 tokenizer and encoder."""

from rfjax.text.model import UMT5Encoder
from rfjax.text.tokenizer import TokenizedText, Tokenizer, clean_prompt

__all__ = ["TokenizedText", "Tokenizer", "UMT5Encoder", "clean_prompt"]
