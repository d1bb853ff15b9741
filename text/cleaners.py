"""Cleaners turn written text into text that the model can read; ``hparams.text_cleaners`` names
those to use.

- ``english_cleaners``: English. Spells out numbers, signs and abbreviations.
- ``transliteration_cleaners``: other languages that Unidecode can write in ASCII.
- ``basic_cleaners``: any other language, with the alphabet that ``hparams.symbols`` gives.

On ordinary English they agree with NVIDIA's, so checkpoints can be exchanged. (One exception:
Mrs. is "missus" here, "misess" there.)
"""

import re
import unicodedata

from unidecode import unidecode

from .numbers import CURRENCIES, expand_numbers

_CURRENCY = "".join(CURRENCIES)
_SIGNS = {  # only signs with a single reading
    "%": "percent",
    "&": "and",
    "+": "plus",
    "=": "equals",
    "@": "at",
    "°": "degrees",
    "¢": "cents",
    "±": "plus or minus",
    "−": "minus",  # U+2212; expand_numbers handles hyphens before numbers
    "÷": "divided by",
}
_SIGN = f"[{''.join(_SIGNS)}]"
_UNSPACED_SIGN = re.compile(rf"(?<=\w)(?={_SIGN})|(?<={_SIGN})(?=[\w{_CURRENCY}]|{_SIGN})")
_TEMPERATURE = re.compile(r"° ?([CF])\b", re.IGNORECASE)
_SINGULAR = re.compile(r"(?<![\w.,])1 ?([°¢])")
# After three or more letters it is a footnote number.
_POWER = re.compile(r"(?<=[\w)])(?<![^\W\d_]{3})⁻?[⁰¹²³⁴-⁹]+(?=(\w?))")
_SLASH = re.compile(r"(?<=\w)/(?=\w)")

_ABBREVIATIONS = {
    "mrs": "missus",
    "mr": "mister",
    "dr": "doctor",
    "st": "saint",
    "co": "company",
    "jr": "junior",
    "maj": "major",
    "gen": "general",
    "drs": "doctors",
    "rev": "reverend",
    "lt": "lieutenant",
    "hon": "honorable",
    "sgt": "sergeant",
    "capt": "captain",
    "esq": "esquire",
    "ltd": "limited",
    "col": "colonel",
    "ft": "fort",
}
_ABBREVIATION = re.compile(rf"\b({'|'.join(_ABBREVIATIONS)})\.", re.IGNORECASE)


def english_cleaners(text: str) -> str:
    """Returns lower-case ASCII, with numbers, amounts of money, signs and abbreviations spelled
    out."""
    text = expand_signs(text)
    text = to_ascii(text, keep=_CURRENCY)  # Unidecode turns £ into PS
    text = expand_numbers(text.lower())
    text = _SLASH.sub(" ", text)  # and/or, 24/7: dropped, the slash would join the words
    return collapse_whitespace(expand_abbreviations(text))


def transliteration_cleaners(text: str) -> str:
    """Returns lower-case ASCII, as Unidecode transliterates it."""
    return collapse_whitespace(to_ascii(text).lower())


def basic_cleaners(text: str) -> str:
    """Returns lower-case text."""
    return collapse_whitespace(text.lower())


CLEANERS = {
    cleaner.__name__: cleaner
    for cleaner in (english_cleaners, transliteration_cleaners, basic_cleaners)
}


def to_ascii(text: str, keep: str = "") -> str:
    """Transliterates to ASCII, except characters in ``keep``; drops what has no equivalent."""
    text = text.encode(errors="ignore").decode()  # drops lone surrogates: Unidecode warns
    return re.sub(rf"[^\x00-\x7f{keep}]+", lambda match: unidecode(match[0]), text)


def expand_signs(text: str) -> str:
    """Spells out signs such as %, ° and ², with spaces around them."""
    text = _POWER.sub(_power, text)
    text = _TEMPERATURE.sub(lambda match: "° celsius" if match[1] in "cC" else "° fahrenheit", text)
    text = _SINGULAR.sub(lambda match: f"1 {_SIGNS[match[1]].removesuffix('s')}", text)
    return _UNSPACED_SIGN.sub(" ", text).translate(str.maketrans(_SIGNS))


def _power(match: re.Match) -> str:
    exponent = unicodedata.normalize("NFKC", match[0])
    words = {"2": "squared", "3": "cubed"}.get(exponent, f"to the {exponent}")
    return f" {words} " if match[1] else f" {words}"


def expand_abbreviations(text: str) -> str:
    """Spells out abbreviations such as ``Dr.``; their full stop is required."""
    return _ABBREVIATION.sub(lambda match: _ABBREVIATIONS[match[1].lower()], text)


def collapse_whitespace(text: str) -> str:
    """Replaces each run of whitespace by one space."""
    return re.sub(r"\s+", " ", text)
