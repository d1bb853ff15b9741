"""Spells out numbers in English: years, money, decimals, ordinals, times of day and so on."""

import functools
import re
from typing import Any

MAX_DIGITS = 15  # longer numbers are read digit by digit
CURRENCIES = {  # sign: unit, units, hundredth, hundredths
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "¥": ("yen", "yen", "", ""),
    "₹": ("rupee", "rupees", "paisa", "paise"),
    "₩": ("won", "won", "", ""),
}
_SCALES = {"k": "thousand", "m": "million", "b": "billion", "t": "trillion"}
_SCALES |= {"bn": "billion", "tn": "trillion"}
_UNITS = {
    "g": "gram", "kg": "kilogram", "mg": "milligram", "lb": "pound", "lbs": "pound", "oz": "ounce",
    "km": "kilometer", "cm": "centimeter", "mm": "millimeter", "ml": "milliliter",
    "micro g": "microgram", "micro m": "micrometer", "micro l": "microliter",
    "hz": "hertz", "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz",
    "mph": "mile per hour", "kph": "kilometer per hour", "km/h": "kilometer per hour",
    "ft": "foot",
}  # fmt: skip
_MONTHS = "january february march april may june july august september october november december"
_ONES = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]
_TENS = ["", "X", "XX", "XXX", "XL", "L", "LX", "LXX", "LXXX", "XC"]
_NUMERALS = [tens + ones for tens in _TENS for ones in _ONES]  # by their numbers
_RULERS = (  # and popes, by the names that have had numerals
    "Albert|Alexander|Benedict|Charles|Edward|Elizabeth|Ferdinand|Francis|Frederick|George|Gregory|"
    "Henry|Ivan|James|John|Leo|Louis|Mary|Napoleon|Nicholas|Paul|Peter|Philip|Pius|Richard|Robert|"
    "Victor|William"
)

# [0-9], not \d, which also matches digits of other scripts. Commas separate groups of three
# digits, or, as in India, of two before the last three. A list such as 1,2,3 is not one number.
_N = r"(?<![0-9])(?:(?<![0-9],)[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)"
_CURRENCY = f"[{''.join(CURRENCIES)}]"  # a currency sign
UNREAD = r"(?:[^\w\s!'(),.:;?/-]|_)"  # a sign that the model does not read

# "Henry I" may be followed by more of a sentence, where I is a pronoun, and "Robert I." by a name.
_ROMAN = re.compile(
    rf"\b(World War|Book|Chapter|Section|Part|Volume|Act|Scene|{_RULERS}) (?![IVX]\. [A-Z])"
    rf"((?![IL]\b)(?:{'|'.join(_NUMERALS[1:])})|I(?=[.,;:)]|$)|(?<=War )I)(?!\w|'(?!s\b))"
)
_BESIDE_LETTER = re.compile(
    r"(?<=[a-z])(?=[0-9])|(?<=[0-9])(?=[a-z])(?!(?:st|nd|rd|th|s)\b)"
    r"|(?<=\.[0-9])(?=s\b)|(?<=\.[0-9]{2})(?=s\b)"  # 9.58 s
)
_BESIDE_SIGN = re.compile(rf"(?<=[^\s(-])(?={_CURRENCY} ?\.?[0-9])|(?<=[0-9]')(?=[0-9])")
_NUMBER_SIGN = re.compile(r"(?:(?<!\w)#|\bno\.) ?(?=[0-9])")
_UNIT = re.compile(  # not 5G, MG or Oz; the full stop of lb. only where it ends no sentence
    rf"(?<![\w.,{_CURRENCY[1:-1]}])([0-9.,]*[0-9])[\s-]?(?!(?-i:G|M[gGmM]|Oz)\b)"
    rf"({'|'.join(_UNITS)})(?![\w/])(?:\.(?-i:(?= [a-z0-9])))?",
    re.IGNORECASE,
)
_MONTH = re.compile(r"\b(jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\b\.?(?= [0-9])")
_DATE = re.compile(r"(?<![\w.-])([0-9]{4})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(?![\w-])")
_DOTTED_CLOCK = re.compile(r"(?<![0-9.])([0-9]{1,2})\.([0-5][0-9])(?=(?:-[0-9.:]+)? ?[ap]\.? ?m\b)")
_TELEPHONE = re.compile(  # with an area code, or a zero that no range has
    r"(?<![\w-])(?:(?:1-)?(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-.]\d{4}|\d{3}-0\d{3})(?![\w-])", re.ASCII
)
_RANGE = re.compile(
    rf"(?<![\w.,-])({_CURRENCY}?)((?!0[0-9]){_N}(?:\.[0-9]+)?)-"
    rf"({_CURRENCY}?)((?!0[0-9]){_N}(?:\.[0-9]+)?)(?!/|[.,-]?[0-9])"
)
# Without a space, as other words may begin with these letters: a "$20 T-shirt".
_SCALE = re.compile(rf"({_CURRENCY} ?{_N}(?:\.[0-9]+)?)([bt]n|[kmbt])(?![\w'])")
_PAUSE = re.compile(rf"(?<=[0-9])(?:-|({UNREAD}+))(?={_CURRENCY}?\.?[0-9])")
_CLOCK = re.compile(  # 12:30, but not 3:1, 12:75 or 1:30:45
    r"(?<![0-9:.,])([01]?[0-9]|2[0-4]):([0-5][0-9])(?![:.,]?[0-9])"
    r"(?=( (?:[ap]\.? ?m\b|o'clock))?)"
)
_VERSION = re.compile(r"(?<![0-9.])[0-9]+(?:\.[0-9]+){2,}")
_FRACTION = re.compile(
    rf"(?<![0-9/.,])({_CURRENCY}?)(?:({_N})[ -])?([0-9]+)/([2-9]|1[026]|32|64)"
    r"(?:(?:rd|th)s?\b)?(?![0-9/])"
)
# A minus has no number before it: 1914-18, 3-4 and "5 -3" keep their hyphen.
_MINUS = re.compile(rf"(?<![^\s(])(?<![0-9]\s)-(?={_CURRENCY}?\.?[0-9])")
_SIGN_LAST = re.compile(rf"({_N}(?:\.[0-9]+)?) ?({_CURRENCY})(?![a-z]| ?[.,]?[0-9])")
_MONEY = re.compile(
    rf"({_CURRENCY}) ?(?=\.?[0-9])({_N})?(?:\.([0-9]+))?"
    r"(?:[ -]?(hundred|thousand|million|billion|trillion|lakh|crore|[bt]n)\b)?"
)
_DECIMAL = re.compile(rf"(?:({_N})|(?<![\w.)]))\.([0-9]+)")
_ORDINAL = re.compile(rf"(?=[0-9,]{{1,{MAX_DIGITS}}}[a-z]){_N}(st|nd|rd|th)\b")
_PLURAL = re.compile(rf"{_CURRENCY}?({_N})s\b")
_NUMBER = re.compile(_N)


def expand_numbers(text: str) -> str:
    """Returns ``text`` in lower case, with ASCII digits in words. Never raises."""
    text = _UNIT.sub(_unit, text)
    text = _ROMAN.sub(_roman, text).lower()
    text = _MONTH.sub(lambda match: re.search(rf"\b{match[1][:3]}\w*", _MONTHS)[0], text)
    text = _DATE.sub(lambda m: f"{_MONTHS.split()[int(m[2]) - 1]} {int(m[3])}th, {m[1]}", text)
    text = _DOTTED_CLOCK.sub(r"\1:\2", text)
    text = _TELEPHONE.sub(lambda match: ", ".join(map(_digits, _NUMBER.findall(match[0]))), text)
    text = _RANGE.sub(_range, text)
    text = _SCALE.sub(lambda match: f"{match[1]} {_SCALES[match[2]]}", text)
    text = _BESIDE_LETTER.sub(" ", text)  # mp3 is "mp three", not "mpthree"
    text = _BESIDE_SIGN.sub(" ", text)
    text = _NUMBER_SIGN.sub("number ", text)
    text = _CLOCK.sub(_clock, text)
    text = re.sub("(?<=[0-9]):(?=[0-9])", " ", text)  # ratios (16:9), scores and verses (23:4)
    text = _VERSION.sub(lambda match: match[0].replace(".", " point "), text)
    text = _FRACTION.sub(_fraction, text)
    text = _PAUSE.sub(r"\1, ", text)  # 20-3-1 is not twenty-three
    text = _MINUS.sub("minus ", text)
    text = _SIGN_LAST.sub(r"\2\1", text)
    text = _PLURAL.sub(_plural, text)
    text = _MONEY.sub(_money, text)
    text = _DECIMAL.sub(_decimal, text)
    text = _ORDINAL.sub(lambda match: _engine().number_to_words(match[0].replace(",", "")), text)
    return _NUMBER.sub(lambda match: _cardinal(match[0]), text)


def _roman(match: re.Match) -> str:
    number = _NUMERALS.index(match[2])
    read = f"the {number}th" if match[1] in _RULERS.split("|") else number
    return f"{match[1]} {read}"


def _range(match: re.Match) -> str:
    sign, first, other_sign, last = match.groups()
    if (sign, first) == (other_sign, last):  # a 50-50 chance
        return f"{sign}{first} {sign}{last}"
    has_cents = first[-3:-2] == "."
    is_one_unit = not other_sign or (sign == other_sign and not has_cents)
    return f"{'' if is_one_unit else sign}{first} to {other_sign or sign}{last}"


def _clock(match: re.Match) -> str:
    hour, minute = int(match[1]), match[2]
    if minute == "00" and match[3]:  # 5:00 p.m.
        return str(hour)
    if minute == "00":
        return f"{hour} o'clock" if 1 <= hour <= 12 else f"{hour} hundred"
    return f"{hour} {minute}" if minute[0] != "0" else f"{hour} oh {minute[1]}"


def _unit(match: re.Match) -> str:
    number, unit = match[1], _UNITS[match[2].lower()]
    first, *rest = unit.split(" ")
    if number != "1" and not first.endswith("hertz") and not _describes(match):
        first = "feet" if first == "foot" else f"{first}s"
    return " ".join([_quantity(number), first, *rest])


def _describes(match: re.Match) -> bool:
    """Tells whether an amount describes a noun, and so is singular: a $5 million house."""
    before = match.string[max(0, match.start() - 4) : match.start()]
    return bool(re.search(r"\ban? $", before, re.IGNORECASE))


def _quantity(number: str) -> str:
    """Returns a number with the comma that tells it from a year: 1,250 kg."""
    return re.sub(r"^([1-9])([0-9]{3})(?![0-9,])", r"\1,\2", number)


def _fraction(match: re.Match) -> str:
    sign, whole, numerator, denominator = match.groups()
    if len(numerator) > 2 or not 0 < int(numerator) < int(denominator):
        return match[0]
    part = {"2": "half", "4": "quarter"}.get(denominator)
    part = part or _engine().number_to_words(_engine().ordinal(denominator))
    plural = "" if numerator == "1" else "s"
    words = (f"{whole} and " if whole else "") + f"{numerator} {part}{plural}"
    unit, units, *_ = CURRENCIES.get(sign, ("", ""))
    return f"{words} {units}".rstrip() if whole or not sign else f"{words} of a {unit}"


def _money(match: re.Match) -> str:
    """Spells out the units; later rules read the digits."""
    sign, whole, fraction, scale = match.groups(default="")
    unit, units, hundredth, hundredths = CURRENCIES[sign]
    if _describes(match):
        units, hundredths = unit, hundredth
    if scale or len(fraction) > 2 or not hundredth:
        number = _quantity(whole or "0") + (f".{fraction}" if fraction else "")
        return " ".join(filter(None, (number, _SCALES.get(scale, scale), units)))
    whole = whole.lstrip("0,")
    fraction = fraction.ljust(2, "0").lstrip("0")  # $1.5 is one dollar, fifty cents
    parts = []
    if whole:
        parts.append(f"{_quantity(whole)} {unit if whole == '1' else units}")
    if fraction:
        parts.append(f"{fraction} {hundredth if fraction == '1' else hundredths}")
    return ", ".join(parts) or f"0 {units}"


def _decimal(match: re.Match) -> str:
    whole, fraction = match.groups(default="")
    return f"{_quantity(whole)} point {_digits(fraction)}".lstrip()


def _plural(match: re.Match) -> str:
    words = _cardinal(match[1])
    if words.endswith("y"):  # 1980s
        return words[:-1] + "ies"
    return words + ("es" if words.endswith("x") else "s")


@functools.cache
def _engine() -> Any:
    import inflect  # here: it imports more slowly than PyTorch, and few texts have digits

    return inflect.engine()


@functools.lru_cache(maxsize=10_000)
def _cardinal(number: str) -> str:
    """Spells out digits. Without a comma, 1001 to 2999 are read as years."""
    digits = number.replace(",", "")
    if len(digits) > MAX_DIGITS or (len(digits) > 1 and digits[0] == "0"):
        return _digits(digits)
    n = int(digits)
    if 1000 < n < 3000 and n != 2000:
        if n % 100 == 0:
            return _engine().number_to_words(n // 100) + " hundred"
        if "," not in number and 2000 < n < 2010:
            return "two thousand " + _engine().number_to_words(n % 100)
        if "," not in number:
            pairs = _engine().number_to_words(n, andword="", zero="oh", group=2)
            return pairs.replace(", ", " ")
    return _engine().number_to_words(n, andword="")


def _digits(digits: str) -> str:
    return " ".join(map(_cardinal, digits))
