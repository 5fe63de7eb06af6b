"""What is said of running programs: how they are shut off, and the tests they are scored by."""

import pytest

from covey.plan.facts import GoldFacts, SandboxFacts
from support.checks import Case, assert_fixes_mend, assert_says, facts, found

OPEN = SandboxFacts(
    lacks=("no network", "limits"), reasons=("bubblewrap is not installed",), is_installed=False
)
FORBIDDEN = SandboxFacts(lacks=("no network",), reasons=("setting up uid map: Permission denied",))
TESTS = GoldFacts(num_checked=200, num_bad=12, examples=((3, "", "there are no test_cases"),))
CODE = {"reward_funcs": ["code_reward"]}

CASES = [
    Case(code="E328", option="reward_funcs", options=CODE, left=("W121",),
         facts=facts(rewards={"sandbox": OPEN}),
         words="cannot run programs safely. Tried: bubblewrap is not installed."),
    Case(code="E328", option="reward_funcs", options=CODE, left=("W121",),
         facts=facts(rewards={"sandbox": FORBIDDEN}),
         words="cannot run programs safely. Tried: setting up uid map: Permission denied."),
    Case(code="W121", option="unsafe_exec", options={**CODE, "unsafe_exec": True},
         facts=facts(rewards={"sandbox": OPEN}),
         words="Programs that the model writes run without: no network, "
               "limits. No sandbox works on this machine"),
    Case(code="E329", option="max_bad_gold", options=CODE, left=("W111",),
         facts=facts(rewards={"code_tests": TESTS}),
         words="The tests of 12 of 200 rows cannot be run (6.0%). row 3: there are no test_cases."),
    Case(code="W111", option="max_bad_gold", options={**CODE, "max_bad_gold": 0.06},
         facts=facts(rewards={"code_tests": TESTS}), words="The tests of 12 of 200 rows"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_says_and_mends(case: Case) -> None:
    assert_says(case)
    assert_fixes_mend(case)


def test_isolation_and_good_tests_say_nothing() -> None:
    good = facts(rewards={"sandbox": SandboxFacts(), "code_tests": GoldFacts(num_checked=200, num_bad=0)})
    assert found(good, **CODE) == [] == found(good, **CODE, unsafe_exec=True)


def test_the_fix_installs_bubblewrap_or_lets_it_make_namespaces() -> None:
    for sandbox, fix in ((OPEN, "conda install -c conda-forge bubblewrap"), (FORBIDDEN, "apparmor")):
        for unsafe in (False, True):
            (problem,) = found(facts(rewards={"sandbox": sandbox}), **CODE, unsafe_exec=unsafe)
            assert fix in problem.fixes[0].text


def test_where_no_row_can_be_tested_leaving_them_out_is_no_fix() -> None:
    none = facts(rewards={"code_tests": GoldFacts(num_checked=3, num_bad=3, examples=((1, "", "none"),))})
    (problem,) = found(none, **CODE)
    assert problem.code == "E329" and len(problem.fixes) == 1
