"""What the bench measures is checked where no time means anything: order, counts, bounds."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestream.bench.blocks import BLOCK, ratio_of, run_blocks
from sidestream.bench.bubble import bubble
from sidestream.bench.handoff import first_of_batch, handoff
from sidestream.bench.overload import overload
from sidestream.bench.plan import DEVICE
from sidestream.bench.run import TABLES
from sidestream.bench.series import Session, run_series, sample_of
from sidestream.bench.slowdown import slowdown
from sidestream.bench.table import Table, percentile
from sidestream.bench.throughput import throughput
from sidestream.bench.transport import transport
from sidestream.bench.workload import OUTPUTS, Workload, fill_of
from sidestream.errors import InternalError
from sidestream.output import DiffusionOutput

pytestmark = pytest.mark.slow

SMALL = Workload(output="64px", forward_s=0.005)


@pytest.fixture(scope="module")
def session():
    with Session("sim") as session:
        yield session


def test_throughput_counts_outputs_of_both_ways_as_shares_of_the_limit(session):
    (found,) = throughput(session, [SMALL], rounds=2, seconds=0.05)
    (row,), (cell,), samples = found.tables[0].rows, found.cells, found.samples
    assert len(cell.on) == len(cell.off) == 2
    assert row["carrier"] == "slot"
    assert row["made"] == 0
    assert [sample.request_id for sample in samples] == [str(i) for i in range(len(samples))]
    assert all(sample.timings.nbytes == SMALL.nbytes for sample in samples)


def test_forwards_that_wait_find_the_device_idle_and_others_do_not(session):
    (findings,) = bubble(session, [dataclasses.replace(SMALL, forward_s=0.02)], count=12)
    rows = {(row["output"], row["waits"]): row for row in findings.tables[0].rows}
    assert all(
        rows[way, True]["found_idle"] == rows[way, True]["forwards"] for way in ("on", "off")
    )
    assert rows["on", False]["found_idle"] < rows["on", False]["forwards"] / 2
    assert all(row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows.values())


def test_a_dropped_output_is_made_and_not_moved(session):
    engine = session.engine("on")
    kept = run_series(engine, SMALL, 4)
    dropped = run_series(engine, SMALL.without_output(), 4)
    assert [s.timings.nbytes for s in kept.samples] == [SMALL.nbytes] * 4
    assert [s.timings.nbytes for s in dropped.samples] == [0] * 4
    assert len(dropped.forwards) == len(kept.forwards) == 4


def test_kept_and_dropped_outputs_are_compared_in_blocks_that_take_turns(session):
    quick = dataclasses.replace(SMALL, forward_s=0.002)
    ((kept, dropped),) = run_blocks(session.engine("on"), quick, quick.without_output(), 1)
    in_turn = [kept[0], dropped[0], dropped[1], kept[1]]
    # Each with the one forward that follows it.
    began = [forward.began_at for block in in_turn for forward in block[:-1]]
    assert began == sorted(set(began))
    assert len(began) == 4 * BLOCK
    assert [block[-1].began_at for block in in_turn[:3]] == began[BLOCK::BLOCK]
    (found,) = slowdown(session, [quick], rounds=1, seconds=0.02)
    (row,) = found.tables[0].rows
    assert row["groups"] == 1
    assert row["forward_ratio"] > 0
    assert row["period_ratio"] > 0


def test_a_ratio_lies_in_its_interval_which_shrinks_with_more_pairs():
    spread = [(1 + 0.1 * (number % 5 - 2), 1.0) for number in range(25)]
    few, many = ratio_of(spread[:10]), ratio_of(8 * spread)
    assert few.low < few.value == 1.0 < few.high
    assert few.high - few.low > many.high - many.low
    assert ratio_of([(1.02, 1.0)] * 9).interval == "1.0200-1.0200"
    assert math.isnan(ratio_of([]).value)


def test_all_tables_of_an_accelerator_fit_in_six_minutes():
    planned = {name: one.planned_s(DEVICE, engines=2) for name, one in TABLES.items()}
    assert min(planned.values()) > 0
    assert sum(planned.values()) < 420, planned


def test_a_handoff_moves_the_pixels_once_and_makes_nothing(session):
    table, samples = handoff(session, ["64px"], count=6)
    (row,) = table.rows
    assert row["bytes_to_pixels"] == 1
    assert row["made"] == 0
    assert len(samples) == 6
    assert 0 < row["ready_p50_ms"] <= row["read_p50_ms"]


def test_eight_requests_share_a_forward_and_the_first_is_ready_before_the_last(session):
    (row,) = first_of_batch(session, ["64px"], rounds=3).rows
    assert row["forwards"] == 3
    assert row["first_ms"] < row["last_ms"]


@pytest.mark.soak  # two engines of its own
def test_what_is_offered_beyond_the_limit_is_refused_and_what_lies_is_bounded(session):
    table = overload(session, dataclasses.replace(SMALL, forward_s=0.02), seconds=0.6)
    by_load = {row["load"]: row for row in table.rows}
    assert by_load["0.5 x limit"]["refused"] == 0
    assert by_load["4 x limit"]["refused"] > 0
    lying = by_load["nobody takes"]
    assert 0 < lying["held_mb"] <= lying["bound_mb"]


@pytest.mark.soak  # a process of its own
def test_a_tensor_crosses_to_another_process_without_a_page_fault():
    (row,) = transport(["1024px"], seconds=0.2).rows
    assert row["faults"] == 0
    assert row["whole_ms"] > row["memcpy_ms"] > 0


@pytest.mark.soak  # two processes of its own
def test_the_script_that_compares_ways_reads_right_outputs_of_each():
    script = Path(__file__).parents[2] / "scripts" / "bench_variants.py"
    command = [sys.executable, script, "--platform", "sim"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "driver callback: not run: it needs a CUDA driver" in said
    assert re.search(r"read and right: as it is \d+", said)
    assert "failed" not in said


@pytest.mark.parametrize("wrong", ["value", "last", "shape", "number"])
def test_an_output_that_is_not_the_requests_own_ends_the_bench(wrong):
    tensor = torch.full(SMALL.shape, fill_of(3), dtype=torch.uint8)
    if wrong == "value":
        tensor.fill_(4)
    elif wrong == "last":
        tensor[-1, -1, -1, -1] = 0
    elif wrong == "shape":
        tensor = tensor[:, 1:]
    output = DiffusionOutput("2" if wrong == "number" else "3", tensor)
    with pytest.raises(InternalError, match="not that of request 3"):
        sample_of(SMALL, output, 3)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_outputs_bytes_are_those_of_its_tensor(name):
    workload = Workload(output=name)
    tensor = torch.empty(workload.shape, dtype=getattr(torch, workload.dtype), device="meta")
    assert tensor.nbytes == workload.nbytes
    assert next(workload.requests(1)).sampling_params.seed == 0
    assert Workload.of(next(workload.requests(1))) == workload


def test_a_table_shows_goals_that_are_met_and_missed():
    table = Table(name="t", title="Figures")
    table.add(what="a", share=0.99612, none=None)
    table.add(what="b", other=3, share=math.nan)
    table.goal("share", 0.996, bound=0.995, at_least=True)
    table.goal("gap", 60.0, bound=50.0, unit="us")
    table.goal("unknown", None, bound=1)
    table.goal("nan", math.nan, bound=1)
    text = table.to_text()
    assert "0.9961" in text
    assert "met    share: 0.9960 >= 0.9950" in text
    assert "MISSED gap: 60 us <= 50 us" in text
    assert len(table.goals) == 2
    document = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert document["goals"][1]["met"] is False
    assert document["rows"][1]["share"] is None


def test_percentiles_are_values_that_were_seen():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([5.0], 0.01) == 5.0
    assert math.isnan(percentile([], 0.5))
