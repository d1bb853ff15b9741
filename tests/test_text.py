"""What the front end reads, as facts; and what holds for any string at all."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import clean_text, sequence_to_text, symbols, text_to_sequence, unknown_characters

ENGLISH = ["english_cleaners"]
ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
# Random Unicode seldom makes a number; these characters often do.
ANY_TEXT = st.text(ANY_CHARACTER) | st.text("0123459,.-/ $£€¥%°#{}'stndrh_kmbH²½٣\n")


def english(text):
    return clean_text(text, ENGLISH)


# --- symbols


def test_148_different_symbols():
    assert len(symbols) == len(set(symbols)) == 148


@pytest.mark.parametrize(
    ("i", "symbol"),
    [
        (0, "_"), (1, "-"), (2, "!"), (3, "'"), (4, "("), (5, ")"), (6, ","), (7, "."), (8, ":"),
        (9, ";"), (10, "?"), (11, " "), (12, "A"), (37, "Z"), (38, "a"), (63, "z"), (64, "@AA"),
        (65, "@AA0"), (67, "@AA2"), (68, "@AE"), (88, "@B"), (89, "@CH"), (147, "@ZH"),
    ],
)  # fmt: skip
def test_ids_are_nvidias(i, symbol):
    assert symbols[i] == symbol


# --- sequences


def test_a_sequence():
    assert text_to_sequence("Hi, Ed.", ENGLISH) == [45, 46, 6, 11, 42, 41, 7]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", ""),
        ("{HH AH0 L OW1}", "{HH AH0 L OW1}"),
        ("Say {B  IY1},  5 times", "say {B IY1}, five times"),  # cleaners leave phones alone
        ("in{T UW1}it", "in{T UW1}it"),
        ("one\n{B}\ntwo", "one {B} two"),
        ("{B}{IY1}", "{B IY1}"),
        ("a {} b { }", "a  b  "),  # nothing inside: unknown characters
        ("pad_ding", "padding"),  # no text can hold padding
        ('"Hi" [sic]', "hi sic"),
    ],
)
def test_ids_read_back(text, read):
    assert sequence_to_text(text_to_sequence(text, ENGLISH)) == read


@given(st.lists(st.integers(1, len(symbols) - 1)))
def test_round_trip(ids):
    assert text_to_sequence(sequence_to_text(ids), []) == ids


def test_padding_is_shown():
    assert sequence_to_text([45, 46, 0, 0]) == "hi__"


@given(ANY_TEXT)
@pytest.mark.parametrize("cleaner", ["english", "transliteration", "basic"])
def test_any_string_has_ids(cleaner, text):
    try:
        ids = text_to_sequence(text, [f"{cleaner}_cleaners"])
    except ValueError as error:
        assert re.search("is no ARPAbet phone|this brace is never", str(error))
        assert len(str(error).splitlines()) == 1
    else:
        assert all(1 <= i < len(symbols) for i in ids)


@pytest.mark.parametrize("phone", ["QQ", "AA3", "B1", "hh", "@B", "AH0,"])
def test_a_bad_phone_is_named(phone):
    with pytest.raises(
        ValueError, match=rf"^'{phone}' in braces is no ARPAbet phone; .* AA AE .* ZH$"
    ):
        text_to_sequence(f"a {{HH {phone}}}", ENGLISH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "'{' at character 1 of the text: this brace is never closed; add }, or leave it out"),
        ("Say {HH AY1", "'{HH AY1' at character 5 of the text: this brace is never closed; add }"),
        ("{HH AY1} to {B\nthe end of it all", r"'{B\nthe end of it all' at character 13 "),
        ("{a {B}", "'{a {B}' at character 1 "),
        ("{B}} ", "'} ' at character 4 of the text: this brace is never opened; add {, or leave"),
    ],
)
def test_a_brace_without_its_pair_is_named(text, message):
    for function in (text_to_sequence, clean_text, unknown_characters):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            function(text, ENGLISH)


def test_a_bad_cleaner_is_named():
    known = "english_cleaners, transliteration_cleaners, basic_cleaners"
    with pytest.raises(
        ValueError, match=f"^text cleaner 'klingon' is unknown; use one of {known}$"
    ):
        text_to_sequence("", ["klingon"])


@pytest.mark.parametrize("i", [-1, 148])
def test_a_bad_id_is_named(i):
    with pytest.raises(ValueError, match=f"^id {i} is no symbol's; use 0 to 147$"):
        sequence_to_text([5, i])


# --- unknown characters


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("All is well: 'yes' - (no)? $5; 50%!", ""),
        ('"Hi" [sic] a_b', '"[]_'),
        ("“Hi”", "“”"),  # as they stand in the text, not as Unidecode writes them
        ("☃ and 😀", "☃😀"),  # Unidecode has nothing for them
        ("{HH AY1} { }", "{}"),
        ("na\u00efve na\u0308ive zero\u200bwidth", ""),  # no sound is lost
        ("\0 \ud800", "\0\ud800"),
        ("£ $ £5", "£$"),
    ],
)
def test_unknown_characters(text, unknown):
    assert unknown_characters(text, ENGLISH) == set(unknown)


def test_unknown_characters_depend_on_the_cleaner():
    assert unknown_characters("Été 5", ["transliteration_cleaners"]) == {"5"}
    assert unknown_characters("Été 5", ["basic_cleaners"]) == {"É", "é", "5"}


@given(st.text(ANY_CHARACTER.filter(lambda c: c not in "{}")))
def test_nothing_is_left_out_unreported(text):
    if not unknown_characters(text, ENGLISH):
        ids = text_to_sequence(text, ENGLISH)
        assert sequence_to_text(ids) == english(text)


# --- cleaners


@pytest.mark.parametrize(
    ("cleaner", "cleaned"),
    [
        ("english_cleaners", "mister muller has five cats "),
        ("transliteration_cleaners", "mr. muller has 5 cats "),
        ("basic_cleaners", "mr. müller has 5 cats "),
    ],
)
def test_cleaners(cleaner, cleaned):
    assert clean_text("Mr. Müller  has\n5 Cats\t", [cleaner]) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (
            "Dr. Smith paid $3.50 on the 21st of May, 1999.",
            "doctor smith paid three dollars, fifty cents on the twenty-first of may, "
            "nineteen ninety-nine.",
        ),
        ("Mrs. Jones, Lt. Col. Fox", "missus jones, lieutenant colonel fox"),
        ("ST. PAUL and Ft. Worth", "saint paul and fort worth"),
        ("Mr Fox at cost. First, best.", "mr fox at cost. first, best."),  # no abbreviations
        ("café — “naïve”…", 'cafe -- "naive"...'),
        ("Москва", "moskva"),
    ],
)
def test_words(text, cleaned):
    assert english(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("0", "zero"),
        ("24", "twenty-four"),
        ("101", "one hundred one"),
        ("1000", "one thousand"),
        ("124,000", "one hundred twenty-four thousand"),
        ("1,00,000", "one hundred thousand"),
        ("1,2,3", "one,two,three"),
        ("May 21,1999", "may twenty-one,nineteen ninety-nine"),
        ("1,001 nights", "one thousand one nights"),  # a comma: no year
        ("1,500", "fifteen hundred"),
        ("007", "zero zero seven"),
        ("1" * 16, " ".join(["one"] * 16)),
        ("mp3, 5km", "mp three, five km"),
        ("٣ x₂", "three x two"),
        # years
        ("1900", "nineteen hundred"),
        ("1905", "nineteen oh five"),
        ("2000", "two thousand"),
        ("2009", "two thousand nine"),
        ("2010", "twenty ten"),
        ("3001", "three thousand one"),
        ("1980s", "nineteen eighties"),
        ("the 1900s, 66s", "the nineteen hundreds, sixty-sixes"),
        ("1914-18", "nineteen fourteen-eighteen"),
        # ordinals
        ("1st 22nd 3rd 11th", "first twenty-second third eleventh"),
        ("1,000th", "one thousandth"),
        # decimals and fractions
        ("3.14", "three point fourteen"),
        ("3.05", "three point zero five"),
        ("3.142", "three point one four two"),
        ("10,000.5", "ten thousand point five"),
        (".5 end.5", "point five end.five"),
        ("1/2 3½ 1/2/2020", "one half three and one half one two twenty twenty"),
        ("1.5.2, v1.10.2.", "one point five point two, v one point ten point two."),
        (
            "192.168.0.1",
            "one hundred ninety-two point one hundred sixty-eight point zero point one",
        ),
        # times of day
        ("12:30", "twelve thirty"),
        ("at 12:05.", "at twelve oh five."),
        ("12:00, 08:00", "twelve o'clock, eight o'clock"),
        ("5:00 p.m., 5:00pm, 6:15 AM", "five p.m., five pm, six fifteen am"),
        ("13:00 0:00 23:59", "thirteen hundred zero hundred twenty-three fifty-nine"),
        ("9:30-10:00", "nine thirty-ten o'clock"),
        # other colons between numbers: ratios, scores, verses
        ("3:1 16:9", "three one sixteen nine"),
        (
            "John 3:16-18, Ps. 119:105",
            "john three sixteen-eighteen, ps. one hundred nineteen one hundred five",
        ),
        ("1:50,000 1:30:45", "one fifty thousand one thirty forty-five"),
        ("these: 5: 6", "these: five: six"),
        # negative numbers
        ("-5 (-3) −2", "minus five (minus three) minus two"),
        ("3-4, 5 -3, —5", "three-four, five -three, --five"),
    ],
)
def test_numbers(text, cleaned):
    assert english(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("$0", "zero dollars"),
        ("$1", "one dollar"),
        ("$.01", "one cent"),
        ("$0.50", "fifty cents"),
        ("$1.5", "one dollar, fifty cents"),
        ("$5.00", "five dollars"),
        ("$135.99.", "one hundred thirty-five dollars, ninety-nine cents."),
        ("$1,000", "one thousand dollars"),
        ("$1,999", "one thousand, nine hundred ninety-nine dollars"),
        ("$1.234", "one point two three four dollars"),
        ("$1.5 million", "one point five million dollars"),
        ("US$5bn", "us five billion dollars"),
        ("-$5", "minus five dollars"),
        ("for £2500!", "for twenty-five hundred pounds!"),
        ("£12.50 £0.01", "twelve pounds, fifty pence one penny"),
        ("€5, 5 €, ¥500", "five euros, five euros, five hundred yen"),
    ],
)
def test_money(text, cleaned):
    assert english(text) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("5% 5 %.", "five percent five percent."),
        ("AT&T, C++", "at and t, c plus plus"),
        ("2+2=4", "two plus two equals four"),
        ("joe@site.com", "joe at site.com"),
        ("20°C 1° 1 °F", "twenty degrees celsius one degree one degree fahrenheit"),
        ("50¢ ±5 6÷2", "fifty cents plus or minus five six divided by two"),
        ("#5", "number five"),
        ("5² 2³, x²y (a+b)²", "five squared two cubed, x squared y (a plus b) squared"),
        ("10⁶ 10⁻³ 2¹⁰", "ten to the six ten to the minus three two to the ten"),
        ("the history² of it", "the history two of it"),  # a note
        ("and/or 24/7", "and or twenty-four seven"),
        ("6 ft. tall", "six feet tall"),
    ],
)
def test_signs(text, cleaned):
    assert english(text) == cleaned
