"""Make somebody else's small engine asynchronous with sidestream's pieces.

The engine below is plain `multiprocessing`: a worker process with a model, a queue of prompts, a
dict of futures. The lines marked with (*) are all that it takes to bring outputs back
asynchronously: the worker starts the next forward while the last output is still on its way.

Run it: python examples/embed.py [platform]
"""

import multiprocessing
import sys
from concurrent.futures import Future

import torch

from sidestream import AsyncOutputThread, ResultChannel, ResultPumpThread, SlotSink, load_platform


def model(prompt, device):
    return torch.full((1024, 1024, 3), float(len(prompt)), device=device)


def worker(platform_name, prompts, ends):
    platform = load_platform(platform_name)
    device = platform.device(0)
    platform.set_device(device)
    sink = SlotSink(ends.messages, ends.releases, platform, device)  # (*)
    with AsyncOutputThread(platform, sink, device=device) as outputs:  # (*)
        for number, prompt in iter(prompts.get, None):
            outputs.submit(str(number), model(prompt, device))  # (*) returns at once


class Engine:
    def __init__(self, platform_name):
        context = multiprocessing.get_context("spawn")
        self.prompts, self.futures = context.Queue(), {}
        channel, ends = ResultChannel.pair()  # (*)
        self.process = context.Process(target=worker, args=(platform_name, self.prompts, ends))
        self.process.start()
        ends.close()  # (*)
        self.pump = ResultPumpThread([channel], self.on_message).start()  # (*)

    def on_message(self, channel, delivery):  # (*) on the pump thread
        self.futures.pop(delivery.async_output_id).set_result(delivery)

    def submit(self, number, prompt):
        future = self.futures[str(number)] = Future()
        self.prompts.put((number, prompt))
        return future

    def close(self):
        self.prompts.put(None)
        self.process.join()
        self.pump.stop()


if __name__ == "__main__":
    engine = Engine(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    words = ["a", "small", "engine", "of somebody else's"]
    futures = [engine.submit(number, word) for number, word in enumerate(words)]
    for word, future in zip(words, futures, strict=True):
        message, _ = future.result(timeout=60).open()  # (*) decoded here, without a copy
        assert (message.output == len(word)).all()
        print(f"{word!r}: {tuple(message.output.shape)} {message.output.dtype}")
    engine.close()
