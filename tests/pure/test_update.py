"""The words of `--update`: read back as they were meant, and refused with the line to type."""

import pytest

from paceline.errors import LayoutError
from paceline.spec.update import Kind, parse_update


@pytest.mark.parametrize(
    "text",
    [
        "local,every=1000000",
        "ps,staleness=3000000",
        "diloco,every=500,lr=0.12345678",
        "diloco,every=500,momentum=0.9999999",
        "diloco,every=500,mix=0.3333333333333333",
    ],
)
def test_no_digit_is_lost_on_the_way_to_a_rank(text: str) -> None:
    assert str(parse_update(text)) == text and parse_update(str(parse_update(text))) == parse_update(text)


def test_spaces_are_no_part_of_a_name() -> None:
    assert parse_update(" DiLoCo , every = 4, lr = 0.5 ") == parse_update("diloco,every=4,lr=0.5")


@pytest.mark.parametrize(
    ("text", "what", "cause", "hint"),
    [
        ("async", "is no update rule", "did you mean 'sync'", "--update sync"),
        ("diloko", "is no update rule", "did you mean 'diloco'", "--update diloco"),
        ("easgd", "is no update rule", "the rules: sync, pipedream, 2bw, hogwild, local, diloco, ps", "--update sync"),
        ("local,lr=0.7", "no option 'lr'", "diloco has it; those of local: every", "--update diloco,lr=0.7"),
        ("ps,workers=2", "no option 'workers'", "its options: servers, staleness", "--update ps,servers=1"),
        ("pipedream,vertical=true", "vertical takes no value", "", "--update pipedream,vertical"),
        ("2bw,vertical", "no option 'vertical'", "pipedream has it; those of 2bw: none", "--update pipedream,vertical"),
        ("diloco,lr=1e9", "above 0, at most 1,000,000", "", "--update diloco,lr=0.7"),
    ],
)
def test_a_mistyped_rule_says_what_to_type(text: str, what: str, cause: str, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_update(text)
    assert what in caught.value.what and cause in caught.value.cause and caught.value.hint == hint
    parse_update(caught.value.hint.removeprefix("--update "))


def test_every_rule_is_read_by_its_word_alone() -> None:
    assert [parse_update(kind).kind for kind in Kind] == [*Kind]
