"""Text to symbol ids and back.

    ids = text_to_sequence("She plays the {B EY1 S} drum.", ["english_cleaners"])

Text in braces is ARPAbet (CMUdict's phones, separated by spaces) and skips the cleaners.
The package stands alone: it needs only Unidecode and inflect.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from .cleaners import CLEANERS
from .symbols import ARPABET_MARK, PAD, PHONES, arpabet, symbols

__all__ = ["clean_text", "sequence_to_text", "symbols", "text_to_sequence", "unknown_characters"]

_id_of = {symbol: i for i, symbol in enumerate(symbols)}
_readable = {symbol for symbol in symbols if len(symbol) == 1} - {PAD}

# Empty braces are ordinary (and unknown) characters.
_BRACES = re.compile(r"\{\s*([^{}\s][^{}]*)\}")


def text_to_sequence(text: str, cleaners: Sequence[str]) -> list[int]:
    """Symbol ids of the cleaned ``text``. Characters without a symbol are dropped silently;
    :func:`unknown_characters` lists them.

    Raises:
        ValueError: an unknown cleaner, an unknown phone in braces, or an unbalanced brace.
    """
    sequence = []
    for characters, phones in _pieces(text):
        sequence += [_id_of[c] for c in _clean(characters, cleaners) if c in _readable]
        sequence += [_id_of[ARPABET_MARK + phone] for phone in phones]
    return sequence


def sequence_to_text(sequence: Iterable[int]) -> str:
    """``sequence`` as text: phones in braces, padding as ``_``.

    Raises:
        ValueError: a number that is not a symbol id.
    """
    text = ""
    for i in sequence:
        if not 0 <= i < len(symbols):
            raise ValueError(f"{i} is not a symbol id; use 0 to {len(symbols) - 1}")
        symbol = symbols[i]
        text += f"{{{symbol[1:]}}}" if symbol.startswith(ARPABET_MARK) else symbol
    return text.replace("}{", " ")


def clean_text(text: str, cleaners: Sequence[str]) -> str:
    """``text`` after the named cleaners, in order; ARPAbet is kept as written.

    Raises:
        ValueError: an unknown cleaner, an unknown phone in braces, or an unbalanced brace.
    """
    cleaned = ""
    for characters, phones in _pieces(text):
        cleaned += _clean(characters, cleaners)
        cleaned += f"{{{' '.join(phones)}}}" if phones else ""
    return cleaned


def unknown_characters(text: str, cleaners: Sequence[str]) -> set[str]:
    """Characters of ``text`` that :func:`text_to_sequence` drops, as written in ``text``: those
    without a symbol after cleaning, and those that a cleaner removes.

    Accents and invisible formatting do not count: removing them loses no sound.

    Raises:
        ValueError: an unknown cleaner, an unknown phone in braces, or an unbalanced brace.
    """
    unknown = set()
    for characters, _ in _pieces(text):
        left_out = set(_clean(characters, cleaners)) - _readable
        for character in set(characters) - _readable:
            alone = _clean(character, cleaners)
            silent = not alone and unicodedata.category(character) not in ("Mn", "Me", "Cf")
            if silent or not left_out.isdisjoint(alone):
                unknown.add(character)
    return unknown


def _clean(text: str, cleaners: Sequence[str]) -> str:
    for name in cleaners:
        if name not in CLEANERS:
            raise ValueError(f"unknown text cleaner {name!r}; use one of {', '.join(CLEANERS)}")
        text = CLEANERS[name](text)
    return text


def _pieces(text: str) -> list[tuple[str, list[str]]]:
    """Split ``text`` into pairs of characters and the phones in braces after them."""
    paired = re.sub(r"\{[^{}]*\}", lambda match: " " * len(match[0]), text)
    if stray := re.search("[{}]", paired):
        i = stray.start()
        what, fix = ("closed", "add }") if stray[0] == "{" else ("opened", "add {")
        raise ValueError(
            f"{text[i : i + 20]!r} at character {i + 1} of the text: this brace is never {what}; "
            f"{fix}, or leave it out"
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
