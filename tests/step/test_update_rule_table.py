"""The table of update rules: each kind has one object, and the object gives the answers that its kind needs."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.config.update_rule import RULE_SPECS, UpdateKind, UpdateRule
from paceline.planner.layout.update_rule_checks import RULE_PLANNING
from paceline.step.step_rule import RuleTraits
from paceline.step.update_rules import STEP_RULES, step_rule
from paceline.verification.reference.select_reference import RULE_REFERENCES

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
SAME_OBJECT = {UpdateKind.DOUBLE: UpdateKind.PIPEDREAM, UpdateKind.DILOCO: UpdateKind.LOCAL}


def test_each_kind_has_one_object() -> None:
    assert set(STEP_RULES) == set(UpdateKind)
    for kind in UpdateKind:
        assert type(STEP_RULES[kind]) is type(STEP_RULES[SAME_OBJECT.get(kind, kind)])
    assert len({type(rule) for rule in STEP_RULES.values()}) == len(UpdateKind) - len(SAME_OBJECT)


@pytest.mark.parametrize("kind", UpdateKind)
def test_the_answers_are_those_of_the_kind(kind: UpdateKind) -> None:
    found = step_rule(UpdateRule(kind=kind)).traits
    has_servers, is_stashed = kind is UpdateKind.PS, kind in (UpdateKind.PIPEDREAM, UpdateKind.DOUBLE)
    has_sites = kind in (UpdateKind.LOCAL, UpdateKind.DILOCO)
    assert found.reads_samples is found.splits_parameters is found.sends_updates is not has_servers
    assert found.accepts_sparse_gradients is has_servers and found.measures_joint_norm is not is_stashed
    assert found.verify_mode == ("replayed" if has_servers else "freely" if is_stashed or has_sites else "stepwise")
    assert kind is not UpdateKind.SYNC or found == RuleTraits()


@pytest.mark.parametrize("table", [RULE_SPECS, RULE_PLANNING, STEP_RULES, RULE_REFERENCES])
def test_each_table_has_a_row_for_each_rule(table: Mapping[UpdateKind, object]) -> None:
    assert list(table) == list(UpdateKind)


def test_only_the_tables_name_a_rule() -> None:
    """What differs between rules is asked of a row, so that a new rule needs no change elsewhere."""
    own = ("config/update_rule.py", "planner/layout/update_rule_checks.py", "step/update_rules.py",
           "verification/reference/select_reference.py", "planner/layout/pipedream_checks.py",
           "step/pipedream/pipedream_rule.py")  # fmt: skip
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        asked = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "UpdateKind"
        }
        assert not asked or name in own, f"{name} asks for {sorted(asked)}"
