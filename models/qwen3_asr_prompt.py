"""Qwen3-ASR's prompt, and how its answer is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transcribe.errors import ModelError
from transcribe.text.languages import language_code, language_name

if TYPE_CHECKING:
    from transcribe.text.tokenizer import Tokenizer
    from transcribe.weights import Checkpoint

LANGUAGES = (
    "zh", "en", "yue", "ar", "de", "fr", "es", "pt", "id", "it", "ko", "ru", "th", "vi", "ja",
    "tr", "hi", "ms", "nl", "sv", "da", "fi", "pl", "cs", "fil", "fa", "el", "ro", "hu", "mk",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """The tokens on both sides of the audio."""

    before: list[int]
    after: list[int]


class Prompts:
    """What is said to the language model, and how its answer is read.

    The system turn holds the context, the user's turn the audio. The answer is "language {Name}<asr_text>{text}"; a
    language is forced by writing the first part for the model.
    """

    def __init__(self, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
        self.tokenizer = tokenizer
        self.turn, self.end, self.audio, self.audio_end, self.text = (
            _special(tokenizer, checkpoint, token)
            for token in ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<asr_text>")
        )
        stops = (self.end, tokenizer.eos_token_id, tokenizer.token_id("<|endoftext|>"))
        self.stop = frozenset(token for token in stops if token is not None)
        self._made: dict[tuple[str | None, str | None], Prompt] = {}

    def make(self, context: str | None, language: str | None) -> Prompt:
        """The prompt for a context in any words and the code of a language, or None for the model's choice."""
        if (context, language) not in self._made:
            header = f"language {language_name(language)}" if language else ""
            texts = ("system\n" + (context or ""), "\n", "user\n", "assistant\n" + header)
            system, newline, user, assistant = self.tokenizer.encode_all(texts)
            before = [self.turn, *system, self.end, *newline, self.turn, *user, self.audio]
            after = [self.audio_end, self.end, *newline, self.turn, *assistant]
            self._made = {(context, language): Prompt(before, [*after, self.text] if language else after)}
        return self._made[context, language]

    def read(self, tokens: list[int]) -> tuple[str, str | None]:
        """Text, and the code of the language if the model names one it should know, from an answer."""
        decode = self.tokenizer.decode
        if self.text in tokens:
            at = tokens.index(self.text)
            header, text = decode(tokens[:at]).strip(), decode(tokens[at + 1 :])
            named = re.fullmatch(r"language\s*(.*)", header, re.DOTALL)
            if named is None:  # not a header: nothing that may be speech is dropped
                return f"{header} {text.strip()}".strip(), None
        else:
            text = decode(tokens)
            named = re.match(rf"\s*language(?:\s+({_NAMES}|None)\b|(?:\s+\w*)?\s*$)", text)
            text = text[named.end() :] if named else text
        return text.strip(), _detected(named[1] or "") if named else None


_NAMES = "|".join(map(language_name, LANGUAGES))


def _detected(names: str) -> str | None:
    """The code of the first of the languages named, if it is one of ours."""
    code = language_code(re.split(r"[,\s]", names.strip())[0])
    return code if code in LANGUAGES else None


def _special(tokenizer: Tokenizer, checkpoint: Checkpoint, token: str) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise ModelError(f"{checkpoint.path}: its tokenizer has no {token}; is it Qwen3-ASR's, and complete?")
    return found
