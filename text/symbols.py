"""The 148 symbols the model reads, in NVIDIA Tacotron 2's order: a symbol's id is its place.

The order is part of every checkpoint (row ``i`` of the embedding is symbol ``i``), so weights
trained with NVIDIA's alphabet can be loaded here. Do not sort it, and add only at the end.
"""

import string

PAD = "_"  # id 0, what the loader fills a batch with; never read from a text
ARPABET_MARK = "@"  # tells the phone @B from the letter B

PHONES = (  # CMUdict's
    "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K "
    "L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
)

# Vowels also come with a stress: none 0, primary 1, secondary 2.
arpabet = [p + s for p in PHONES.split() for s in (("", *"012") if p[0] in "AEIOU" else ("",))]

symbols = [PAD, "-", *"!'(),.:;? ", *string.ascii_uppercase, *string.ascii_lowercase]
symbols += [ARPABET_MARK + phone for phone in arpabet]
