"""What is in the wheel: core and the vendors, their data, and entry points that load."""

import configparser
import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENDORS = ("cuda", "musa", "npu", "rocm", "xpu")
PACKAGES = {
    "sidestream": ROOT / "core" / "sidestream",
    **{f"sidestream_{name}": ROOT / "plugins" / name / f"sidestream_{name}" for name in VENDORS},
}
DIGITS_BYTES = 2_000_000


@pytest.fixture(scope="module")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def dist_info(archive, name):
    (member,) = (each for each in archive.namelist() if each.endswith(f".dist-info/{name}"))
    return archive.read(member).decode()


def test_the_top_level_names_are_the_packages(archive):
    tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_source_and_data_file_is_in_it_byte_for_byte(archive, package):
    folder = PACKAGES[package]
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert folder / "py.typed" in files
    for path in files:
        member = f"{package}/{path.relative_to(folder).as_posix()}"
        assert archive.read(member) == path.read_bytes(), member
    members = [name for name in archive.namelist() if name.startswith(f"{package}/")]
    assert len(members) == len(files)


def test_the_digits_checkpoint_is_in_it_and_small(archive):
    prefix = "sidestream/models/checkpoints/digits/"
    files = [info for info in archive.infolist() if info.filename.startswith(prefix)]
    names = {info.filename.removeprefix(prefix) for info in files}
    assert {"model_index.json", "generation_config.json", "README.md"} <= names
    assert {"transformer", "text_encoder", "vae", "tokenizer", "scheduler"} <= {
        name.split("/")[0] for name in names
    }
    assert sum(info.file_size for info in files) < DIGITS_BYTES


def test_the_base_asks_for_no_torch(archive):
    metadata = email.message_from_string(dist_info(archive, "METADATA"))
    base = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0].split("<")[0] for line in base) == [
        "click",
        "numpy",
        "pillow",
        "pluggy",
    ]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_license_is_in_it(archive):
    (member,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
    assert archive.read(member) == (ROOT / "LICENSE").read_bytes()


def test_the_entry_points_are_the_platforms_the_command_and_the_pytest_plugin(archive):
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(dist_info(archive, "entry_points.txt"))
    assert {group: dict(parser[group]) for group in parser.sections()} == {
        "console_scripts": {"sidestream": "sidestream.cli.main:main"},
        "pytest11": {"sidestream": "sidestream.testing.pytest_plugin"},
        "sidestream.platforms": {
            **{name: f"sidestream_{name}" for name in VENDORS},
            "sim": "sidestream.testing.sim",
        },
    }


def test_every_entry_point_loads_from_the_installed_wheel(installed, site, run_with):
    script = (
        "from importlib.metadata import distribution\n"
        "for entry in distribution('sidestream').entry_points:\n"
        "    entry.load()\n"
        "import sidestream; print(sidestream.__file__)"
    )
    done = run_with(script, installed, site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "sidestream" / "__init__.py")


def test_check_wheel_contents_has_nothing_to_say(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "check_wheel_contents", wheel],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
