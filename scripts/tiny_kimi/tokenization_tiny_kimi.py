"""A tokenizer that lies beside its vocabulary, as Kimi-K2.5's does: byte pairs ranked in `tiktoken.model`, no tokenizer.json.

In: `tiktoken.model` (lines of base64 token and rank) and the special tokens that tokenizer_config.json numbers. This file is
copied into the target's folder and runs only with trust_remote_code; it imports nothing of this repository.
"""

import base64
import os
from pathlib import Path
from typing import Any

import tiktoken
from transformers import PreTrainedTokenizer

VOCAB_SIZE = 163840
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+",
    )
)


class TinyKimiTokenizer(PreTrainedTokenizer):
    """Token strings are bytes written as Latin-1 characters, so that each has a name and none is lost."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **settings: Any) -> None:
        lines = Path(vocab_file).read_text(encoding="ascii").splitlines()
        pairs = (line.split() for line in lines)
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        self._tokens = {rank: token for token, rank in self._ranks.items()}
        self._encoding = tiktoken.Encoding("tiny-kimi", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens={})
        self._vocab_file = vocab_file
        super().__init__(**settings)

    @property
    def vocab_size(self) -> int:
        """As the model has rows in its embedding; the ranks are sparse below the special tokens."""
        return VOCAB_SIZE

    def get_vocab(self) -> dict[str, int]:
        return {token.decode("latin-1"): rank for token, rank in self._ranks.items()} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self._tokens[rank].decode("latin-1") for rank in self._encoding.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int | None:
        try:
            return self._ranks.get(token.encode("latin-1"), self.unk_token_id)
        except UnicodeEncodeError:
            return self.unk_token_id

    def _convert_id_to_token(self, index: int) -> str | None:
        token = self._tokens.get(index)
        return None if token is None else token.decode("latin-1")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Special tokens stand for themselves; bytes that are no UTF-8 become the replacement character."""
        pieces = (
            token.encode() if token in self.added_tokens_encoder else token.encode("latin-1") for token in tokens if token
        )
        return b"".join(pieces).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copies the ranks."""
        path = Path(save_directory, f"{filename_prefix}-tiktoken.model" if filename_prefix else "tiktoken.model")
        if os.path.abspath(self._vocab_file) != os.path.abspath(path):
            path.write_bytes(Path(self._vocab_file).read_bytes())
        return (str(path),)
