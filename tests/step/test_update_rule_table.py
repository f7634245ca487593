"""The table of update rules: each kind has one object, and the object gives the answers that its kind needs."""

import ast
from pathlib import Path

import pytest

from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.step.step_rule import RuleTraits
from paceline.step.update_rules import STEP_RULES, step_rule

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
SAME_OBJECT = {UpdateKind.DOUBLE: UpdateKind.PIPEDREAM, UpdateKind.DILOCO: UpdateKind.LOCAL}


def test_each_kind_has_one_object() -> None:
    assert set(STEP_RULES) == set(UpdateKind)
    for kind in UpdateKind:
        assert type(STEP_RULES[kind]) is type(STEP_RULES[SAME_OBJECT.get(kind, kind)])
    assert len({type(rule) for rule in STEP_RULES.values()}) == len(UpdateKind) - len(SAME_OBJECT)


@pytest.mark.parametrize("kind", UpdateKind)
def test_the_answers_are_those_of_the_kind(kind: UpdateKind) -> None:
    update = UpdateRule(kind=kind, servers=int(kind is UpdateKind.PS))
    found = step_rule(update).traits
    assert found.reads_samples is found.divides_parameters is found.spreads_updates is not update.has_servers
    assert found.takes_sparse is update.has_servers and found.measures_joint_norm is not update.is_stashed
    other = "replayed" if update.has_servers else "freely" if update.is_stashed or update.has_sites else "stepwise"
    assert found.verified == other
    assert kind is not UpdateKind.SYNC or found == RuleTraits()


def test_the_loop_does_not_ask_which_rule_runs() -> None:
    for name in ("trainer/loop.py", "trainer/session.py", "trainer/setup/build_training_setup.py"):
        tree = ast.parse((SOURCE / name).read_text())
        asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not asked & {"has_servers", "has_sites", "is_stashed"}, name
