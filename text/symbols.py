"""The 148 symbols that the model reads, in NVIDIA Tacotron 2's order; the id is the index.

Every checkpoint depends on the order (row ``i`` of the embedding is symbol ``i``), and NVIDIA's
weights load here because of it. Do not sort the list; add new symbols only at the end.
"""

import string

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
