"""From written text to text the model can read. Choose by name: ``hparams.text_cleaners``.

- ``english_cleaners``: English. Numbers, signs and abbreviations become words.
- ``transliteration_cleaners``: other languages whose script Unidecode can turn to ASCII.
- ``basic_cleaners``: any other; give ``text/symbols.py`` the letters it needs.

On ordinary English they give what NVIDIA's give, so that checkpoints can be exchanged; but Mrs. is
"missus" here, and "misess" there.
"""

import re
import unicodedata

from unidecode import unidecode

from .numbers import CURRENCIES, expand_numbers

_CURRENCY = "".join(CURRENCIES)
_SIGNS = {  # only those that are read in one way
    "%": "percent",
    "&": "and",
    "+": "plus",
    "=": "equals",
    "@": "at",
    "°": "degrees",
    "¢": "cents",
    "±": "plus or minus",
    "−": "minus",  # U+2212; what a hyphen before a number means is for expand_numbers to say
    "÷": "divided by",
}
_SIGN = f"[{''.join(_SIGNS)}]"
_UNSPACED_SIGN = re.compile(rf"(?<=\w)(?={_SIGN})|(?<={_SIGN})(?=[\w{_CURRENCY}]|{_SIGN})")
_TEMPERATURE = re.compile(r"° ?([CF])\b", re.IGNORECASE)
_SINGULAR = re.compile(r"(?<![\w.,])1 ?([°¢])")
# After three letters or more it is the number of a note.
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
    """Lower-case ASCII, with numbers, sums of money, signs and abbreviations in words."""
    text = expand_signs(text)
    text = to_ascii(text, keep=_CURRENCY)  # Unidecode would spell £ as PS
    text = expand_numbers(text.lower())
    text = _SLASH.sub(" ", text)  # and/or, 24/7: it is no symbol, and the words would join
    return collapse_whitespace(expand_abbreviations(text))


def transliteration_cleaners(text: str) -> str:
    """Lower-case ASCII."""
    return collapse_whitespace(to_ascii(text).lower())


def basic_cleaners(text: str) -> str:
    """Lower case."""
    return collapse_whitespace(text.lower())


CLEANERS = {
    cleaner.__name__: cleaner
    for cleaner in (english_cleaners, transliteration_cleaners, basic_cleaners)
}


def to_ascii(text: str, keep: str = "") -> str:
    """The nearest ASCII for each character but those of ``keep``; nothing where there is none."""
    text = text.encode(errors="ignore").decode()  # lone surrogates, of which Unidecode warns
    return re.sub(rf"[^\x00-\x7f{keep}]+", lambda match: unidecode(match[0]), text)


def expand_signs(text: str) -> str:
    """Signs such as %, ° and ² as words, apart from the words and digits beside them."""
    text = _POWER.sub(_power, text)
    text = _TEMPERATURE.sub(lambda match: "° celsius" if match[1] in "cC" else "° fahrenheit", text)
    text = _SINGULAR.sub(lambda match: f"1 {_SIGNS[match[1]].removesuffix('s')}", text)
    return _UNSPACED_SIGN.sub(" ", text).translate(str.maketrans(_SIGNS))


def _power(match: re.Match) -> str:
    exponent = unicodedata.normalize("NFKC", match[0])
    words = {"2": "squared", "3": "cubed"}.get(exponent, f"to the {exponent}")
    return f" {words} " if match[1] else f" {words}"


def expand_abbreviations(text: str) -> str:
    """``Dr.`` and the like, always with their full stop, as words."""
    return _ABBREVIATION.sub(lambda match: _ABBREVIATIONS[match[1].lower()], text)


def collapse_whitespace(text: str) -> str:
    """One space for each run of any whitespace."""
    return re.sub(r"\s+", " ", text)
