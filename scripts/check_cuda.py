"""Check sidestream on an accelerator and print the figures for docs/performance.md.

    python scripts/check_cuda.py [--platform cuda] [--size full] [--requests 6] [--json FILE]

One run checks: the README's snippet, the digits checkpoint, and a full-size Qwen-Image of random
weights, asynchronous against synchronous, bit for bit; that the copy of output N runs during
forward N+1 by the device's own event times; that each output is one copy into page-locked memory;
and what the output thread costs while it waits. It measures requests/s of plain forwards with
outputs of several sizes as shares of the forward alone. Exits with 1 when a check fails.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import platform as host
import signal
import statistics
import sys
import time
from typing import Any

import torch

import sidestream
from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams

failures: list[str] = []
table: list[dict[str, Any]] = []


def check(what: str, ok: bool, detail: str = "") -> None:
    """Print one check's outcome and remember a failure."""
    print(f"{'ok  ' if ok else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
    if not ok:
        failures.append(what)


def row(**figures: Any) -> None:
    """Print one line of figures and keep it."""
    table.append(figures)
    print("  ".join(f"{name}={_show(value)}" for name, value in figures.items()), flush=True)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Gradient:
    """The README's pipeline."""

    @classmethod
    def load(cls, config: Any) -> Gradient:
        self = cls()
        self.device = config.device
        return self

    def forward(self, requests: Any) -> list[torch.Tensor]:
        return [
            torch.full(
                (3, r.sampling_params.height, r.sampling_params.width),
                float(r.sampling_params.seed),
                device=self.device,
            )
            for r in requests
        ]


def snippet(platform: str) -> None:
    """Run the README's snippet."""
    with DiffusionEngine(EngineConfig(pipeline="check_cuda:Gradient", platform=platform)) as engine:
        handles = [
            engine.submit(DiffusionRequest("x", SamplingParams(height=64, width=64, seed=i)))
            for i in range(8)
        ]
        right = True
        for i, handle in enumerate(handles):
            handle.compute_done.result(timeout=30)
            output = handle.result(timeout=30)
            right &= output.output.shape == (3, 64, 64) and bool((output.output == i).all())
        check(f"snippet on {platform}", right, str(engine.stats()))


def deaths(platform: str) -> None:
    """Kill the worker under load: it is restarted, and nobody's output is lost or wrong."""
    with DiffusionEngine(
        EngineConfig(pipeline="check_cuda:Gradient", platform=platform, max_restarts=2)
    ) as engine:
        handles = [
            engine.submit(DiffusionRequest("x", SamplingParams(height=1024, width=1024, seed=i)))
            for i in range(40)
        ]
        handles[3].result(timeout=60)
        engine.executor.workers[0].process.signal_group(signal.SIGKILL)
        right = all(
            bool((handle.result(timeout=120).output == i).all()) for i, handle in enumerate(handles)
        )
        check(f"a killed worker on {platform} is restarted", right and engine.health().ok)


def digits(platform: str) -> None:
    """Draw digits on the platform, asynchronously and synchronously, and on the CPU."""
    drawn = {}
    for name, config in {
        "async": {"platform": platform},
        "sync": {"platform": platform, "async_output": False},
        "cpu": {"platform": "cpu"},
    }.items():
        with DiffusionEngine(EngineConfig(model="digits", dtype="float32", **config)) as engine:
            prompts = [str(n) for n in range(10)]
            drawn[name] = torch.stack([o.output for o in engine.generate(prompts, seed=0)])
    check(f"digits on {platform}: async equals sync", torch.equal(drawn["async"], drawn["sync"]))
    apart = (drawn["async"].int() - drawn["cpu"].int()).abs()
    check(
        f"digits on {platform}: near the CPU's",
        bool((apart > 8).float().mean() < 0.01),
        f"largest difference {int(apart.max())} of 255",
    )


def qwen(platform: str, size: str, requests: int, resolutions: list[int], steps: int) -> None:
    """Run the full-size pipeline both ways, in alternation, and compare bits and times."""
    engines = {}
    for way in ("async", "sync"):
        begun = time.monotonic()
        engines[way] = DiffusionEngine(
            EngineConfig(
                pipeline="full_size_qwen:FullSizeQwen",
                pipeline_options={"size": size},
                platform=platform,
                async_output=way == "async",
            )
        )
        parameters = engines[way].executor.collective_rpc("parameters")[0]
        print(f"-- qwen {way}: up in {time.monotonic() - begun:.0f} s, {parameters:,} parameters")
    for pixels in resolutions:
        work = [_qwen_request(i, pixels, steps) for i in range(requests)]
        outputs, rates = {}, collections.defaultdict(list)
        for way in ("async", "sync"):
            engines[way].generate(work[:2])  # warm: kernels chosen, arenas made
        for _ in range(2):
            for way in ("async", "sync"):
                done, wall_s, cpu = _series(engines[way], work)
                rates[way].append(len(done) / wall_s)
                outputs[way] = done
                is_largest = platform == "cuda" and pixels == max(resolutions)
                report(way, pixels, done, wall_s, cpu, hidden_expected=is_largest)
        row(pixels=pixels, **{f"{way}_requests_per_s": max(r) for way, r in rates.items()})
        same = all(
            torch.equal(a.output, b.output)
            for a, b in zip(outputs["async"], outputs["sync"], strict=True)
        )
        check(f"qwen {pixels} px: async equals sync", same)
        if platform == "cuda":
            one_copy_each(engines["async"], work[:3], pixels)
    for engine in engines.values():
        engine.close()


def _qwen_request(index: int, pixels: int, steps: int) -> DiffusionRequest:
    params = SamplingParams(
        height=pixels, width=pixels, num_inference_steps=steps, true_cfg_scale=4.0, seed=index
    )
    return DiffusionRequest("p" * (index + 1), params)


def _series(
    engine: DiffusionEngine, work: list[DiffusionRequest]
) -> tuple[list[Any], float, float]:
    cpu_s, at = engine.executor.collective_rpc("output_thread_cpu_s")[0]
    begun = time.monotonic()
    done = engine.generate(work)
    wall_s = time.monotonic() - begun
    cpu_end_s, at_end = engine.executor.collective_rpc("output_thread_cpu_s")[0]
    return done, wall_s, (cpu_end_s - cpu_s) / (at_end - at)


class Burn:
    """A forward of a given length that makes an output of a given shape."""

    outputs_are_private = True

    @classmethod
    def load(cls, config: Any) -> Burn:
        self = cls()
        self.device = config.device
        self.shape = tuple(config.options["shape"])
        self.dtype = getattr(torch, config.options["dtype"])
        side = 4096 if self.device.type == "cuda" else 64
        self.matrix = torch.zeros(side, side, device=self.device, dtype=torch.bfloat16)
        self.rounds = 1
        if self.device.type == "cuda":
            self.rounds = self._calibrate(config.options["forward_ms"])
        return self

    def _calibrate(self, forward_ms: float) -> int:
        for rounds in (20, 200):
            torch.cuda.synchronize()
            begun = time.monotonic()
            self._burn(rounds)
            torch.cuda.synchronize()
            per_round = (time.monotonic() - begun) / rounds
        return max(1, round(forward_ms / 1e3 / per_round))

    def _burn(self, rounds: int) -> None:
        for _ in range(rounds):
            self.matrix = self.matrix @ self.matrix

    def forward(self, requests: Any) -> list[torch.Tensor]:
        self._burn(self.rounds)
        # A negative seed: the forward alone, for the limit.
        shape = self.shape if requests[0].sampling_params.seed >= 0 else (1,)
        fill = requests[0].sampling_params.seed % 100
        return [torch.full(shape, fill, device=self.device, dtype=self.dtype)]

    def output_thread_cpu_s(self) -> tuple[float, float]:
        from full_size_qwen import output_thread_cpu_s

        return output_thread_cpu_s()


#: name, output's shape, dtype, forward in ms
WORKLOADS = (
    ("1024 px uint8", (1, 1024, 1024, 3), "uint8", 20),
    ("4 x 1024 px float32", (4, 3, 1024, 1024), "float32", 40),
    ("81 x 720p uint8", (81, 720, 1280, 3), "uint8", 100),
    ("81 x 720p bfloat16", (81, 3, 720, 1280), "bfloat16", 400),
)


def workloads(platform: str, rounds: int) -> None:
    """Measure requests/s, asynchronous and synchronous, as shares of the forward alone."""
    for name, shape, dtype, forward_ms in WORKLOADS:
        if platform != "cuda":
            shape, forward_ms = (2, 8, 8, 3), 1
        engines = {
            way: DiffusionEngine(
                EngineConfig(
                    pipeline="check_cuda:Burn",
                    pipeline_options={"shape": shape, "dtype": dtype, "forward_ms": forward_ms},
                    platform=platform,
                    async_output=way == "async",
                    host_buffer_bytes=2 << 30,
                )
            )
            for way in ("async", "sync")
        }
        count = max(4, min(60, 3000 // forward_ms)) if platform == "cuda" else 3
        rates = collections.defaultdict(list)
        last: list[Any] = []
        for engine in engines.values():
            list(engine.imap(_burn_requests(4, 0)))
        for _ in range(rounds):
            for way, engine, sign in (
                ("limit", engines["async"], -1),
                ("async", engines["async"], 1),
                ("sync", engines["sync"], 1),
            ):
                times, right = [], True
                begun = time.monotonic()
                for i, output in enumerate(engine.imap(_burn_requests(count, sign))):
                    right &= sign < 0 or int(output.output.flatten()[-1]) == i % 100
                    times.append(output.timings)
                rates[way].append(count / (time.monotonic() - begun))
                check(f"{name} {way}: right outputs in order", right) if not right else None
                if way == "async":
                    last = times
        limit = statistics.median(rates["limit"])
        row(
            workload=name,
            forward_ms=statistics.median(t.forward_s for t in last) * 1e3,
            copy_ms=statistics.median(t.copy_s for t in last) * 1e3,
            limit_per_s=limit,
            async_share=statistics.median(rates["async"]) / limit,
            sync_share=statistics.median(rates["sync"]) / limit,
            hidden_share=statistics.median(_hidden(last)),
            device_gap_us=statistics.median(_gaps(last)) * 1e6,
            carrier=last[-1].carrier,
        )
        for engine in engines.values():
            engine.close()


def _burn_requests(count: int, sign: int) -> list[DiffusionRequest]:
    return [
        DiffusionRequest("x", SamplingParams(seed=i if sign >= 0 else -1 - i)) for i in range(count)
    ]


def report(
    way: str,
    pixels: int,
    done: list[Any],
    wall_s: float,
    cpu_share: float,
    *,
    hidden_expected: bool,
) -> None:
    """Print the figures of one series and check the overlap by event times.

    ``hidden_expected``: the device, and not the Python that feeds it, is the limit. Otherwise the
    device waits for its next kernel anyway, and the copy runs then.
    """
    times = [output.timings for output in done]
    gaps, hidden = _gaps(times), _hidden(times)
    copy_s = statistics.median(t.copy_s for t in times)
    row(
        way=way,
        pixels=pixels,
        requests_per_s=len(done) / wall_s,
        forward_ms=statistics.median(t.forward_s for t in times) * 1e3,
        copy_ms=copy_s * 1e3,
        copy_gb_per_s=times[0].nbytes / copy_s / 1e9,
        device_gap_us=statistics.median(gaps) * 1e6,
        hidden_share=statistics.median(hidden),
        output_thread_cpu=cpu_share,
        carrier=times[-1].carrier,
        nbytes=times[0].nbytes,
    )
    if way == "async":
        if hidden_expected:
            check(f"qwen {pixels} px: the copy runs during the next forward", min(hidden) > 0.9)
        check(f"qwen {pixels} px: outputs travel in slots", times[-1].carrier == "slot")
        check(
            f"qwen {pixels} px: bytes are height x width x 3",
            times[0].nbytes == pixels * pixels * 3,
        )
        check(
            f"qwen {pixels} px: the output thread waits without spinning",
            cpu_share < 0.02,
            f"{cpu_share:.4f} of a core",
        )


def _gaps(times: list[Any]) -> list[float]:
    """Give the seconds from one forward's end to the next one's start, on the device."""
    return [b.forward_started_at - a.forward_ended_at for a, b in itertools.pairwise(times)]


def _hidden(times: list[Any]) -> list[float]:
    """Give the share of each copy that ran during the next forward."""
    return [
        max(
            0.0,
            min(a.copy_ended_at, b.forward_ended_at) - max(a.copy_started_at, b.forward_started_at),
        )
        / (a.copy_ended_at - a.copy_started_at)
        for a, b in itertools.pairwise(times)
    ]


def one_copy_each(engine: DiffusionEngine, work: list[DiffusionRequest], pixels: int) -> None:
    """Count the copies that carry pixels, as the device's profiler sees them."""
    call = engine.executor.collective_rpc
    call("start_profile")
    engine.generate(work)
    copies = call("stop_profile")[0]
    large = [(name, nbytes) for name, nbytes in copies if nbytes >= pixels * pixels]
    expected = [("Memcpy DtoH (Device -> Pinned)", pixels * pixels * 3)] * len(work)
    check(f"qwen {pixels} px: one copy into page-locked memory each", large == expected, f"{large}")


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--size", default="full", choices=["full", "tiny"])
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    what = {
        "date": time.strftime("%Y-%m-%d"),
        "sidestream": sidestream.__version__,
        "torch": torch.__version__,
        "python": host.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "command": " ".join(sys.argv),
    }
    print(json.dumps(what, indent=1))
    snippet(arguments.platform)
    deaths(arguments.platform)
    digits(arguments.platform)
    qwen(
        arguments.platform,
        arguments.size,
        arguments.requests,
        arguments.resolutions,
        arguments.steps,
    )
    workloads(arguments.platform, rounds=3)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**what, "failures": failures, "table": table}, file, indent=1)
    print(f"{len(failures)} check(s) failed: {failures}" if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
