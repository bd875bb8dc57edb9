"""Language codes and their English names: the languages of Whisper, and Filipino, which the families draw from."""

from __future__ import annotations

NAMES = {
    "af": "afrikaans", "am": "amharic", "ar": "arabic", "as": "assamese", "az": "azerbaijani",
    "ba": "bashkir", "be": "belarusian", "bg": "bulgarian", "bn": "bengali", "bo": "tibetan",
    "br": "breton", "bs": "bosnian", "ca": "catalan", "cs": "czech", "cy": "welsh", "da": "danish",
    "de": "german", "el": "greek", "en": "english", "es": "spanish", "et": "estonian", "eu": "basque",
    "fa": "persian", "fi": "finnish", "fil": "filipino", "fo": "faroese", "fr": "french",
    "gl": "galician", "gu": "gujarati", "ha": "hausa", "haw": "hawaiian", "he": "hebrew", "hi": "hindi",
    "hr": "croatian", "ht": "haitian creole", "hu": "hungarian", "hy": "armenian", "id": "indonesian",
    "is": "icelandic",
    "it": "italian", "ja": "japanese", "jw": "javanese", "ka": "georgian", "kk": "kazakh", "km": "khmer",
    "kn": "kannada", "ko": "korean", "la": "latin", "lb": "luxembourgish", "ln": "lingala", "lo": "lao",
    "lt": "lithuanian", "lv": "latvian", "mg": "malagasy", "mi": "maori", "mk": "macedonian",
    "ml": "malayalam", "mn": "mongolian", "mr": "marathi", "ms": "malay", "mt": "maltese", "my": "myanmar",
    "ne": "nepali", "nl": "dutch", "nn": "nynorsk", "no": "norwegian", "oc": "occitan", "pa": "punjabi",
    "pl": "polish", "ps": "pashto", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sa": "sanskrit",
    "sd": "sindhi", "si": "sinhala", "sk": "slovak", "sl": "slovenian", "sn": "shona", "so": "somali",
    "sq": "albanian", "sr": "serbian", "su": "sundanese", "sv": "swedish", "sw": "swahili", "ta": "tamil",
    "te": "telugu", "tg": "tajik", "th": "thai", "tk": "turkmen", "tl": "tagalog", "tr": "turkish",
    "tt": "tatar", "uk": "ukrainian", "ur": "urdu", "uz": "uzbek", "vi": "vietnamese", "yi": "yiddish",
    "yo": "yoruba", "yue": "cantonese", "zh": "chinese",
}
OTHER_NAMES = {
    "burmese": "my", "castilian": "es", "farsi": "fa", "flemish": "nl", "haitian": "ht",
    "jv": "jw", "letzeburgesch": "lb", "mandarin": "zh", "moldavian": "ro", "moldovan": "ro", "nb": "no",
    "panjabi": "pa", "pushto": "ps", "sinhalese": "si", "valencian": "ca",
}
CODES = {name: code for code, name in NAMES.items()} | OTHER_NAMES
UNSPACED = {"bo", "ja", "km", "lo", "my", "th", "yue", "zh"}  # no spaces between words


def language_code(language: str) -> str | None:
    """The code of a language given by code (also "en-GB") or English name, in any case."""
    word = language.strip().casefold().replace("_", "-")
    for name in (word, word.partition("-")[0]):
        if name in NAMES:
            return name
        if name in CODES:
            return CODES[name]
    return None


def language_name(code: str) -> str:
    """The English name, capitalised; the code itself where it has none here."""
    return NAMES[code].title() if code in NAMES else code
