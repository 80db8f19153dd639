"""Options with a typo, and a COMMAND without ``--``: one sentence that says what was probably meant."""

import argparse
import subprocess
from pathlib import Path

import pytest
from commands import BIN, assert_one_error, mpirun, run_fanstore
from mounting import command

from fanstore.cli.common import parse
from fanstore.cli.fanstore import parsers
from fanstore.errors import UsageError


def long_options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings if len(option) > 4]


@pytest.mark.parametrize("program", parsers())
def test_every_option(program: str) -> None:
    """With a letter too few, and with two letters in the wrong order; alone, and with a value."""
    parser = parsers()[program]
    for option in long_options(parser):
        for typo in (option[:4] + option[5:], option[:3] + option[4] + option[3] + option[5:]):
            if typo in (option, *long_options(parser)):
                continue
            for words in ([typo], [f"{typo}=x", "a"]):
                with pytest.raises(UsageError) as caught:
                    parse(parser, words)
                sentence = str(caught.value)
                assert sentence.startswith(f"there is no option {typo}; did you mean ")
                assert option in sentence.removeprefix(f"there is no option {typo}").rstrip("?").split()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("mount d.fan m --ouput o", "there is no option --ouput; did you mean --output?"),
        ("mount d.fan m --ouput o -- true", "there is no option --ouput; did you mean --output?"),
        ("mount d.fan m --out o", "there is no option --out; did you mean --output?"),
        ("mount d.fan m --engine nativ", "argument --engine: invalid choice: 'nativ'"),
        ("prep a b --cdoec lz4", "there is no option --cdoec; did you mean --codec?"),
        ("prep a", "the following arguments are required: OUT; see fanstore-prep --help"),
        ("umount a b", "'b' is one argument too many; see fanstore-umount --help"),
        ("stat m --jsno", "there is no option --jsno; did you mean --json?"),
        ("verify d.fan --agianst x", "there is no option --agianst; did you mean --against?"),
        ("doctor --sharde x", "there is no option --sharde; did you mean --shared?"),
        ("plan simulate --polciy naive", "there is no option --polciy; did you mean --policy?"),
        ("plan simulat", "argument COMMAND: invalid choice: 'simulat'"),
        (
            "mount d.fan m python train.py --data x",
            "a COMMAND such as 'python' goes behind --, as in: fanstore-mount d.fan m -- python train.py --data x",
        ),
        (
            "mount d.fan m --output o python train.py --output x --local",
            "a COMMAND such as 'python' goes behind --, as in: "
            "fanstore-mount d.fan m --output o -- python train.py --output x --local",
        ),
        (
            "mount d.fan m train -- x",
            "a COMMAND such as 'train' goes behind --, as in: fanstore-mount d.fan m -- train x",
        ),
    ],
)
def test_the_sentence(words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *arguments = words.split()
    result = command(name, *arguments)
    assert assert_one_error(result, name, 2).startswith(sentence)
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_command_with_a_typo() -> None:
    result = subprocess.run([BIN / "fanstore", "moutn"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("fanstore: error: ") and "did you mean mount or umount?" in result.stderr


@pytest.mark.parametrize("words", [("mount", "d.fan", "m{rank}", "--ouput", "o"), ("prep", "a", "b", "--cdoec", "lz4")])
def test_said_once(words: tuple[str, ...]) -> None:
    pytest.importorskip("mpi4py")
    result = run_fanstore(*words, prefix=mpirun(2))
    assert result.returncode == 2
    assert result.stderr.count("there is no option") == 1 and "did you mean" in result.stderr
