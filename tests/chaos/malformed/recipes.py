"""Recipe files: shipped ones whose data or bytes were changed, and attacks on YAML itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.loader import SHIPPED, load_recipe
from pipeline.errors import RecipeError
from tests.chaos.malformed.mutations import judged, judged_line, mutated_bytes, mutated_data
from tests.support.runs import evenkeel

COUNT = 3000
IN_MAKE_TEST = 40
FILES = sorted(SHIPPED.glob("*.yaml"))
_BASE = "run: {name: a, steps: 4}\nmodel: {path: m}\ntask: {name: sort_digits}\n"


def prepare() -> None:
    """Imports what the tries need."""
    evenkeel("recipe", "demo")


def attempt(seed: int, folder: Path) -> str:
    """Write a malformed recipe and read it."""
    rng = random.Random(f"recipes/{seed}")
    path = folder / "recipe.yaml"
    path.write_bytes(_content(rng))
    verdict = judged(lambda: read_and_write(path), RecipeError)
    if verdict == "ok" and seed % 10 == 0:  # what the whole command says
        done = evenkeel("recipe", path)
        if done.returncode not in (0, 1) or (done.returncode == 1 and not done.stderr.startswith("error: ")):
            return f"status {done.returncode}: {done.stderr[:200]!a}"
        verdict = judged_line(done.stderr.removesuffix("\n")) if done.returncode else "ok"
    return verdict


def read_and_write(path: Path) -> None:
    """A recipe that is accepted can be frozen, and says the same when it is read again."""
    recipe = load_recipe(path)
    again = path.with_name("frozen.yaml")
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe, "a frozen recipe reads as another one"
    recipe.to_yaml()


def _content(rng: random.Random) -> bytes:
    how = rng.random()
    file = rng.choice(FILES)
    if how < 0.5:
        return _dumped(rng, mutated_data(rng, _flat(file)))
    if how < 0.85:
        return mutated_bytes(rng, file.read_bytes())
    return rng.choice(ATTACKS)(rng)


def _flat(file: Path) -> Any:
    """Half of the keys of a recipe are defaults, which are worth changing too."""
    return yaml.safe_load(load_recipe(file).to_yaml())


def _dumped(rng: random.Random, data: Any) -> bytes:
    text = yaml.safe_dump(data, sort_keys=rng.random() < 0.5, allow_unicode=rng.random() < 0.5)
    return text.encode(rng.choice(("utf-8",) * 8 + ("utf-16", "latin-1")), "replace")


def _bomb(rng: random.Random) -> bytes:
    rows = ["a0: &a0 [l,l,l,l,l,l,l,l,l]"]
    rows += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, rng.randint(2, 40))]
    return "\n".join(rows).encode()


def _map_bomb(rng: random.Random) -> bytes:
    rows = ["a0: &a0 {x: 1, y: 2}"]
    rows += [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, <<: *a{i - 1}}}" for i in range(1, rng.randint(2, 60))]
    return "\n".join(rows).encode()


def _deep(rng: random.Random) -> bytes:
    opening, closing = rng.choice((("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", ""), ("a:\n ", ""), ("!!seq [", "]")))
    depth = rng.choice((31, 32, 33, 500, 5000, 50_000))
    return (_BASE + "x: " + opening * depth + closing * depth).encode()


def _number(rng: random.Random) -> bytes:
    digits = "9" * rng.choice((29, 30, 31, 4299, 4300, 4301, 100_000))
    written = rng.choice(("{}", "-{}", "{}.0", "0x{}", "0b{}", "0{}", "{}:59", "1_{}", ".{}", "1.0e+{}", "{}-01-01"))
    return (_BASE + "checkpoint: {every: " + written.format(digits) + "}").encode()


def _plain(rng: random.Random) -> bytes:
    """YAML 1.1's cleverness, and what tags do to it."""
    words = ("0b_", "0x_", "0o7", "2001-99-99", "2001-01-01 25:61:61", "1:99:99", "=", "<<", ".inf", "-.NaN", "~",
        "on",
             "!!int x", "!!float x", "!!bool x", "!!timestamp x", "!!null x", "!!binary x", "!!set {a}",
             "!!omap [a: b]",
             "!!pairs [a]", "!!python/name:os.system", "!x y", "!<tag:yaml.org,2002:int> 3", "&a *a", "*nowhere",
             "&a [*a]",
             "'", '"', "|", ">", "|9\n", "@", "`", "%", "? a", "- a", "!!merge <<", '"\\Uffffffff"', '"\\x00"',
             '"\\ud800"')  # fmt: skip
    place = rng.choice(
        ("checkpoint: {{every: {}}}", "objective: {{name: {}}}", "run: {}", "{}: 3", "extends: {}", "{}")
    )
    return (rng.choice((_BASE, "")) + place.format(rng.choice(words))).encode("utf-8", "surrogatepass")


def _extends(rng: random.Random) -> bytes:
    names = ('"a\\0b"', '"' + "a" * 5000 + '"', ".", "..", "/", "/dev/null", "/proc/self/mem", "recipe.yaml", "[]",
        "demo",
             '"\\ud800"', "''", "~", "demo.yaml.yaml", "'a\n\n b'", "../" * 3000, "/dev/zero")  # fmt: skip
    return f"extends: {rng.choice(names)}\n{rng.choice((_BASE, ''))}".encode()


def _huge(rng: random.Random) -> bytes:
    size = rng.choice((1 << 18, (1 << 20) - 100, (1 << 20) + 1, 5 << 20))
    unit = rng.choice((b"a", b"a ", b"\n", b"#", b"- a\n", b"[],", b'"', b"a: b\n", "ü".encode(), b"&a ", b"? ", b" "))
    return rng.choice((_BASE.encode() + b"x: ", b"")) + unit * (size // len(unit))


def _random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 2, 3, 16, 1000)))


ATTACKS = (_bomb, _map_bomb, _deep, _number, _plain, _plain, _plain, _extends, _huge, _random_bytes)
