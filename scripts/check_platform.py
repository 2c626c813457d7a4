"""Check one platform's plugin as it is installed here, with or without the vendor's runtime.

    python scripts/check_platform.py NAME [--not-run FILE]

The plugin imports no torch, its probe says why it is available or not, the doctor has a finding
for it and survives, and the contract suite passes where there is a device. Where there is none the
file gets a line that says so: nothing that was skipped counts as passed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = ROOT / "tests" / "platforms" / "test_contract.py"
IMPORT = "import sys, {module}; sys.exit('torch' in sys.modules)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--not-run", type=Path, help="where to note what was not run")
    options = parser.parse_args()
    listed = sidestream("plugins", "--json", codes=(0,))
    plugin = next(each for each in listed if each["name"] == options.name)
    print(f"{options.name}: {plugin['state']}: {plugin['reason']}", flush=True)
    if plugin["state"] == "broken" or not plugin["reason"]:
        sys.exit("The plugin is broken, or does not say why.")
    run("-c", IMPORT.format(module=plugin["reference"]))
    report = sidestream("doctor", "--json", codes=(0, 1))
    finding = next(each for each in report["platforms"] if each["name"] == options.name)
    print(f"doctor: {finding['state']} ({finding['cause']}): {'; '.join(finding['evidence'])}")
    if plugin["state"] == "available":
        run("-m", "pytest", str(CONTRACT), "-k", options.name)
    else:
        note(options.not_run, f"{options.name}: the contract suite, since {plugin['reason']}")


def sidestream(*arguments: str, codes: tuple[int, ...]) -> Any:
    command = [sys.executable, "-m", "sidestream.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in codes:
        sys.exit(f"sidestream {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def run(*arguments: str) -> None:
    if (code := subprocess.run([sys.executable, *arguments], check=False).returncode) != 0:
        sys.exit(f"python {' '.join(arguments)} ended with {code}")


def note(path: Path | None, line: str) -> None:
    print(f"not run: {line}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
