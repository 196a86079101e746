"""Both sides timed alike: on a GPU replays of CUDA graphs with events around them, by turns (A B A B); elsewhere plain calls, which only show that
everything runs."""
import time

import torch

from figures import spread


class Op:
    """What is timed: one function(stream) for each weight copy, doing `per_call` of what is counted as one."""

    def __init__(self, name, side, fns, nbytes, per_call=1, eager=False):
        self.name, self.side, self.fns, self.nbytes, self.per_call, self.eager = name, side, fns, nbytes, per_call, eager


class Timer:
    def __init__(self, device, replays):
        self.device, self.replays = device, replays
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def _calls(self, op, cold, min_calls):
        fns = op.fns if cold else op.fns[:1]
        return fns * max(1, -(-min_calls // len(fns)))

    def _runner(self, op, cold, min_calls):
        """A function that does it all once, and how many it does."""
        calls = self._calls(op, cold, min_calls)
        n = len(calls) * op.per_call
        if self.device != "cuda":
            return (lambda: [fn(None) for fn in calls]), n
        handle = self.stream.cuda_stream
        with torch.cuda.stream(self.stream):
            for fn in calls[:len(op.fns)]:  # libraries start, scratch grows, Triton compiles
                fn(handle)
        torch.cuda.synchronize()
        if op.eager:
            return (lambda: [fn(handle) for fn in calls]), n
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for fn in calls:
                fn(torch.cuda.current_stream().cuda_stream)
        return graph.replay, n

    def _once(self, runner, eager):
        if self.device != "cuda":
            start = time.perf_counter()
            runner()
            return lambda: time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            if not eager:
                torch.cuda._sleep(200_000)  # cycles, in which the host hands over the graph: its launch is not what is timed
            first.record()
            runner()
            last.record()
        return lambda: first.elapsed_time(last) * 1e-3

    def compare(self, ops, cold, min_calls):
        """Spreads of the seconds of one, in the order of the ops; every op has its turn in every round."""
        if self.device == "cuda":
            torch.cuda.synchronize()  # the inputs were made in another stream
        runners = [self._runner(op, cold, min_calls) for op in ops]
        samples = [[] for _ in ops]
        with torch.inference_mode():
            for round_ in range(self.replays + 2):  # two to settle
                for i, (runner, n) in enumerate(runners):
                    elapsed = self._once(runner, ops[i].eager)
                    if self.device == "cuda":
                        torch.cuda.synchronize()
                    if round_ >= 2:
                        samples[i].append(elapsed() / n)
        return [spread(s) for s in samples]
