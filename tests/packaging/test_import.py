"""An import of sidestream is cheap, and without torch the error says what to install."""

import json

import pytest

IMPORT_S = 0.3


def test_importing_sidestream_loads_no_torch_and_no_other_package(installed, site, run_with):
    script = (
        "before = set(sys.modules)\n"
        "import sidestream, sys, sysconfig\n"
        "site = sysconfig.get_path('purelib')\n"
        "files = {n.split('.')[0]: getattr(m, '__file__', None) for n, m in sys.modules.items()}\n"
        "print(sorted(n for n, f in files.items() if f and f.startswith(site)))"
    )
    done = run_with(script, installed, site)
    assert done.stdout.strip() == "[]", done.stderr


def test_importing_sidestream_takes_less_than_a_third_of_a_second(installed, site, run_with):
    script = (
        "import time; began = time.process_time()\n"
        "import sidestream\n"
        "print(time.process_time() - began)"
    )
    # Time on a core: other work on the machine adds to what a clock on the wall would say.
    took = (float(run_with(script, installed, site).stdout) for _ in range(10))
    assert any(seconds < IMPORT_S for seconds in took)


def test_the_public_names_are_there_and_no_others_are_promised(installed, site, run_with):
    script = (
        "import sidestream\n"
        "missing = [name for name in sidestream.__all__ if not hasattr(sidestream, name)]\n"
        "print(missing, dir(sidestream) == sorted(sidestream.__all__))"
    )
    assert run_with(script, installed, site).stdout.strip() == "[] True"


@pytest.fixture(scope="module")
def site_without_torch(site, tmp_path_factory):
    """Link everything that is installed here, except torch."""
    assert (site / "torch").is_dir(), "without it the tests below would prove nothing"
    folder = tmp_path_factory.mktemp("no-torch")
    for path in site.iterdir():
        if not path.name.startswith(("torch-", "functorch", "torchgen")) and path.name != "torch":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("platform", ["cpu", "cuda", None])
def test_an_engine_without_torch_says_what_to_install(
    platform, installed, site_without_torch, run_with
):
    script = (
        "import json, sidestream\n"
        "from sidestream.errors import MissingDependencyError\n"
        "try:\n"
        f"    sidestream.DiffusionEngine(sidestream.EngineConfig("
        f"model='digits', platform={platform!r}))\n"
        "except MissingDependencyError as error:\n"
        "    print(json.dumps([error.package, error.install, str(error)]))"
    )
    done = run_with(script, installed, site_without_torch)
    assert done.returncode == 0, done.stderr
    package, install, message = json.loads(done.stdout)
    assert package == "torch"
    assert "pip install" in install
    assert install in message


def test_the_command_line_without_torch_lists_the_plugins(installed, site_without_torch, run_with):
    script = "from sidestream.cli.main import run; sys.exit(run(['plugins', '--json']))"
    done = run_with(script, installed, site_without_torch)
    assert done.returncode == 0, done.stderr
    states = {plugin["name"]: plugin["state"] for plugin in json.loads(done.stdout)}
    assert states["cuda"] == "absent"
    assert "broken" not in states.values(), done.stdout
