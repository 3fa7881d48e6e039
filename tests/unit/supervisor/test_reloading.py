"""What a reload may change, what it refuses, and who is recycled when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglmt.errors import ConfigError
from sglmt.server_args import ServerArgs, flags
from sglmt.supervisor.recycling import JITTER, SAMPLES, YOUNG_S, Recycler, WorkerSample
from sglmt.supervisor.reloading import FIXED, OF_SUPERVISOR, OF_WORKERS, check_model, plan_reload

MIB = 2**20
BEFORE = ServerArgs(workers=4)


def changed(**fields: Any) -> ServerArgs:
    return msgspec.structs.replace(BEFORE, **fields)


def test_every_option_is_in_one_group() -> None:
    groups = [*FIXED, *OF_WORKERS, *OF_SUPERVISOR]
    assert sorted(groups) == sorted(field for field, _ in flags())


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 1), ("host", "::1"), ("name", "b"), ("engine", "simulator"), ("model_path", "/m"), ("detokenizers", 2),
     ("router", "always"), ("tokenizer_path", "/t"), ("max_running_requests", 1), ("ssl_certfile", "/c")],
)  # fmt: skip
def test_what_an_instance_is_cannot_change(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        plan_reload(BEFORE, changed(**{field: value}), None)


def test_mode_cannot_change() -> None:
    with pytest.raises(ConfigError, match="--router always"):
        plan_reload(BEFORE, changed(workers=1), None)
    always = changed(router="always")
    assert plan_reload(always, msgspec.structs.replace(always, workers=1), None).workers == 1


def test_what_can_is_named_and_a_live_number_of_workers_stays() -> None:
    fresh = changed(workers=6, drain_timeout=1.0, api_key=("k",))
    plan = plan_reload(BEFORE, fresh, None)
    assert (plan.changed, plan.workers) == (("workers", "drain_timeout", "api_key"), 6)
    assert plan_reload(BEFORE, fresh, 3).workers == 3
    assert plan_reload(BEFORE, BEFORE, None).changed == ()


def test_a_model_that_was_changed_on_disk_is_refused() -> None:
    model = {"vocab_size": 10, "model_path": "/m"}
    check_model(model, dict(model), same_tokenizer=True)
    with pytest.raises(ConfigError, match="vocab_size"):
        check_model(model, {**model, "vocab_size": 11}, same_tokenizer=True)
    with pytest.raises(ConfigError, match="the tokenizer"):
        check_model(model, model, same_tokenizer=False)


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", MIB), ("800MiB", 800 * MIB), ("1.5 GiB", 1536 * MIB), ("2g", 2048 * MIB)]
)
def test_sizes(text: str, size: int) -> None:
    assert ServerArgs(max_worker_rss=text).max_worker_rss_bytes == size


@pytest.mark.parametrize("text", ["", "lots", "-5MiB", "1KiB", "5 TiB", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-worker-rss"):
        ServerArgs(max_worker_rss=text).validate()


def sample(number: int, rss_mib: float | None, ready_at_s: float = 0.0) -> WorkerSample:
    rss_bytes = None if rss_mib is None else int(rss_mib * MIB)
    return WorkerSample(f"w:{number}", (f"w:{number}", 1), ready_at_s, rss_bytes)


def test_memory_counts_after_several_looks_in_a_row() -> None:
    recycler = Recycler(lambda: 0.0)
    now_s = YOUNG_S + 1
    for rss in [200.0] * (SAMPLES - 1) + [50.0] + [200.0] * (SAMPLES - 1) + [None]:
        assert recycler.look([sample(0, rss)], now_s, 100 * MIB, None) == []
    looks = [recycler.look([sample(0, 200.0), sample(1, 99.0)], now_s, 100 * MIB, None) for _ in range(SAMPLES)]
    assert looks[:-1] == [[]] * (SAMPLES - 1)
    assert looks[-1] == [("w:0", "holds 200 MiB (--max-worker-rss 100 MiB)")]


def test_a_young_worker_may_be_large() -> None:
    recycler = Recycler(lambda: 0.0)
    assert not any(recycler.look([sample(0, 200.0)], YOUNG_S - 1, 100 * MIB, None) for _ in range(SAMPLES * 2))


def test_lifetimes_are_spread() -> None:
    draws = iter([0.0, 0.5, 0.999])
    recycler = Recycler(lambda: next(draws))
    samples = [sample(number, None) for number in range(3)]
    assert recycler.look(samples, 100 * (1 - JITTER) - 1, None, 100.0) == []
    assert [name for name, _ in recycler.look(samples, 85.0, None, 100.0)] == ["w:2"]
    assert [name for name, _ in recycler.look(samples, 95.0, None, 100.0)] == ["w:1", "w:2"]
    assert len(recycler.look(samples, 100.0, None, 100.0)) == 3
