"""Write the table of host waits in docs/models.md, as tests/models/test_host_waits.py measures it.

python scripts/write_host_waits.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- host waits: scripts/write_host_waits.py -->\n"
END = "<!-- end of host waits -->\n"


def main() -> None:
    """Measure every pipeline of the tests on the simulated device, and write the page."""
    sys.path.insert(0, str(ROOT))
    from tests.models.host_waits import PIPELINES, build, measure, table

    from sidestream.testing import sim

    measured = {name: measure(*build(name, sim.device())) for name in PIPELINES}
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{after}")


if __name__ == "__main__":
    main()
