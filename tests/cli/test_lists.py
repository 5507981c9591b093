"""Lists by comma, and other options, as they are typed."""

import re

import pytest

from plait.cli import main
from plait.cli_lists import axes, changes, entries, names
from plait.core_ir.errors import UsageError


def test_spaces_mean_nothing() -> None:
    assert axes(" data= 2 , expert =4") == {"data": 2, "expert": 4}
    assert changes("num_layers = 8, tied_head= true") == {"num_layers": 8, "tied_head": True}


@pytest.mark.parametrize("text", ["data=2,data=2", "data=2,data=3", "stage=2", "data", "data=0"])
def test_axes_stand_once_each_with_a_size(text: str) -> None:
    with pytest.raises(UsageError, match="each once with its size"):
        axes(text)


@pytest.mark.parametrize("text", ["dim=8,dim=8", "dim=8,dim=16", "dim", "=8", "dim="])
def test_fields_stand_once_each_with_a_value(text: str) -> None:
    with pytest.raises(UsageError, match="each once with its value"):
        changes(text)


def test_names_stand_once_and_entries_as_often_as_they_do() -> None:
    assert names("torch, flax,torch") == ("torch", "flax")
    assert entries("layers.2,, layers.2") == ("layers.2", "layers.2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--timeout", "nan"), "Invalid value for '--timeout'"),
        (("--timeout", "-1"), "Invalid value for '--timeout'"),
        (("--timeout", "inf"), "Invalid value for '--timeout'"),
        (("--split", "layers.2,layers.2"), "--split names layers.2 twice"),
        (("--timeline", "steps.txt"), "name a file that ends in .html, not steps.txt"),
        (("--mesh", "data=1000"), r"2000 ranks \(stage 2 x data 1000\) on this machine, whose"),
    ],
)
def test_mistakes_are_code_2(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(("compare", "llama", *options))
    assert caught.value.code == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert re.search(message, said)
    assert "starting" not in said
