"""A rule fires only where one reading is possible: laws of numbers beside any signs, and facts."""

import re
import sys
import unicodedata

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import clean_text, sequence_to_text, text_to_sequence, unknown_characters
from text.numbers import CURRENCIES
from text.symbols import symbols

ENGLISH, PHONES = ["english_cleaners"], ["english_phones"]
SIGNS = [
    character
    for character in map(chr, range(sys.maxunicode + 1))
    if unicodedata.category(character)[0] in "PSZ" and character not in "{}"
]
# Half of the signs are those that have rules, or that Unidecode writes as others.
A_SIGN = st.sampled_from(SIGNS) | st.sampled_from([*SIGNS[:70], *"–—−～％￥‰‚’⁄․·①½³"])
A_NUMBER = st.integers(0, 99) | st.integers(100, 9999)
# What signs themselves are read as.
READINGS = {
    "plus", "minus", "or", "times", "divided", "by", "equals", "percent", "per", "mille", "and",
    "at", "number", "section", "degree", "degrees", "c", "f",
    "celsius", "fahrenheit", "cent", "cents", "point", "to",
    *(word for names in CURRENCIES.values() for word in names),
}  # fmt: skip
ONE_NUMBER = ",/⁄∕\u2009\u202f½³①"  # 1,000 and 1/2 are one number; ½ is one itself
LAW = hypothesis.settings(max_examples=1000)


def read(text: str) -> str:
    return sequence_to_text(text_to_sequence(text, ENGLISH))


def words_of(text: str) -> list[str]:
    return re.findall("[a-z]+", read(text))


def by_value_or_digits(number: int) -> list[list[str]]:
    return [words_of(str(number)), words_of(" ".join(str(number)))]


@LAW
@given(A_NUMBER, A_NUMBER, st.lists(A_SIGN, min_size=1, max_size=2), st.sampled_from("abcd"))
def test_signs_make_no_other_number_of_two(first, second, signs, place):
    sign = "".join(signs)
    hypothesis.assume(not {*ONE_NUMBER} & {*sign})
    hypothesis.assume(sign[-1] != "." or sign[0] not in CURRENCIES)  # $.5 is fifty cents
    places = {"a": f"{sign}{first} {second}", "b": f"{first}{sign}{second}"}
    text = (places | {"c": f"{first} {second}{sign}", "d": f"{first} {sign} {second}"})[place]
    words = [word for word in words_of(text) if word not in READINGS]
    assert words in [a + b for a in by_value_or_digits(first) for b in by_value_or_digits(second)]


@LAW
@given(st.characters(min_codepoint=128, categories=["L", "Nl", "No", "Cc"]))
def test_a_letter_or_numeral_separates_numbers_even_if_it_is_not_read(character):
    """Marks belong to the digit before them, and format characters are invisible."""
    hypothesis.assume(character not in "Ｓｓｇ")  # with a space after them, a plural and grams
    assert words_of(f"5{character}3") == words_of(f"5{character} 3")


@LAW
@given(A_SIGN)
def test_a_sign_between_numbers_is_read_or_is_a_symbol_or_is_noted(sign):
    text = f"20{sign}345"
    is_read = words_of(text) != words_of("20 345")
    is_known = sign in [*symbols, "/"] or read(sign) != ""
    assert is_read or is_known or unknown_characters(text, ENGLISH) == {sign}


@LAW
@given(
    st.sampled_from([*CURRENCIES]), st.integers(1, 999), st.sampled_from("bkmtBKMT"),
    st.sampled_from(["{} {}-shirt", "{} {} shirts", "{}{}-shirt", "{} {}. Smith", "{} {}'s"]),
)  # fmt: skip
def test_money_is_never_multiplied_by_a_letter_of_the_next_word(sign, amount, letter, pattern):
    words = words_of(pattern.format(f"{sign}{amount}", letter))
    money = words_of(f"{sign}{amount}")
    assert words[: len(money) + 1] == [*money, letter.lower()]


@given(st.integers(100, 999), st.integers(1000, 9999), st.sampled_from("-–"))
def test_a_range_is_no_telephone_number(first, second, dash):
    words = words_of(f"{first}{dash}{second} people")
    assert words == [*words_of(str(first)), "to", *words_of(str(second)), "people"]


READ_AS = {
    "1⁄2, 1-1/2, 1–½, 2⅓3": "one half, one and one half, one and one half, two and one third three",
    "५½, 5¹⁄₂, ³⁄₄": "five and one half, five and one half, three quarters",
    "2·3, 5≠3, 5★3, 5*3": "two, three, five, three, five, three, five, three",
    "①② x₁₂ 5‚300 5→3": "one two x one two five,three hundred five, three",
    "5～10, 5~10, 20-3-1": "five to ten, five to ten, twenty, three, one",
    "1990–2000s, 1.5-2.5 mm, 8-10pm": "nineteen ninety to two thousands, "
    "one point five to two point five millimeters, eight to ten pm",
    "$5-$10, $5-10, 5%–10%": "five dollars to ten dollars, five to ten dollars, "
    "five percent to ten percent",
    "500-1000, 2005-06": "five hundred to one thousand, two thousand five, zero six",
    "(555) 123-4567": "five five five, one two three, four five six seven",
    "1-800-555-0199": "one, eight zero zero, five five five, zero one nine nine",
    "50％ ￥500 ＄5 ５：３０": "fifty percent five hundred yen five dollars five thirty",
    "₹500 ₩1 ₽3": "five hundred rupees one won three",
    "5°C-10°C": "five degrees celsius to ten degrees celsius",
    "5‰ 20ºC 9˚F №5": "five per mille twenty degrees celsius nine degrees fahrenheit number five",
    "5 μg, 1 µm, 5 μF": "five micrograms, one micrometer, five micro f",
    "5G, 4K, 5 g": "five g, four k, five grams",
    "$20s and $50s": "twenties and fifties",
    "$1M–$2M": "one million dollars-two million dollars",
    "$5m $5 m $5 bn": "five million dollars five dollars m five billion dollars",
    "World War I was, Chapter IV, Act V": "world war one was, chapter four, act five",
    "Henry VIII's, Part I's": "henry the eighth's, part i's",
    "Dr Smith, St James, Main St": "doctor smith, saint james, main st",
    "Acme™ ©2020": "acme twenty twenty",
    "1945\u202f100 10\u202f000": "nineteen forty-five one hundred ten thousand",
}


@pytest.mark.parametrize("text", READ_AS)
def test_english(text):
    assert read(text) == READ_AS[text]


@pytest.mark.parametrize(
    ("text", "letters", "articles"),
    [
        ("At 5 a.m. or 5am, Plan A, in the U.S.A. now", 4, 0),
        ("A man has a B.A. degree, a plan and a (good) car", 1, 4),
        ("See A. Smith (a), Group A is first", 3, 0),
        ("Once Upon A Time. A4, A-team, 10A", 3, 1),
    ],
)
def test_the_letter_a_and_the_article(text, letters, articles):
    phones = clean_text(text, PHONES)
    assert (phones.count("{EY1}"), phones.count("{AH0}")) == (letters, articles)


def test_only_what_is_not_read_is_noted():
    assert unknown_characters("1⁄2 ￥500 5～10 10⁻³ 20˚C", ENGLISH) == set()
    assert unknown_characters("5★3 ⁄ 5*3 ™ ₽3", ENGLISH) == {*"★⁄*™₽"}
