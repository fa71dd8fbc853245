"""python_tests: programs that a model wrote, against tests that they cannot see."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator

import pytest

from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.rewards.programs import parse_tests, passes, program_in
from pipeline.rewards.verifiers import PYTHON_TESTS
from tests.support.sandboxes import sandbox_of

ADD = [{"call": "add(2, 3)", "value": 5}, {"call": "add('a', 'b')", "value": "ab"}]
SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20\n", "output": "30"}]


@pytest.fixture(scope="module", params=[None, "bubblewrap", "landlock"])
def verifiers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifiers]:
    folder = tmp_path_factory.mktemp("project")
    (folder / "answers.jsonl").write_text("5")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sandbox = None if request.param is None else sandbox_of(request.param)
        with Verifiers(PYTHON_TESTS, workers=1, deadline_s=10.0, sandbox=sandbox, memory_mib=256) as made:
            yield made


def verdict(verifiers: Verifiers, program: str, tests: object) -> Verdict:
    return asyncio.run(verifiers.score("", f"Here:\n```python\n{program}\n```\nDone.", json.dumps(tests)))


def result(reward: float, passed: float, cut: float = 0.0) -> Verdict:
    return Verdict(reward=reward, parts={"passed": passed, "cut": cut})


@pytest.mark.parametrize(
    ("program", "tests", "expected"),
    [
        ("def add(a, b):\n    return a + b", ADD, result(1.0, 1.0)),
        ("def add(a, b):\n    print('noise', end='')\n    return a + b", ADD, result(1.0, 1.0)),
        ("def add(a, b):\n    return 5", ADD, result(0.0, 0.5)),
        ("def add(a, b):\n    raise ValueError", ADD, result(0.0, 0.0)),
        ("def add(a, b) return", ADD, result(0.0, 0.0)),
        ("print(sum(map(int, input().split())))", SUM, result(1.0, 1.0)),
        ("if __name__ == '__main__':\n    print(3)", SUM, result(0.0, 0.5)),
    ],
)
def test_programs(verifiers: Verifiers, program: str, tests: object, expected: Verdict) -> None:
    assert verdict(verifiers, program, tests) == expected


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "class Anything:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Anything()",
        "import json\njson.loads = json.dumps = lambda *a, **k: 'true'\ndef add(a, b):\n    return 1",
        "print(open('call.py').read())\ndef add(a, b):\n    return True",
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'[1]')\n    except OSError: pass\nadd = max",
    ],
)
def test_programs_do_not_pass_by_cheating(verifiers: Verifiers, program: str) -> None:
    assert verdict(verifiers, program, ADD) == result(0.0, 0.0)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", marks=pytest.mark.slow),  # lasts as long as the deadline, on each rung
        "print('x' * 10**7)",
        "x = bytearray(10**9); add = max",
    ],
)
def test_programs_end_at_their_limits(verifiers: Verifiers, program: str) -> None:
    """Without a sandbox only time, output and what can be seen of its memory are limited."""
    found = verdict(verifiers, program, ADD)
    assert (found.reward, found.parts["passed"], found.failed) == (0.0, 0.0, None)


def test_a_program_finds_no_answers_and_no_other_program(verifiers: Verifiers) -> None:
    confined = json.loads(verifiers._workers[0]._settings)["rung"] is not None
    leaves = "import os\nopen('left', 'w').write('5')\ndef add(a, b): return a + b"
    assert verdict(verifiers, leaves, ADD) == result(1.0, 1.0)
    reads = f"import os\nassert not os.path.exists('left')\nprint(open({os.path.abspath('answers.jsonl')!r}).read())"
    expected = result(0.0, 0.0) if confined else result(1.0, 1.0)
    assert verdict(verifiers, reads, [{"input": "", "output": "5"}]) == expected


@pytest.mark.parametrize("answer", ["", "5", "[]", "{}", '[{"input": "x"}]', '[{"call": 3, "value": 1}]', "[" * 10**5])
def test_an_answer_that_is_no_tests_is_a_failed_verdict(verifiers: Verifiers, answer: str) -> None:
    found = asyncio.run(verifiers.score("", "print(1)", answer))
    assert found.failed == "raised"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python3\nprint(1)\n```\nThis prints one.", "print(1)\n"),
        ("```{.Python}\nprint(1)\n```", "print(1)\n"),
        ("```py title=a.py\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(7)\n```\nOutput:\n```text\n7\n```\nDone.", "print(7)\n"),
        ("```python\nprint(7)\n```\nOutput:\n```\n7\n```\nDone.", "print(7)\n"),
        ("```\nprint(7)\n```\nRun it:\n```bash\npython a.py\n```\nDone.", "print(7)\n"),
        ("```pycon\n>>> 7\n```", "```pycon\n>>> 7\n```"),
        ("1. So:\n\n   ```python\n   if 1:\n       print(1)\n   ```\n", "if 1:\n    print(1)\n"),
        ("1. ```python\n   print(1)\n   ```\n", "print(1)\n"),
        ("```python\r\nif 1:\r\n    print(1)\r\n```\r\n", "if 1:\n    print(1)\n"),
        ("It is `x` as here: ```python\nprint('```')\nprint(1)```\nDone.", "print('```')\nprint(1)"),
        ("````python\nprint(1)\n```\n````\n", "print(1)\n```\n"),
        ("```python\nprint(1)\n```\n```\n", "print(1)\n"),
    ],
)
def test_fences_say_what_is_the_program(response: str, program: str) -> None:
    assert program_in(response) == program


@pytest.mark.parametrize("line", ["`", "```", "` ", "``` x", "\n```a`", "\n```\n", "\n   ```py\n", "\t", "\n"])
def test_no_response_takes_long_to_look_through(line: str) -> None:
    began = time.process_time()
    program_in("```python\n" + line * 200_000 + "x")
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("value", "printed", "same"),
    [
        (0.3, "0.30000000000000004", True),
        (1, "1.0", True),
        (1.0, "1", True),
        (True, "1", False),
        ([1, {"a": None}], '[1, {"a": null}]', True),
        ([1], "[1, 2]", False),
        ("x", '"x"', True),
        (1, "", False),
        (1, "NaN", False),
        (1, "[" * 10**5, False),
        (1, "9" * 5000, False),
        (0.5, "0.5000001", True),
        (1e-30, "2e-30", False),
        ("9" * 5000, "9" * 5000, False),
        (0.5, "1" * 400, False),
    ],
)
def test_values_are_compared_as_json(value: object, printed: str, same: bool) -> None:
    (test,) = parse_tests(json.dumps([{"call": "f()", "value": value}]))
    assert passes(test, f"noise\n{printed}") is same


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb\n", "a  \nb\n\n\n", True),
        ("1 2\n3", "1   2 3", True),
        ("a b", "ab", False),
        ("a", "a a", False),
        ("YES", "Yes", False),
        ("0.5", "0.50", True),
        ("0.333333333", "0.3333333", True),
        ("0.333333", "0.34", False),
        ("2.0", "2", True),
        ("2", "2.0", False),
        ("0010", "10", False),
        ("1e-34", "2e-34", False),
        ("0.0", "-1e-17", True),
        ("1e400", "2e400", False),
        ("1.5", "nan", False),
        ("1" * 9000, "1" * 9000, True),
        ("1" * 9000, "1" * 8999 + "2", False),
    ],
)
def test_output_is_compared_token_by_token(expected: str, printed: str, same: bool) -> None:
    (test,) = parse_tests(json.dumps([{"input": "", "output": expected}]))
    assert passes(test, printed) is same


def test_the_tolerance_is_the_recipe_s() -> None:
    (test,) = parse_tests('[{"input": "", "output": "0.5"}]')
    assert [passes(test, "0.51", tolerance) for tolerance in (0.0, 1e-6, 0.1)] == [False, False, True]
    with Verifiers(PYTHON_TESTS, 1, 10.0, sandbox=None, program_tolerance=0.1) as verifiers:
        assert verdict(verifiers, "print(0.51)", [{"input": "", "output": "0.5"}]).reward == 1.0


TWO_SUM = """
class Solution:
    def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
        seen: Dict[int, int] = defaultdict(int)
        for i, n in enumerate(nums):
            if target - n in seen:
                return [seen[target - n], i]
            seen[n] = i
"""
SECOND = """
class Solution:
    def second(self, head: Optional[ListNode]) -> Optional[ListNode]:
        return head.next
"""
MERGE = """
class Solution:
    def merge(self, nums: List[List[int]]) -> List[int]:
        return list(chain(*nums))
"""

GCD_OF_ALL = """
from math import gcd
class Solution:
    def gcd(self, nums: List[int]) -> int:
        return reduce(gcd, nums)
    def permutations(self, nums: List[int]) -> int:
        return len(list(permutations(nums)))
"""


@pytest.mark.parametrize("verifiers", [None], indirect=True)
@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        pytest.param("print(3)\nraise ValueError", [{"input": "", "output": "3"}], 0.0, id="crashes after its output"),
        pytest.param("import sys\nprint(3)\nsys.exit(1)", [{"input": "", "output": "3"}], 0.0, id="exit status 1"),
        pytest.param("import os\nprint(3, flush=True)\nos.abort()", [{"input": "", "output": "3"}], 0.0, id="abort"),
        pytest.param("print(0.50)\nprint('0.50')", [{"input": "", "output": "0.5\n0.5"}], 1.0, id="0.50 for 0.5"),
        pytest.param("print(1, '', 2)", [{"input": "", "output": "1 2"}], 1.0, id="two blanks"),
        pytest.param("print(1 / 3)", [{"input": "", "output": "0.33333333"}], 1.0, id="float noise"),
        pytest.param(TWO_SUM, [{"call": "twoSum([2, 7, 11, 15], 9)", "value": [0, 1]}], 1.0, id="class Solution"),
        pytest.param(TWO_SUM, [{"call": "Solution().twoSum([3, 3], 6)", "value": [0, 1]}], 1.0, id="Solution()"),
        pytest.param(SECOND, [{"call": "second(ListNode(1, ListNode(2))).val", "value": 2}], 1.0, id="ListNode"),
        pytest.param(MERGE, [{"call": "merge([[1], [2]])", "value": [1, 2]}], 1.0, id="a method called as heapq's"),
        pytest.param(
            GCD_OF_ALL,
            [{"call": "gcd([12, 18])", "value": 6}, {"call": "permutations([1, 2, 3])", "value": 6}],
            1.0,
            id="methods that call what has their name",
        ),
        pytest.param("import sys\nx: List[int] = [3]\nprint(*x)", [{"input": "", "output": "3"}], 1.0, id="typing"),
    ],
)
def test_a_program_is_judged_as_judges_do(verifiers: Verifiers, program: str, tests: object, reward: float) -> None:
    assert verdict(verifiers, program, tests).reward == reward


def test_integers_of_any_size_are_printed_returned_and_compared(verifiers: Verifiers) -> None:
    digits = "9" * 9000
    answer = f'[{{"input": "", "output": "{digits}"}}, {{"call": "big", "value": {digits}}}]'
    response = "```python\nbig = 10**9000 - 1\nprint(big)\n```"
    assert asyncio.run(verifiers.score("", response, answer)) == result(1.0, 1.0)
    assert asyncio.run(verifiers.score("", response, answer.replace("9}", "8}"))) == result(0.0, 0.5)


def test_a_program_that_closes_its_output_and_goes_on_is_cut(verifiers: Verifiers) -> None:
    """It is no failure of the verifier: what it used, or its time, ended it."""
    program = "import os\nprint(3, flush=True)\nos.close(1)\nx = bytearray(10**9)\nwhile True: x = x + x"
    assert verdict(verifiers, program, [{"input": "", "output": "3"}]).reward == 0.0


def test_programs_have_their_module_where_dataclasses_and_main_look(verifiers: Verifiers) -> None:
    program = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class P:
    x: ClassVar[int] = 3

if __name__ == "__main__":
    import pickle
    assert pickle.loads(pickle.dumps(P())) == P()
    print(P.x)
"""
    tests = [{"input": "", "output": "3"}, {"call": "P.x", "value": 3}]
    assert verdict(verifiers, program, tests) == result(1.0, 1.0)
