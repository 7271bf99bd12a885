"""The check of a GPU: its speed is that of products that are done, and not only asked for."""

from types import SimpleNamespace

import torch

from slurmft.worker import gpu_check


def test_products_are_timed_until_the_device_is_done(monkeypatch):
    happened: list[str] = []

    def perf_counter() -> float:
        happened.append("clock")
        return float(len(happened))

    monkeypatch.setattr(gpu_check, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(gpu_check, "_wait", lambda _: happened.append("wait"))
    facts = gpu_check.check_device(torch.device("cpu"), size=64, memory_share=0.01)
    assert facts["wrong"] == ""
    assert happened == ["clock", "wait", "clock", "clock", "wait", "clock", "wait"]


def test_it_waits_for_the_gpu_that_is_checked(monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    gpu_check._wait(torch.device("cpu"))
    gpu_check._wait(torch.device("cuda", 3))
    assert waited == [torch.device("cuda", 3)]
