"""The 148 symbols that the model reads, in NVIDIA Tacotron 2's order; the id is the index.

Every checkpoint depends on the order (row ``i`` of the embedding is symbol ``i``), and NVIDIA's
weights load here because of it. Do not sort the list; add new symbols only at the end. A language
with other letters has an alphabet of its own.
"""

import string
import unicodedata

PAD = "_"  # id 0 fills up batches; never read from text
JOINERS = "\u200c\u200d"  # invisible, but spelling in Persian and Indic scripts needs them
ARPABET_MARK = "@"  # tells the phone @B from the letter B

PHONES = (  # CMUdict's
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K "
    "L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
)

# Vowels may carry a stress: 0 none, 1 primary, 2 secondary.
arpabet = []
for phone in PHONES.split():
    stresses = ("", *"012") if phone[0] in "AEIOU" else ("",)
    arpabet += [phone + stress for stress in stresses]

symbols = [PAD, "-", *"!'(),.:;? ", *string.ascii_uppercase, *string.ascii_lowercase]
symbols += [ARPABET_MARK + phone for phone in arpabet]


def alphabet(characters: str = "") -> list[str]:
    """Returns the symbols by id: the padding and ``characters``, or English's if there are none."""
    return [PAD, *characters] if characters else symbols


def check_alphabet(characters: str) -> None:
    """Raises ValueError unless each of ``characters`` can be a symbol."""
    for i, character in enumerate(characters):
        problem = ""
        composed = unicodedata.normalize("NFC", character)
        if character in characters[:i]:
            problem = "is there twice; keep one, and write accented letters as one character (NFC)"
        elif character == PAD:
            problem = "is the padding, which every alphabet has; leave it out"
        elif character in "{}":
            problem = "encloses ARPAbet in texts; leave it out"
        elif not character.isprintable() and character not in JOINERS:
            problem = "is invisible; leave it out"
        elif composed != character:
            problem = f"is {composed!r} in texts, by NFC; use that"
        if problem:
            raise ValueError(f"{character!r} (U+{ord(character):04X}) {problem}")
