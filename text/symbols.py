"""The 148 symbols that the model reads, in NVIDIA Tacotron 2's order; the id is the index.

Every checkpoint depends on the order (row ``i`` of the embedding is symbol ``i``), and NVIDIA's
weights load here because of it. Do not sort the list; add new symbols only at the end. A language
with other letters has an alphabet of its own.
"""

import string
import unicodedata

PAD = "_"  # id 0 fills up batches; never read from text
ARPABET_MARK = "@"  # tells the phone @B from the letter B

PHONES = (  # CMUdict's
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K "
    "L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
)

# Vowels may carry a stress: 0 none, 1 primary, 2 secondary.
arpabet = [p + s for p in PHONES.split() for s in (("", *"012") if p[0] in "AEIOU" else ("",))]

symbols = [PAD, "-", *"!'(),.:;? ", *string.ascii_uppercase, *string.ascii_lowercase]
symbols += [ARPABET_MARK + phone for phone in arpabet]


def alphabet(characters: str = "") -> list[str]:
    """The symbols by id: padding and ``characters``, or those above if there are none."""
    return [PAD, *characters] if characters else symbols


def check_alphabet(characters: str) -> None:
    """Raise ValueError unless each of ``characters`` can be a symbol."""
    twice = "is there twice; keep one"
    if not unicodedata.is_normalized("NFC", characters):
        twice += ", and write letters with their accents as one character (NFC)"
    for i, character in enumerate(characters):
        composed = unicodedata.normalize("NFC", character)
        invisible = not character.isprintable() and unicodedata.category(character) != "Cf"
        for refused, problem in (
            (character in characters[:i], twice),
            (character == PAD, "is the padding, which every alphabet has; leave it out"),
            (character in "{}", "encloses ARPAbet in texts; leave it out"),
            (invisible, "is a control character or the like; leave it out"),
            (composed != character, f"is {composed!r} in texts, by NFC; use that"),
        ):
            if refused:
                raise ValueError(f"{character!r} (U+{ord(character):04X}) {problem}")
