"""Compare the last answer of a response with the reference as mathematics.

`math-verify` parses and compares. Text that it misreads is rewritten before: notations of numbers, units, choices and
words. Numbers, which it compares by an absolute difference, are compared here by a relative one.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Basic, Float, Integer, MatrixBase, Rational, expand

TIMEOUT_S = 5
_NOISE = Rational(1, 10**12)
"""Relative difference allowed between an integer and a computed decimal: 41.99999999999999 is 42."""
_MOST_ZEROS = 400
"""Largest power of ten that is written out."""
_NEAR = 200
"""Characters before a number that are searched for a bracket around it."""
_SHORT = 80
"""Longest text, in characters, that may be a choice or a word alone."""
_LONGEST = 2000
"""Longest answer, in characters, that is compared."""
_LATEX = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
        )
    )
]


def equal(response: str, answer: str, tolerance: float) -> bool:
    """Return whether the last answer of `response` equals `answer`. Raises ValueError for an `answer` that is not
    mathematics, a choice or a word."""
    gold = _read(_last_answer(answer) or (_found(answer) if _PROSE.search(answer) else "") or answer)
    if not _parsed(gold.value):
        raise ValueError(f"answer {answer!r} is not mathematics that math-verify can parse")
    inside, _, after = response.rpartition("</answer>")
    if "boxed" not in after and (inside := inside.rpartition("<answer>")[2].strip()):
        response = inside
    found = _last_answer(response)
    if not found:  # a response that is nothing but its answer, or ends with `Answer: (C)`
        said: list[str] = _SAID.findall(response)
        for text in (response, *said[-1:]):
            if len(text) > _SHORT or "boxed" in text:  # a box that is not closed was cut short
                continue
            if _same(gold, read := _read(text), tolerance) or (gold.choice and read.choice):
                found = text
                break
        else:
            either = list(map(_found, _OR.split(said[-1]))) if said and _EITHER.match(said[-1]) else [""]
            found = ",".join(either) if all(either) else _found(response)
    if answer.strip() in (response.strip(), found.strip(), _last_box(response).strip()):
        return True
    if not found or len(found) > max(_LONGEST, 2 * len(answer)):
        return False
    return _same(gold, _read(found), tolerance)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    choice: str
    """Letter of a choice in capitals, alone or with its value as in `(C) 28`; empty for other answers."""
    value: str
    """LaTeX for math-verify, without percent sign and units."""
    percent: bool
    units: tuple[str, ...]

    @property
    def words(self) -> set[str]:
        return set(re.findall("[a-z]+", " ".join(self.units).lower()))


def _same(gold: _Answer, found: _Answer, tolerance: float) -> bool:
    """Return whether two answers are equal. A choice with its value is matched by either, unless both answers have
    both. `50%` is both 50 and 0.5. Units count where both answers have them and all are known."""
    letters = any(one.choice == one.value.upper() for one in (gold, found))
    if gold.choice and found.choice and (letters or gold.choice != found.choice):
        return gold.choice == found.choice
    ours, theirs = ([_dimension(unit) for unit in one.units] for one in (gold, found))
    if len(ours) == len(theirs) and None not in (*ours, *theirs) and ours != theirs:
        return False
    if any(one in gold.words and other in found.words for pair in _OPPOSITES for one, other in (pair, pair[::-1])):
        return False
    times = [[int(part or 0) for part in at.groups()] for one in (gold, found) if (at := _CLOCK.fullmatch(one.value))]
    if len(times) == 2:
        return times[0] == times[1]
    if gold.value == found.value or _verified(gold.value, found.value, tolerance):
        return True
    if gold.percent == found.percent:
        return False
    wanted, got = (rf"\frac{{{one.value}}}{{100}}" if one.percent else one.value for one in (gold, found))
    return _verified(wanted, got, tolerance)


# How numbers are compared.


def _verified(gold: str, found: str, tolerance: float) -> bool:
    """Return math-verify's verdict, with `_same_number` in place of its rounding to six places."""
    theirs = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = _same_number
    try:
        return bool(
            verify(
                _parsed(gold),
                _parsed(found),
                float_rounding=Rational(str(tolerance)),  # handed on to _same_number, whatever it is
                allow_set_relation_comp=True,
                timeout_seconds=TIMEOUT_S,
            )
        )
    finally:
        grader.sympy_numeric_eq = theirs


def _same_number(gold: Any, found: Any, tolerance: Rational, precision: int) -> bool:
    """Return whether two numbers are equal: exactly for integers, fractions and roots; up to the share `tolerance` of
    `gold` for decimals. In expressions with variables, decimals count as exact fractions."""
    gold, found = grader.safe_sympy_doit(gold), grader.safe_sympy_doit(found)
    if isinstance(gold, MatrixBase) and isinstance(found, MatrixBase):
        return gold.shape == found.shape and all(
            grader.sympy_expr_eq(*pair, tolerance, precision) for pair in zip(gold.flat(), found.flat(), strict=True)
        )
    if not isinstance(gold, Basic) or not isinstance(found, Basic):
        return False
    exact = [one.xreplace({part: Rational(str(part)) for part in one.atoms(Float)}) for one in (gold, found)]
    if gold.free_symbols or found.free_symbols:
        return bool(expand(exact[0] - exact[1]) == 0)
    decimal = gold.has(Float) or found.has(Float)
    if not decimal and isinstance(gold, Rational) and isinstance(found, Rational):
        return bool(gold == found)
    share = min(tolerance, _NOISE) if isinstance(gold, Integer) or isinstance(found, Integer) else tolerance
    wanted, got = (one.evalf(50) for one in exact)
    if not wanted.is_finite or not got.is_finite:
        return False
    return bool(abs(wanted - got) <= (share if decimal else Rational(1, 10**40)) * abs(wanted))


def _parsed(value: str) -> list[Any]:
    return list(parse(rf"\boxed{{{value}}}", _LATEX, parsing_timeout=TIMEOUT_S)) if value else []


# Where the answer stands.

_BOX = re.compile(r"(?:\\(?:boxed|fbox|framebox)|(?<![\\A-Za-z])boxed(?=\{))\s*(?:(\{)|(?P<bare>[^\s{$]+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:(?:[\s$}]*[,;]|[^\n]{0,40}?\b(?:and|or)\b)[\s}$*~]*"
    r"(?:\\[(\[,;: ]|\\q?quad|[A-Za-z](?:_\{?\w+\}?)?\s*=|[\s$])*)?"
)
"""Text between two boxes that form one answer: empty, or ending with a comma, `and` or `or`."""
_FINAL = re.compile(r"(?i:the final answer is)[^\n]{0,200}?\. I hope")
_OR = re.compile(r"\b(?:and|or)\b")
_EITHER = re.compile(r"[^\s\w]*\d\S*(?: [a-z]+)?,? (?:and|or)\b")
"""Beginning of an answer that is two numbers: it counts whole, not by the first."""
_SAID = re.compile(r"(?i:answer|option|choice)\s*+(?i:is\b)?[\s:*]*+([^\n]{1,80})$", re.MULTILINE)


_PROSE = re.compile(r"(?i:answer)|[A-Za-z]{2}[^$]*\$[^$]+\$")
"""Reference answer within a sentence."""


def _last_answer(text: str) -> str:
    """Return the answer in `The final answer is … I hope it is correct`, the last box, or after `####` at the end."""
    if (said := _FINAL.findall(text)) and "boxed" not in said[-1]:
        return _found(said[-1])
    _, mark, marked = text.rstrip().rpartition("\n")[2].rpartition("####")  # in another line it is a heading
    return _last_box(text) or (marked if mark else "")


def _last_box(text: str) -> str:
    """Return the contents of the last box, with boxes joined to it as in `\\boxed{1} and \\boxed{2}`."""
    boxes = list[tuple[int, int, str]]()  # beginning, end and contents of each box that is closed
    for box in _BOX.finditer(text):
        if box["bare"]:
            boxes.append((box.start(), box.end(), box["bare"]))
            continue
        depth = 1
        for brace in _BRACE.finditer(text, box.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                boxes.append((box.start(), brace.end(), text[box.end() : brace.start()]))
                break
    joined = boxes[-1:]
    for earlier in reversed(boxes[:-1]):
        if not _BETWEEN.fullmatch(text, earlier[1], joined[0][0]):
            break
        joined.insert(0, earlier)
    return ",".join(dict.fromkeys(contents for _, _, contents in joined))


def _found(response: str) -> str:
    text = _numerals(response)
    found = parse(text, parsing_timeout=TIMEOUT_S)
    if not found or not isinstance(found[-1], str):
        return ""
    percent = re.search(re.escape(found[-1]) + r"\s*(?:\\?%|percent)", text)
    return str(found[-1]) + (r"\%" if percent else "")


# How an answer is read.

_SIGNS = {
    **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "√": r"\sqrt"},
    **{"∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "±": r"\pm ", "∅": r"\emptyset ", "°": r"^\circ "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
}
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁻]+")
_SPACE = re.compile(r"(?<!\\)\\(?:!\s*|[,;: ])|\\q?quad(?![A-Za-z])|\\thinspace|~")
_NOTHING = re.compile(
    r"^\s*(?:\\approx|\\sim|=|[A-Za-z](?:\s*:\s*[A-Za-z])+\s*=)|\$|\\[()]|\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lr]?|"
    r"(?:display|text)style|bf|rm|it|[lL]arge|LARGE|[hH]uge|checkmark)(?![A-Za-z])|"
    r"\\(?:[hv]?phantom|tag\*?|(?:text)?color)\s*\{[^{}]*\}|"
    r"\\(?:begin|end)\{(?:aligned|align\*?|split|gathered)\}|&(?=\s*=)"
)
_ALIASES = {
    **{r"\varnothing": r"\emptyset", r"\dots": r"\ldots", r"\langle": "(", r"\rangle": ")", r"\degree": r"^\circ"},
    **{r"\sfrac": r"\frac", r"\nicefrac": r"\frac"},
}
_ALIAS = re.compile(rf"({'|'.join(map(re.escape, _ALIASES))})(?![A-Za-z])")
_LEAD = re.compile(
    r"^\s*(?:\\text\{)?\s*(?i:(?:the )?(?:final )?answer(?: is)?:?|approx(?:imately|\.)?|about|around)(?=[\s}\d])"
    r"\s*\}?(?=.*[\d\\])"
)
"""Words before the answer in a box."""
_MEMBERS = re.compile(r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|[:|])(.+)\\\}", re.DOTALL)
"""Set of all x with a condition, which is read as the condition."""
_ORDINAL = re.compile(r"\^\s*\{?\s*(\\text\{\s*(?:st|nd|rd|th)\s*\})\s*\}?")
_HALF_DAY = re.compile(r"(?<=[\d\s{}])([apAP])\.\s?[mM]\b\.?")
_CLOCK = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?")
_OPPOSITES = (
    *(("bc", "ad"), ("increase", "decrease"), ("profit", "loss"), ("gain", "loss"), ("more", "less")),
    *(("north", "south"), ("east", "west"), ("left", "right"), ("up", "down"), ("above", "below"), ("before", "after")),
)
"""Words after a number that make another answer of it."""
_CURRENCY = re.compile(r"\\\$|[€£¥₹]|\bUSD\b")
_PERCENT = re.compile(r"\\?%|\\text\{\s*(?:percent(?:age)?|pct|per cent)\s*\}|\b(?:percent|pct|per cent)\b")
_TEXT = re.compile(
    r"\\(?P<name>text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|[mh]box|operatorname|boldsymbol|bm|bold|pmb|underline|ce)\s*"
    r"\{(?P<words>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)[\s:]+)?(?:"
    r"(?P<only>[A-Za-z])[).:]?|[(\[](?P<around>[A-Za-z])[)\]][.:]?|"
    r"(?:[(\[](?P<open>[A-Z])[)\]]|(?P<half>[A-Z])\))[.:]?(?=[\s\d\\])(?P<value>.+)|"
    r"(?P<point>[A-Z])[.:]\s+(?P<after>.+))",
    re.DOTALL,
)
_GOES_ON = re.compile(
    r"\s*(?:[+*/=^_,;&<>|!)\]]|-\s|(?:and|or)\b|\\(?:cup|cap|times|cdot|setminus|in|to|circ|[lg]eq?|neq?|su[bp]set)\b)"
)
"""Text after a letter that is part of an expression or a list, not a choice."""


def _read(text: str) -> _Answer:
    text = _SUPERSCRIPTS.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = unicodedata.normalize("NFKC", re.sub("([¼-¾⅐-⅞])", r" \1", text))
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = _SPACE.sub(lambda space: "" if space[0].startswith(r"\!") else " ", text)
    currencies = tuple(_CURRENCY.findall(text))
    text = re.sub(r"(?<![A-Za-z\\])([A-Za-z])('+)(?![A-Za-z])", lambda x: f"{x[1]}_{{{'p' * len(x[2])}}}", text)
    text = _ALIAS.sub(lambda command: _ALIASES[command[0]], _NOTHING.sub("", _CURRENCY.sub("", text)))
    text = _LEAD.sub("", _HALF_DAY.sub(r"\1m", _TEXT.sub(_text, text)))
    text = text.lstrip(" *`\n\t").rstrip(" *`.,;\n\t").replace("**", "^")
    text = re.sub(r"(?<![\d.])0,(?=\d{3})", "0, ", _ORDINAL.sub(r"\1", _MEMBERS.sub(r"\1", text)))
    choice, text = _split(text)
    percent = bool(_PERCENT.search(text))
    value, units = _without_units(_numerals(_PERCENT.sub("", text)))
    value = _RUN.sub(_symbol, re.sub(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ",", value))
    value = _RATIO.sub(_proportion, re.sub(r",[\s,]*,", ", ", re.sub(r"\s+", " ", value).strip()))
    return _Answer(choice=choice, value=value or choice, percent=percent, units=currencies + units)


def _text(found: re.Match[str]) -> str:
    """Keep words in `\\text`, and take numbers, letters and choices out of it."""
    words = found["words"].strip()
    if words in ("and", "or"):
        return ", "
    if re.fullmatch(r"\S+(?:,? (?:and|or) \S+)+", words):
        return re.sub(",? (?:and|or) ", ", ", words)
    if found["name"] == "operatorname" and words.lower() not in _UNITS:
        return found[0]
    if not words or re.search(r"[\d()\[\]:]", words) or (len(words) > 1 and _CHOICE.fullmatch(words)):
        return found["words"]
    return rf"\text{{{found['words']}}}"


def _split(text: str) -> tuple[str, str]:
    """Return the letter of a choice in capitals, empty without one, and the rest of the text."""
    found = _CHOICE.fullmatch(re.sub(r"^\\text\{\s*([A-Za-z])\s*\}", r"\1", text))
    if found is None or _GOES_ON.match(rest := found["value"] or found["after"] or ""):
        return "", text
    letter = next(found[name] for name in ("only", "around", "open", "half", "point") if found[name])
    return letter.upper(), rest.strip() or (letter if letter == "e" else "")


# How a number is written.

_THOUSANDS = re.compile(r"(?<![\d.,_^])(?!0)\d{1,3}(?P<mark>,|\{,\}| |_)\d{3}(?:(?P=mark)\d{3})*(?!,?\d)(?! */)")
_REPEATING = re.compile(r"(?<![\w.])(\d{0,99})\.(\d{0,99})\\(?:overline|bar|dot)\s*\{?(\d{1,99})\}?")
_SCIENTIFIC = re.compile(
    r"(?<![\w.\\])(?P<mantissa>\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:"
    r"(?:[eE]|\s*\\(?:text|mathrm)\s*\{\s*[eE]\s*\}\s*)(?:\{(?P<bare>[+-]?\d{1,4})\}|(?P<e>[+-]?\d{1,4}))(?!\.?\w)|"
    r"\s*(?:\\times|\\cdot|\*|[x×·])\s*10\s*(?:\^|\*\*)\s*(?:\{\s*(?P<braced>[+-]?\d{1,4})\s*\}|(?P<plain>[+-]?\d{1,4}(?!\d))))"
)
_MIXED = re.compile(
    r"(?<![\w.,^/}])(?P<whole>\d{1,99})(?:\s*\\[dtc]?frac\s*(?:\{\s*(?P<a>\d{1,99})\s*\}|(?P<b>\d))\s*"
    r"(?:\{\s*(?P<c>\d{1,99})\s*\}|(?P<d>\d))| +(?P<e>\d{1,99})\s*/\s*(?P<f>\d{1,99})(?![\d.]))"
)
_RATIO = re.compile(r"(?<![\d.:])\d{1,99}(?:\s*:\s*\d{1,99}){2,9}(?![\d.:])")
_LARGE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MANY = re.compile(rf"(?<![\w.\\])(\d{{1,99}}(?:\.\d{{1,99}})?)\s*(\\text\{{\s*)?({'|'.join(_LARGE)})s?\b")


def _numerals(text: str) -> str:
    text = _THOUSANDS.sub(_joined, text)
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(
        lambda n: _written_out(n, n["mantissa"], n["e"] or n["bare"] or n["braced"] or n["plain"]), text
    )
    text = _MANY.sub(lambda n: _written_out(n, n[1], str(_LARGE[n[3]])) + (n[2] or ""), text)
    return _MIXED.sub(_mixed, text)


def _joined(number: re.Match[str]) -> str:
    """Remove marks of thousands. In brackets `(1,200)` is a pair, `(1,000)` is a number."""
    before = number.string[max(0, number.start() - _NEAR) : number.start()]
    opened = sum(before.count(one) for one in ("(", "[", r"\{")) - sum(before.count(one) for one in (")", "]", r"\}"))
    groups = number[0].split(number["mark"])
    if number["mark"] == "," and opened > 0 and not any(group.startswith("0") for group in groups[1:]):
        return number[0]
    return "".join(groups)


def _repeating(number: re.Match[str]) -> str:
    whole, first, again = number.groups()
    below = 10 ** len(first) * (10 ** len(again) - 1)
    above = int(whole + first + again) - int(whole + first or "0")
    return rf"\frac{{{above}}}{{{below}}}"


def _written_out(number: re.Match[str], mantissa: str, power: str) -> str:
    """Write out a power of ten. A mantissa with a point keeps it, as a decimal and not an integer."""
    if abs(int(power)) > _MOST_ZEROS:
        return number[0]
    written = f"{Decimal(f'{mantissa}e{power}'):f}"
    return f"{written}.0" if "." in mantissa and "." not in written else written


def _mixed(number: re.Match[str]) -> str:
    above, below = (int(next(filter(None, map(number.group, names)))) for names in ("abe", "cdf"))
    if above >= below:
        return number[0]
    return rf"\frac{{{int(number['whole']) * below + above}}}{{{below}}}"


def _proportion(number: re.Match[str]) -> str:
    """Write 2:4:6 as the tuple (1,2,3); math-verify reads it as 2/4/6."""
    parts = [int(part) for part in number[0].split(":")]
    if _CLOCK.fullmatch(number[0]) or not (first := next(filter(None, parts), 0)):
        return number[0]
    return f"({','.join(str(Rational(part, first)) for part in parts)})"


# Units and words.

_PREFIXES = dict(kilo="k", centi="c", milli="m", micro="μ", nano="n", mega="M", giga="G", deci="d")
_METRIC = dict(
    **dict(meter="m", metre="m", gram="g", liter="L", litre="L", second="s", watt="W", joule="J", newton="N"),
    **dict(volt="V", pascal="Pa", hertz="Hz", ampere="A", ohm="Ω", mole="mol", calorie="cal", byte="B", kelvin="K"),
    **dict(electronvolt="eV", coulomb="C", tesla="T", farad="F", bar="bar"),
)
_UNITS = {
    name: prefix + short
    for word, short in _METRIC.items()
    for long, prefix in [("", ""), *_PREFIXES.items()]
    for name in (long + word, prefix + short)
} | dict(
    **dict(ml="mL", l="L", hour="h", hr="h", h="h", minute="min", min="min", sec="s", day="day", week="week"),
    **dict(month="month", year="year", yr="year", inch="in", inches="in", foot="ft", feet="ft", ft="ft", yard="yd"),
    **dict(yd="yd", mile="mi", mi="mi", pound="lb", lb="lb", ounce="oz", oz="oz", gallon="gal", gal="gal"),
    **dict(dollar="$", USD="$", cent="¢", euro="€", degree="°", deg="°", radian="rad", rad="rad", mph="mi/h"),
    **dict(kph="km/h", am="am", pm="pm", cup="cup", square="square", sq="square", cubic="cubic", per="/", unit="unit"),
)
"""Names of a unit → its canonical name."""
_BARE = frozenset(("Ω", "kg", "km", "cm", "mm", "ml", "mL", "lb", "lbs", "ft", "oz", "mph", "kph", "Hz", "kWh"))
"""Units that are no product of variables, even directly after a number."""
_SINGLE = frozenset("mgshLJWVN")
_QUANTITY = re.compile(
    r"(?P<end>[\d})]|\\pi)(?P<space>\s*)"
    r"(?P<unit>\^\{?\\circ\}?\s*(?:\\text\{\s*[CFK]\s*\}|[CFK]\b)?|"
    r"(?:\\text\{[^{}]*\}|\\(?:mu|Omega)(?![A-Za-z])|[A-Za-zμΩ.']++)(?:\\text\{[^{}]*\}|\\Omega|[A-Za-zμΩ.']++|"
    r"\^\{?-?\d+\}?|[/*\s]|\\cdot|(?<=/)\s*\((?:[A-Za-zμΩ\s*\d^]|\\cdot|\\text\{[^{}]*\})++\))*+)"
    r"(?=$|[,;)\]=]|\\\}|\\c[ua]p)"
)
_ANGLE = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)(\d+(?:\.\d+)?)\s*\^\{?\\circ\}?")
"""Degrees in a trigonometric function, which are part of the number and not a unit of the answer."""
_FRACTION_OF_UNITS = re.compile(
    r"\\frac\s*\{\s*(\\text\{[^{}]*\})\s*\}\s*\{\s*(\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?)\s*\}"
)
_MATHEMATICS = frozenset(
    (
        "sqrt",
        "frac",
        "infinity",
        "infty",
        "times",
        "sinh",
        "cosh",
        "tanh",
        "arcsin",
        "arccos",
        "arctan",
        "alpha",
        "beta",
    )
) | {"gamma", "delta", "theta", "omega", "sigma", "lambda"}
_RUN = re.compile(
    r"\\text\{(?P<text>[^{}]*)\}|\\(?:begin|end)\{\w+\*?\}(?:\{[lcr|]*\})?|\\operatorname\s*\{[^{}]*\}|\\[A-Za-z]+|"
    r"(?P<run>[A-Za-z]+(?:[ '-]+[A-Za-z]+)*)"
)


def _without_units(text: str) -> tuple[str, tuple[str, ...]]:
    units = list[str]()

    def drop(found: re.Match[str]) -> str:
        unit = re.sub(r"\\mu\s*(?:\\text\{)?\s*", "μ", found["unit"].replace(r"\Omega", "Ω")).strip()
        if not _is_unit(unit, text[: found.start("unit")], spaced=bool(found["space"])):
            return found[0]
        units.append(unit)
        return found["end"]

    text = _ANGLE.sub(r"\1{\\frac{\2 \\pi}{180}}", _FRACTION_OF_UNITS.sub(r"\1/\2", text))
    without = _QUANTITY.sub(drop, text)
    return without, tuple(units)


def _is_unit(unit: str, before: str, *, spaced: bool) -> bool:
    """Return whether the text after a number is a unit or a counted noun, not a variable."""
    if r"\circ" in unit:
        return not re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)", before)
    names = re.findall(r"[A-Za-zμΩ]+", re.sub(r"\\(?:text|cdot)", " ", unit))
    known = [_unit_of(name) is not None for name in names]
    variables = re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+|[A-Za-z]\w*(?:\([a-z]\))?\s*=", "", before))
    if not names or unit.startswith(r"\text"):
        return bool(names) and (all(known) or not variables)
    if not spaced:
        return names[0] in _BARE
    words = [len(name) >= 4 and name not in _MATHEMATICS for name in names]
    fit = all(len(name) > 1 or name in _SINGLE or _unit_of(name) for name in names) and names != ["μ"]
    return fit and (all(known) or (any(words) and not variables))


def _unit_of(name: str) -> str | None:
    return _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.lower().removesuffix("s"))


def _dimension(unit: str) -> Counter[str] | None:
    """Return unit → power, by canonical names; None if a unit is unknown."""
    powers, sign, more = Counter[str](), 1, 1
    if r"\circ" in unit:
        return Counter({"°" + "".join(re.findall("[CFK]", unit)): 1})
    for name, power in re.findall(r"([A-Za-zμΩ$€£¥₹]+|/)(?:\}?\^\{?(-?\d+)\}?)?", unit.replace(r"\text", "")):
        if name == "cdot":
            continue
        one = "/" if name == "/" else _unit_of(name) or (name if name in "$€£¥₹" else None)
        if one is None:
            return None
        if one == "/":
            sign = -1
        elif one in ("square", "cubic"):
            more = 2 if one == "square" else 3
        else:
            base, _, below = one.partition("/")
            powers[base] += sign * more * int(power or 1)
            powers.update({below: -1} if below else {})
            more = 1
    return powers


def _symbol(found: re.Match[str]) -> str:
    """Make one symbol of each word, and of each name in capitals such as `CA`, which math-verify reads as a product."""
    words = found["text"]
    if words is None:
        words = found["run"]
        names = re.findall("[A-Za-z]+", words or "")
        if any(name in _MATHEMATICS for name in names) or not any(
            re.fullmatch("[A-Z]{2,}|[A-Z][a-z]{2,}|yes|no|not|odd", name)
            or (len(name) >= 4 and re.search("[aeiou]", name))
            for name in names
        ):
            return found[0]
    squeezed = re.sub(r"[\s.'\"]+", "", words)
    return rf"\text{{{squeezed.lower()}}}" if len(squeezed) > 1 else squeezed
