"""``sidestream bench`` as a user calls it."""

import json

import pytest
from PIL import Image

pytestmark = pytest.mark.slow


def test_throughput_on_sim_checks_order_and_writes_figures_plot_and_trace(start, tmp_path):
    process = start(
        *("bench", "throughput", "--platform", "sim", "--forward-ms", "5", "--output", "64px"),
        *("--json", tmp_path / "figures.json", "--plot", tmp_path / "plot.png"),
        *("--trace", tmp_path / "trace.json"),
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "5 ms, 64px" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["about"]["platform"] == "sim"
    (row,) = figures["tables"][0]["rows"]
    assert row["carrier"] == "slot"
    assert 0 < row["off"] < 2
    with Image.open(tmp_path / "plot.png") as plot:
        assert plot.width == 1200
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"forward", "copy", "pump", "consumer"} <= set(lanes.values())
    spans = {(e["name"], lanes[e["tid"]]): e for e in events if e["ph"] == "X"}
    ready = spans["0", "pump"]["ts"] + spans["0", "pump"]["dur"]
    assert abs(spans["0", "consumer"]["ts"] - ready) < 1  # microseconds


def test_an_unknown_output_is_a_wrong_use(start):
    process = start("bench", "handoff", "--platform", "sim", "--output", "9px")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "'9px' is not one of '64px'" in err
