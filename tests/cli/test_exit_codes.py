"""What a shell sees of a failure: one line, and an exit code that says whose fault it was."""

import subprocess
import sys

import pytest

from sidestream.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["generate", "digits", "--prompt", "7"], "Missing option '--out'"),
        (["generate", "digits", "--out", "."], "give --prompt or --prompts"),
        (["generate", "digits", "--out", ".", "--height", "0"], "Invalid value for '--height'"),
        (["generate", "digits", "--out", ".", "--dtype", "int8"], "Invalid value for '--dtype'"),
        (["generate", "digits", "--out", ".", "--prompts", "not-there"], "No such file"),
        (["generate", "x", "--out", ".", "--image", "not-there"], "there is no file 'not-there'"),
        (["generate", "x", "--out", ".", "--image", __file__], "can't be read as a picture (Uni"),
        (["generate", "x", "--out", ".", "--image", "."], "'.' can't be read as a picture (IsADir"),
        (["make-checkpoint", "qwen-image"], "Missing argument 'FOLDER'"),
    ],
)
def test_wrong_use_is_code_2_and_says_what_is_wrong(arguments, complaint, capsys):
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.out == ""


def test_no_command_shows_the_commands(capsys):
    assert run([]) == 2
    assert "make-checkpoint" in capsys.readouterr().err


def test_help_and_version_are_code_0(capsys):
    assert run(["--help"]) == 0
    assert run(["generate", "-h"]) == 0
    assert run(["--version"]) == 0
    assert "sidestream 0." in capsys.readouterr().out


def test_a_failure_is_code_1_and_one_line(tmp_path, capsys):
    arguments = ["generate", "digits", "--prompt", "7", "--out", str(tmp_path)]
    assert run([*arguments, "--platform", "no-such-platform"]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("Error: ")
    assert "no-such-platform" in shown[0]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_verbose_shows_the_traceback_on_either_side_of_the_command(before, tmp_path, capsys):
    command = ["generate", "digits", "--prompt", "7", "--out", str(tmp_path)]
    command += ["--platform", "no-such-platform"]
    assert run(["--verbose", *command] if before else [*command, "--verbose"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_devices_that_share_a_model_reach_the_engine(tmp_path, capsys):
    command = ["generate", "digits", "--prompt", "7", "--out", str(tmp_path)]
    options = ["--tensor-parallel-size", "2", "--device", "3", "--stream"]
    assert run([*command, *options]) == 1
    # There are as many devices, else it would be told of these.
    assert "tensor_parallel_size=2 is not possible" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    assert run(["generate", "digits", "--prompt", "7", "--out", str(blocker / "below")]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert str(blocker) in shown[0]


def test_help_needs_neither_torch_nor_numpy_nor_pillow():
    script = (
        "import sys; from sidestream.cli.main import run; run(['--help']); "
        "print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.endswith("set()\n")
