"""How the front end reads text, and what holds for any string and any number.

A rule fires only where one reading is possible.
"""

import functools
import re
import sys
import unicodedata

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import (
    clean_text,
    sequence_to_text,
    text_to_sequence,
    training_cleaners,
    unknown_characters,
)
from text.cleaners import CLEANERS, unknown_words
from text.numbers import CURRENCIES
from text.symbols import check_alphabet, symbols

ENGLISH = ["english_cleaners"]
PHONES = ["english_phones"]
ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
# Random Unicode seldom makes a number; these characters often do.
ANY_TEXT = st.text(ANY_CHARACTER) | st.text("0123459,.-/ $£€¥%°#{}'stndrh_kmbH²½٣\n")


def test_ids_are_nvidias():
    assert len(symbols) == len(set(symbols)) == 148
    assert symbols[:12] == list("_-!'(),.:;? ")
    assert text_to_sequence("Hi, Ed.", ENGLISH) == [45, 46, 6, 11, 42, 41, 7]
    assert text_to_sequence("{AA AA0 AA2 AE B CH ZH}", []) == [64, 65, 67, 68, 88, 89, 147]


@pytest.mark.parametrize(
    ("cleaner", "alphabet", "text", "read", "unknown"),
    [
        ("english", "", "Mr. Müller  has\n5 Cats\t", "mister muller has five cats ", ""),
        ("transliteration", "", "Mr. Müller  has\n5", "mr. muller has ", "5"),
        ("basic", "", "Mr. Müller  has\n5", "mr. mller has ", "5ü"),
        ("english", "", "Say {B  IY1},  5", "say {B IY1}, five", ""),  # cleaners leave phones alone
        ("english", "", "{B}{IY1}\nb { }", "{B IY1} b  ", "{}"),  # nothing inside: no phones
        ("english", "", '"Hi" [sic] a_b', "hi sic a b", '"[]_'),  # no text can hold padding
        ("english", "", "“Hi” 😀", "hi ", "“”😀"),  # as in the text, not as Unidecode writes them
        ("english", "", "na\u00efve na\u0308ive a\u200bb", "naive naive a b", ""),
        ("english", "", "\0 \ud800 £5", " five pounds", "\0\ud800"),
        ("english", "", "1⁄2 5～10 5˚C ™ £", "one half five to ten five degrees celsius ", "£™"),
        ("basic", " aeloruü", "A\u0308 U\u0308ber!", " üer", "Äb!"),  # combining diaereses
        ("basic", " ẹ\u0301a", "Ẹ\u0301 e\u0323\u0301", "ẹ\u0301 ẹ\u0301", ""),  # none in NFC
        ("basic", "ασ", "ΑΣ Σα", "ασα", "ς "),  # Σ is ς at the end of a word
        ("basic", " aiısş", "ISI İşi", "ısı işi", ""),  # Turkish
        ("basic", " ais", "ISI \u0301a\u00ads\u200b", "isi as", ""),  # invisible, or a lone accent
    ],
)
def test_the_model_reads_symbols_and_reports_the_rest(cleaner, alphabet, text, read, unknown):
    cleaners = [f"{cleaner}_cleaners"]
    ids = text_to_sequence(text, cleaners, alphabet)
    assert sequence_to_text(ids, alphabet) == read
    assert unknown_characters(text, cleaners, alphabet) == set(unknown)
    if alphabet:
        assert ids == [1 + alphabet.index(character) for character in read]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Dr. No: 'hi'! é", "{D AA1 K T ER0} {N OW1}: '{HH AY1}'! {IY1}"),
        ("a live {L IH1 V} zyx 2", "{AH0} {L AY1 V} {L IH1 V} zyx {T UW1}"),
        ("o'clock, fox's hydras'", "{AH0 K L AA1 K}, {F AA1 K S AH0 Z} {HH AY1 D R AH0 Z}'"),
        ("tiptoe's butcheries", "{T IH1 P T OW2 Z} {B UH1 CH ER0 IY0 Z}"),
        ("trumpet's gulches", "{T R AH1 M P AH0 T S} {G AH1 L CH IH0 Z}"),
        ("A zyx (a) U.S.A. Zyx: a", "{AH0} zyx ({EY1}) {Y UW1}.{EH1 S}.{EY1}. zyx: {AH0}"),
        ("Zyx A, 5am, A4", "zyx {EY1}, {F AY1 V} {EY1}.{EH1 M}, {EY1} {F AO1 R}"),
        ("Zyx US, ID", "zyx {Y UW1} {EH1 S}, {AY1} {D IY1}"),
        ("Zyx AM, IT, AI", "zyx {AE1 M}, {IH1 T}, {EY1} {AY1}"),
        ("TO US ZYX", "{T UW1} {AH1 S} zyx"),
    ],
)
def test_words_become_phones(text, read):
    assert clean_text(text, PHONES) == read
    assert [*unknown_words(re.sub("{.*}", "", text))] == re.findall("zyx", read)


def test_a_tenth_of_the_words_stay_letters_in_training():
    texts = [f"the cat ate {n} fish and drank milk" for n in range(500)]
    in_training = training_cleaners(PHONES)
    once, again, all_phones = (
        [clean_text(text, cleaners) for text in texts]
        for cleaners in (in_training, in_training, PHONES)
    )
    assert once == again
    n_phones, n_words = ("".join(read).count("{") for read in (once, all_phones))
    assert 0.08 < 1 - n_phones / n_words < 0.12
    assert training_cleaners(ENGLISH) == ENGLISH


@hypothesis.settings(max_examples=200)
@given(ANY_TEXT)
def test_phones_are_of_the_same_words(text):
    hypothesis.assume(not re.search("[A-Z]{2}", text))  # US is "u s"
    try:
        ids = text_to_sequence(text, PHONES)
    except ValueError:
        return
    read = sequence_to_text(ids)
    words = re.split(r" (?![A-Z][^{]*\})", clean_text(text, ENGLISH))
    assert len(re.split(r" (?![^{]*\})", read)) == len(words)
    letters = text_to_sequence(text, ENGLISH)
    for kind in ("!(),.:;?", "-"):
        assert [i for i in ids if symbols[i] in kind] == [i for i in letters if symbols[i] in kind]


@given(st.lists(st.integers(1, len(symbols) - 1)))
def test_ids_become_text_and_again_the_same_ids(ids):
    assert text_to_sequence(sequence_to_text(ids), []) == ids
    assert sequence_to_text([*ids, 0, 0]) == sequence_to_text(ids) + "__"


@hypothesis.settings(max_examples=200)
@given(ANY_TEXT | st.text("ΑΣασςéÉe\u0301İiI ab"))
@pytest.mark.parametrize("cleaner", ["english", "transliteration", "basic"])
@pytest.mark.parametrize("alphabet", ["", "ασé ", "i\u0307b", "AB"])
def test_any_string_has_ids_or_a_reason_and_nothing_is_left_out_unreported(cleaner, alphabet, text):
    cleaners = [f"{cleaner}_cleaners"]
    try:
        ids = text_to_sequence(text, cleaners, alphabet)
    except ValueError as error:
        assert re.search("is not an ARPAbet phone|this brace is never|hold ARPAbet", str(error))
        assert len(str(error).splitlines()) == 1
        return
    assert all(1 <= i <= len(alphabet or symbols[1:]) for i in ids)
    if not {*"{}"} & {*text} and not unknown_characters(text, cleaners, alphabet):
        assert sequence_to_text(ids, alphabet) == clean_text(text, cleaners, alphabet)


@pytest.mark.parametrize("characters", ["aoa\u0308o\u0308", "a_", "a{", "a\t", "\u212b", "\u00ad"])
def test_some_characters_cannot_be_symbols(characters):
    with pytest.raises(ValueError, match=r"^'.*' \(U\+"):
        check_alphabet(characters)


@hypothesis.settings(max_examples=1000)
@given(ANY_TEXT | st.text("0123.,-:/ IVXivx'smkb") | st.text("aeiıİI\u0307\u0301\u00ad \u200b"))
@pytest.mark.parametrize("name", ["english", "transliteration", "basic"])
def test_cleaning_again_changes_nothing_and_no_cleaner_makes_an_unknown_character(name, text):
    cleaner = CLEANERS[f"{name}_cleaners"]
    once = cleaner(text)
    assert cleaner(once) == once
    if name != "basic":
        assert {*once} - {*symbols} - {*"0123456789"} <= {*text.lower()}


READ_AS = {
    "Mrs. Fox, ST. PAUL, Lt. Col. Roe": "missus fox, saint paul, lieutenant colonel roe",
    "Dr Smith, Main St, Mr Fox at cost. First.": "doctor smith, main st, mr fox at cost. first.",
    "Elm St. in Ft. Worth, 5 Rose Dr.": "elm st. in fort worth, five rose dr.",
    "at x.co.uk (e.g. Mr. and Co.), Fox and Co.": (
        "at x.co.uk (for example mister and company), fox and company."
    ),
    "café — “naïve”… Москва": "cafe -- naive... moskva",
    # Numbers
    "007; 0; 101; 3001": "zero zero seven; zero; one hundred one; three thousand one",
    "1,00,000; 10\u00a0000": "one hundred thousand; ten thousand",
    "1" * 16: " ".join(["one"] * 16),
    "mp3, ٣ x₂ ①②": "mp three, three x two one two",
    "1st 22nd 3rd 11th 1,000th": "first twenty-second third eleventh one thousandth",
    "3.05 .5 end.5 10,000.5": "three point zero five point five end.five ten thousand point five",
    "v1.10.2.": "v one point ten point two.",
    "3-3/16 9/4 1/2/2020": "three and three sixteenths nine four one two twenty twenty",
    "½, 2⅓3, 1,2,3": "one half, two and one third three, one,two,three",
    "५½, 5¹⁄₂, ³⁄₄": "five and one half, five and one half, three quarters",
    "-5 (-3) −2": "minus five (minus three) minus two",
    "No. 5, no. No.": "number five, no. no.",
    "1-800-555-0199": "one, eight zero zero, five five five, zero one nine nine",
    "Call 555-0123.": "call five five five, zero one two three.",
    # Years, dates and times
    "1900 1905 2009 2010": "nineteen hundred nineteen oh five two thousand nine twenty ten",
    "1,001 nights; 1,500": "one thousand one nights; fifteen hundred",  # a comma: no year
    "1980s, the 1900s, 66s": "nineteen eighties, the nineteen hundreds, sixty-sixes",
    "2021-03-04, Jan 3rd": "march fourth, twenty twenty-one, january third",
    "12:00, 13:00, 2:30, 2:05.": "twelve o'clock, thirteen hundred, two thirty, two oh five.",
    "5:00 p.m., 5.30-6pm, 6:15 AM": "five p.m., five thirty to six pm, six fifteen am",
    "Ps. 119:105 1:30:45": "ps. one hundred nineteen one hundred five one thirty forty-five",
    "Henry VIII's, Charles I, Part XLI": "henry the eighth's, charles the first, part forty-one",
    "Robert I. Bouck; he met Charles I.": "robert i. bouck; he met charles the first.",
    "Henry I knew, Act V, World War I": "henry i knew, act five, world war one",  # a pronoun
    # Ranges, and what is none
    "1914-18, May 21,1999": "nineteen fourteen to eighteen, may twenty-one,nineteen ninety-nine",
    "3-4, 5 -3, —5, 20-3-1": "three to four, five -three, --five, twenty, three, one",
    "500-1000, 2005-06": "five hundred to one thousand, two thousand five, zero six",
    "50-50, 7-8th, 18-34-year": "fifty fifty, seven to eighth, eighteen to thirty-four-year",
    "1.5-2.5 mm, 8-10pm": "one point five to two point five millimeters, eight to ten pm",
    "$5-10, 5%–10%": "five to ten dollars, five percent to ten percent",
    # Money and units
    "$0 $1 $.01 $0.50": "zero dollars one dollar one cent fifty cents",
    "$1.5; $1.234": "one dollar, fifty cents; one point two three four dollars",
    "US$5bn $5 million $5 m": "us five billion dollars five million dollars five dollars m",
    "-$5 for £2500!": "minus five dollars for twenty-five hundred pounds!",
    "$½, £2½, $3/4": "one half of a dollar, two and one half pounds, three quarters of a dollar",
    "£0.01, €5, 5 €, ¥500": "one penny, five euros, five euros, five hundred yen",
    "$20s, $20 T-shirt, £5k-run": "twenties, twenty dollars t-shirt, five thousand pounds-run",
    "$5-$10, $1.5–$2 bn": "five to ten dollars, one point five to two billion dollars",
    "$1.25-$1.50": "one dollar, twenty-five cents to one dollar, fifty cents",
    "a $5 toy, an 8 g dog, a 5° arc": "a five dollar toy, an eight gram dog, a five degree arc",
    "$1205, 1205 g": "one thousand, two hundred five dollars, one thousand, two hundred five grams",
    "¥1.5, ₹5 crore": "one point five yen, five crore rupees",
    "5km, 1 kg, 30 mph": "five kilometers, one kilogram, thirty miles per hour",
    "1 lb. of it, 6-ft. Roe, 9.5s": "one pound of it, six feet. roe, nine point five s",
    "5 μg, 5 μF, 5G, 5 g": "five micrograms, five micro f, five g, five grams",
    "and/or, 6 ft. tall": "and or, six feet tall",
    # Signs
    "5% 5 %, joe@site.com #5": "five percent five percent, joe at site.com number five",
    "p=.05, x=-5, C# 8": "p equals point zero five, x equals minus five, c# eight",
    "AT&T, C++ 2+2=4": "at and t, c plus plus two plus two equals four",
    "20°C 1° 9˚F 2º": "twenty degrees celsius one degree nine degrees fahrenheit two degrees",
    "5°C-10°C": "five degrees celsius to ten degrees celsius",
    "50¢ ±5 § 5, №5": "fifty cents plus or minus five section five, number five",
    "50％ ￥500 ５：３０": "fifty percent five hundred yen five thirty",
    "2³ x²y (a+b)² 2¹⁰": "two cubed x squared y (a plus b) squared two to the ten",
    "the history² of it": "the history two of it",  # a note
}


@pytest.mark.parametrize("text", READ_AS)
def test_english_is_written_out_as_it_is_spoken(text):
    assert clean_text(text, ENGLISH) == READ_AS[text]


# Numbers beside any signs

SIGNS = [
    character
    for character in map(chr, range(sys.maxunicode + 1))
    if unicodedata.category(character)[0] in "PSZ" and character not in "{}"
]
# Half of the signs are those that have rules, or that Unidecode writes as others.
A_SIGN = st.sampled_from(SIGNS) | st.sampled_from([*SIGNS[:70], *"–—−～％￥‰‚’⁄․·€₹"])
A_NUMBER = st.integers(0, 99) | st.integers(100, 9999)
# What signs themselves are read as.
READINGS = {
    "plus", "minus", "or", "times", "divided", "by", "equals", "percent", "per", "mille", "and",
    "at", "number", "section", "degree", "degrees", "c", "f", "celsius", "fahrenheit",
    "point", "to", *(word for names in CURRENCIES.values() for word in names),
}  # fmt: skip
ONE_NUMBER = ",/⁄∕\u00a0\u2007\u2009\u202f"  # 1,000 and 1/2 are one number


def words_of(text: str) -> list[str]:
    return re.findall("[a-z]+", clean_text(text, ENGLISH))


@functools.cache
def by_value_or_digits(number: int) -> str:
    """Returns a pattern of what the number alone is read as: a year, a quantity or digits."""
    ways = (str(number), f"{number:,}", " ".join(str(number)))
    return f"({'|'.join(' '.join(words_of(way)) for way in ways)})"


def check_numbers(first: int, second: int, sign: str) -> None:
    """Asserts that a sign before, between or after two numbers makes no other number of them."""
    places = "{2}{0} {1}; {0}{2}{1}; {0} {1}{2}; {0} {2} {1}"
    words = words_of(places.format(first, second, sign))
    numbers = " ".join(word for word in words if word not in READINGS)
    both = f"{by_value_or_digits(first)} {by_value_or_digits(second)}"
    assert re.fullmatch(" ".join([both] * 4), numbers), words


def test_every_sign_makes_no_other_number_and_is_read_or_is_a_symbol_or_is_noted():
    for sign in SIGNS:
        if sign not in ONE_NUMBER:
            check_numbers(20, 345, sign)
        is_noted = unknown_characters(f"5{sign}6", ENGLISH) == {sign}
        is_read = words_of(f"5{sign}6") != ["five", "six"] or text_to_sequence(sign, ENGLISH)
        assert is_noted or is_read or sign in [*symbols, "/"], sign


@hypothesis.settings(max_examples=500)
@given(A_NUMBER, A_NUMBER, st.lists(A_SIGN, min_size=1, max_size=2))
def test_signs_make_no_other_number_of_two(first, second, signs):
    hypothesis.assume(not {*ONE_NUMBER} & {*signs})
    hypothesis.assume(signs[-1] != "." or signs[0] not in CURRENCIES)  # $.5 is fifty cents
    check_numbers(first, second, "".join(signs))


@hypothesis.settings(max_examples=500)
@given(st.characters(min_codepoint=128, categories=["L", "Nl", "No", "Cc"]))
def test_a_letter_or_numeral_separates_numbers_even_if_it_is_not_read(character):
    """Marks belong to the digit before them, and format characters are invisible."""
    hypothesis.assume(character not in "Ｓｓｇ")  # with a space after them, a plural and grams
    assert words_of(f"5{character}3") == words_of(f"5{character} 3")
