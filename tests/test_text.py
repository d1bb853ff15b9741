"""How the front end reads text, and what holds for any string."""

import re

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
    written_words,
)
from text.cleaners import CLEANERS, unknown_words
from text.symbols import check_alphabet, symbols

ENGLISH = ["english_cleaners"]
PHONES = ["english_phones"]
ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
# Random Unicode seldom makes a number; these characters often do.
ANY_TEXT = st.text(ANY_CHARACTER) | st.text("0123459,.-/ $£€¥%°#{}'stndrh_kmbH²½٣\n")


def test_ids_are_nvidias():
    assert len(symbols) == len(set(symbols)) == 148
    assert symbols[:12] == list("_-!'(),.:;? ")
    ids = [12, 37, 38, 63, 64, 65, 67, 68, 88, 89, 147]
    expected = ["A", "Z", "a", "z", "@AA", "@AA0", "@AA2", "@AE", "@B", "@CH", "@ZH"]
    assert [symbols[i] for i in ids] == expected
    assert text_to_sequence("Hi, Ed.", ENGLISH) == [45, 46, 6, 11, 42, 41, 7]


TWO_LINES = "Mr. Müller  has\n5 Cats\t"


@pytest.mark.parametrize(
    ("cleaner", "alphabet", "text", "read", "unknown"),
    [
        ("english", "", TWO_LINES, "mister muller has five cats ", ""),
        ("transliteration", "", TWO_LINES, "mr. muller has  cats ", "5"),
        ("basic", "", TWO_LINES, "mr. mller has  cats ", "5ü"),
        ("english", "", "", "", ""),
        ("english", "", "{HH AH0 L OW1}", "{HH AH0 L OW1}", ""),
        ("english", "", "Say {B  IY1},  5", "say {B IY1}, five", ""),  # cleaners leave phones alone
        ("english", "", "one\n{B}\ntwo", "one {B} two", ""),
        ("english", "", "{B}{IY1}", "{B IY1}", ""),
        ("english", "", "a {} b { }", "a  b  ", "{}"),  # nothing inside: unknown characters
        ("english", "", '"Hi" [sic] a_b', "hi sic a b", '"[]_'),  # no text can hold padding
        ("english", "", "'yes' - (no)? $5; 5%!", "'yes' - (no)? five dollars; five percent!", ""),
        ("english", "", "“Hi”", "hi", "“”"),  # as in the text, not as Unidecode writes them
        ("english", "", "☃ and 😀", " and ", "☃😀"),  # Unidecode has nothing for them
        (
            "english",
            "",
            "na\u00efve na\u0308ive a\u200bb",
            "naive naive a b",
            "",
        ),  # no sound is lost
        ("english", "", "\0 \ud800", " ", "\0\ud800"),
        ("english", "", "£ $ £5", "  five pounds", "£$"),
        ("basic", " abgioruüß!", "ÜBRIG   groß,\naß!", "übrig groß aß!", ","),
        ("basic", " aeloruü", "A\u0308 U\u0308ber", " üer", "Äb"),  # combining diaereses
        (
            "basic",
            " ẹ\u0301a",
            "Ẹ\u0301 e\u0323\u0301",
            "ẹ\u0301 ẹ\u0301",
            "",
        ),  # none in NFC
        ("basic", " абвё", "А Бе\u0308 Ё г_{}", "а бё ё ", "г_{}"),
        ("basic", "ασ", "ΑΣ Σα", "ασα", "ς "),  # Σ is ς at the end of a word
        ("basic", "aB@5", "aAbB@5", "aa@5", "b"),  # cleaned texts have no B, and @ is no phone
        ("basic", "नमस्ते", "नमस्ते", "नमस्ते", ""),
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
    ("text", "read", "unknown"),
    [
        ("Dr. No: 'hi'!", "{D AA1 K T ER0} {N OW1}: '{HH AY1}'!", []),
        ("a live {L IH1 V} zyx 2", "{AH0} {L AY1 V} {L IH1 V} zyx {T UW1}", ["zyx"]),
        ("o'clock, don't", "{AH0 K L AA1 K}, {D OW1 N T}", []),  # in the dictionary
        ("fox's gulch's hydras'", "{F AA1 K S AH0 Z} {G AH1 L CH IH0 Z} {HH AY1 D R AH0 Z}'", []),
        ("gulches butcheries", "{G AH1 L CH IH0 Z} {B UH1 CH ER0 IY0 Z}", []),
        ("tiptoe's trumpet's", "{T IH1 P T OW2 Z} {T R AH1 M P AH0 T S}", []),
        ("｛hi｝ é [", "{HH AY1} {IY1} ", []),
    ],
)
def test_words_become_phones(text, read, unknown):
    assert sequence_to_text(text_to_sequence(text, PHONES)) == read
    assert [*unknown_words(re.sub("{.*}", "", text))] == unknown
    assert unknown_characters(text, PHONES) == unknown_characters(text, ENGLISH)


def test_a_tenth_of_the_words_stay_letters_in_training():
    texts = [f"the cat ate {n} fish and drank milk" for n in range(500)]
    in_training = training_cleaners(PHONES)
    once, again, all_phones = (
        [text_to_sequence(text, cleaners) for text in texts]
        for cleaners in (in_training, in_training, PHONES)
    )
    assert once == again
    n_phones, n_words = (
        sum(sequence_to_text(ids).count("{") for ids in read) for read in (once, all_phones)
    )
    assert 0.08 < 1 - n_phones / n_words < 0.12
    assert training_cleaners(ENGLISH) == ENGLISH


@hypothesis.settings(max_examples=200)
@given(ANY_TEXT)
def test_phones_are_of_the_same_words(text):
    try:
        ids = text_to_sequence(text, PHONES)
    except ValueError:
        return
    read = sequence_to_text(ids)
    assert len(re.split(r" (?![^{]*\})", read)) == len(written_words(text, PHONES))
    letters = text_to_sequence(text, ENGLISH)
    for kind in ("!(),.:;?", "-"):
        assert [i for i in ids if symbols[i] in kind] == [i for i in letters if symbols[i] in kind]


@given(st.lists(st.integers(1, len(symbols) - 1)))
def test_ids_become_text_and_again_the_same_ids(ids):
    assert text_to_sequence(sequence_to_text(ids), []) == ids
    assert sequence_to_text([*ids, 0, 0]) == sequence_to_text(ids) + "__"
    assert sequence_to_text([2, 0], "ab") == "b_"


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


READ_AS = {
    "Dr. Smith paid $3.50.": "doctor smith paid three dollars, fifty cents.",
    "on the 21st of May, 1999.": "on the twenty-first of may, nineteen ninety-nine.",
    "Mrs. Fox, ST. PAUL, Lt. Col. and Ft.": "missus fox, saint paul, lieutenant colonel and fort",
    "Mr Fox at cost. First, best.": "mr fox at cost. first, best.",  # no abbreviations
    "café — “naïve”… Москва": "cafe -- naive... moskva",
    "007; 0; 24; 101; 1000": "zero zero seven; zero; twenty-four; one hundred one; one thousand",
    "124,000; 1,00,000": "one hundred twenty-four thousand; one hundred thousand",
    "1,2,3": "one,two,three",
    "1,001 nights; 1,500": "one thousand one nights; fifteen hundred",  # a comma: no year
    "1" * 16: " ".join(["one"] * 16),
    "mp3, ٣ x₂": "mp three, three x two",
    "5km, 1 kg, 30 mph": "five kilometers, one kilogram, thirty miles per hour",
    "1900 1905 2000": "nineteen hundred nineteen oh five two thousand",
    "2009 2010 3001": "two thousand nine twenty ten three thousand one",
    "1980s, the 1900s, 66s": "nineteen eighties, the nineteen hundreds, sixty-sixes",
    "1914-18, May 21,1999": "nineteen fourteen to eighteen, may twenty-one,nineteen ninety-nine",
    "2021-03-04, Jan 3rd": "march fourth, twenty twenty-one, january third",
    "1st 22nd 3rd 11th 1,000th": "first twenty-second third eleventh one thousandth",
    "3.14 3.05 .5 end.5": "three point one four three point zero five point five end.five",
    "3.142 10,000.5": "three point one four two ten thousand point five",
    "1/2 3½ 1/2/2020": "one half three and one half one two twenty twenty",
    "⅛, 3/16, 9/4": "one eighth, three sixteenths, nine four",
    "1.5.2, v1.10.2.": "one point five point two, v one point ten point two.",
    "12:00, 08:00, 12:30, 12:05.": "twelve o'clock, eight o'clock, twelve thirty, twelve oh five.",
    "5:00 p.m., 5:00pm, 6:15 AM": "five p.m., five pm, six fifteen am",
    "13:00 0:00 23:59": "thirteen hundred zero hundred twenty-three fifty-nine",
    "Ps. 119:105 1:30:45": "ps. one hundred nineteen one hundred five one thirty forty-five",
    "-5 (-3) −2": "minus five (minus three) minus two",
    "3-4, 5 -3, —5": "three to four, five -three, --five",
    "Call 555-0123.": "call five five five, zero one two three.",
    "No. 5, no. No.": "number five, no. no.",
    "Smith vs. Jones, e.g. at Elm Ave.": "smith versus jones, for example at elm avenue",
    "5.00 a.m., 10\u202f000, § 5, 5 × 4": "five a.m., ten thousand, section five, five times four",
    "Henry VIII, Charles I, Louis XVI": "henry the eighth, charles the first, louis the sixteenth",
    "Robert I. Bouck; he met Charles I.": "robert i. bouck; he met charles the first.",
    "Henry I knew, World War II": "henry i knew, world war two",  # the first is a pronoun
    "$0 $1 $.01 $0.50": "zero dollars one dollar one cent fifty cents",
    "$1.5; $1.234": "one dollar, fifty cents; one point two three four dollars",
    "$135.99; $5.00.": "one hundred thirty-five dollars, ninety-nine cents; five dollars.",
    "$1.5 million US$5bn $3.5B": "one point five million dollars us five billion dollars "
    "three point five billion dollars",
    "-$5 for £2500!": "minus five dollars for twenty-five hundred pounds!",
    "£12.50 £0.01": "twelve pounds, fifty pence one penny",
    "€5, 5 €, ¥500": "five euros, five euros, five hundred yen",
    "5% 5 %, joe@site.com #5": "five percent five percent, joe at site.com number five",
    "AT&T, C++ 2+2=4": "at and t, c plus plus two plus two equals four",
    "20°C 1° 1 °F": "twenty degrees celsius one degree one degree fahrenheit",
    "50¢ ±5 6÷2": "fifty cents plus or minus five six divided by two",
    "5² 2³, x²y (a+b)²": "five squared two cubed, x squared y (a plus b) squared",
    "10⁶ 10⁻³ 2¹⁰": "ten to the six ten to the minus three two to the ten",
    "the history² of it": "the history two of it",  # a note
    "and/or vs./or 24/7 6 ft. tall": "and or versus or twenty-four seven six feet tall",
}


@hypothesis.settings(max_examples=1000)
@given(ANY_TEXT | st.text("0123.,-:/ IVXivx'smkb") | st.text("aeiıİI\u0307\u0301\u00ad \u200b"))
@pytest.mark.parametrize("name", ["english", "transliteration", "basic"])
def test_cleaning_again_changes_nothing_and_no_cleaner_makes_an_unknown_character(name, text):
    cleaner = CLEANERS[f"{name}_cleaners"]
    once = cleaner(text)
    assert cleaner(once) == once
    if name != "basic":
        assert {*once} - {*symbols} - {*"0123456789"} <= {*text.lower()}


@pytest.mark.parametrize("text", READ_AS)
def test_english_is_written_out_as_it_is_spoken(text):
    assert clean_text(text, ENGLISH) == READ_AS[text]
