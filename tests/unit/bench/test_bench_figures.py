"""Figures, reports, plots, texts and the choice of scenarios: all without a server."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from sglmt.bench.figures import Result, at_least, at_most, percentile, rounded, short
from sglmt.bench.load_client import build, write_bodies
from sglmt.bench.plots import Row, Segment, bar_chart, plots
from sglmt.bench.report import json_line, table
from sglmt.bench.scenarios.micro import keys_of, split_and_encode, text_batch, token_batch, writer
from sglmt.bench.suite import all_scenarios, chosen, run_all, write_files
from sglmt.bench.texts import prompts, prose, sentences
from sglmt.errors import ResourceError, SglmtError


def paced_result(times_floor: float = 1.1) -> Result:
    result = Result("paced-256", {"streams": 256})
    for value in (1.0, 3.0, 2.0):
        result.add("tokens", "tok/s", 12_000 + value, at_least(12_001))
        result.add("cpu_all", "µs/token", value, at_most(1.5))
        result.add("cpu_floor", "µs/token", value / times_floor)
        result.add("times_floor", "×", times_floor)
        result.add("cpu_scheduler", "µs/token", value / 2)
    return result


def test_a_figure_is_the_median_of_its_repeats_and_keeps_their_spread() -> None:
    shown = paced_result().as_json()["figures"]
    assert shown["cpu_all"] == {
        "unit": "µs/token", "median": 2.0, "min": 1.0, "max": 3.0, "n": 3, "bar": "≤ 1.5", "met": False,
    }  # fmt: skip
    assert shown["tokens"]["met"] is True
    assert "bar" not in shown["cpu_floor"]


@pytest.mark.parametrize(("bar", "value", "met"), [
    (at_least(10), 10, True), (at_least(10), 9.99, False), (at_most(10), 10, True), (at_most(10), 10.01, False),
])  # fmt: skip
def test_a_bar_includes_its_own_value(bar: object, value: float, met: bool) -> None:
    assert bar.is_met(value) is met  # type: ignore[attr-defined]


def test_numbers_are_shown_with_the_digits_that_mean_something() -> None:
    assert [short(value) for value in (0.1234, 12.345, 123.4, 45678.0, math.nan)] == [
        "0.123",
        "12.3",
        "123",
        "45,678",
        "–",
    ]
    assert [rounded(value) for value in (0.123456, 12345.6, math.inf)] == [0.1235, 12346, None]


def test_percentiles_of_ascending_values() -> None:
    values = [float(value) for value in range(101)]
    assert [percentile(values, quantile) for quantile in (0, 0.5, 0.99, 1)] == [0, 50, 99, 100]
    assert math.isnan(percentile([], 0.5))


def test_the_json_line_is_one_line_and_the_table_says_which_bars_are_missed() -> None:
    result = paced_result()
    result.notes.append("noisy machine")
    line = json_line(result)
    assert "\n" not in line
    assert json.loads(line)["scenario"] == "paced-256"
    lines = table(result).splitlines()
    assert lines[0].startswith("paced-256  streams=256")
    assert any("cpu_all" in row and row.endswith("NOT MET") for row in lines)
    assert any("tokens" in row and row.endswith(" met") for row in lines)
    assert lines[-1].strip() == "note: noisy machine"


def test_a_skipped_scenario_says_why() -> None:
    result = Result("scale-1-8", skipped="no such verb")
    assert json.loads(json_line(result)) == {"scenario": "scale-1-8", "skipped": "no such verb"}
    assert "skipped: no such verb" in table(result)


def test_plots_are_well_formed_and_only_of_what_was_measured(tmp_path: Path) -> None:
    assert plots([Result("scale-1-8", skipped="x")]) == {}
    write_files(tmp_path, {"cores": 2}, [paced_result(), Result("scale-1-8", skipped="x")])
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json", "tables.txt", "cpu-times-floor.svg", "cpu-by-role.svg", "throughput.svg",
    }  # fmt: skip
    for path in tmp_path.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert json.loads((tmp_path / "results.json").read_text())["about"] == {"cores": 2}


def test_bars_are_as_long_as_their_values() -> None:
    svg = bar_chart(
        "A <title>", "µs", [Row("a&b", [Segment("x", 1.0), Segment("y", 3.0)]), Row("c", [Segment("x", 2.0)])]
    )
    widths = [
        float(bar.attrib["width"])
        for bar in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
        if bar.attrib["height"] != "11"  # the legend's
    ]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)
    assert widths[2] == pytest.approx(2 * widths[0], abs=0.2)


def test_prompts_differ_repeat_with_their_seed_and_have_the_length_asked_for() -> None:
    made = prompts(200, 128, seed=1, chars_per_token=4.0)
    assert len(set(made)) == 200
    assert made == prompts(200, 128, seed=1, chars_per_token=4.0)
    assert not set(made) & set(prompts(200, 128, seed=2, chars_per_token=4.0))
    assert all(512 - 40 < len(text) <= 512 for text in made)
    assert len(prose(10, random.Random(0))) <= 10


def test_sentences_are_plenty_and_prose() -> None:
    assert len(sentences()) > 1000
    assert all("\n" not in sentence and len(sentence.split()) >= 5 for sentence in sentences())


def test_scenarios_are_chosen_by_name_or_by_what_names_begin_with() -> None:
    known = all_scenarios()
    assert chosen([], known) == known
    assert list(chosen(["paced-256"], known)) == ["paced-256"]
    assert list(chosen(["short-2048", "free"], known)) == ["short-2048-huggingface", "short-2048-fastokens", "free-256"]
    with pytest.raises(SglmtError, match="no scenario 'nope'; there are: paced-64, "):
        chosen(["nope"], known)


def test_a_scenario_that_fails_is_told_and_the_others_run() -> None:
    def broken(bench: object, name: str) -> Result:
        raise SglmtError("the server is on fire\nand more lines")

    said: list[str] = []
    bench = type("Fake", (), {"say": lambda _self, text: said.append(text)})()
    told: list[Result] = []
    results = run_all(bench, {"a": broken, "b": lambda _bench, name: Result(name)}, told.append)
    assert results == told
    assert [(result.scenario, result.skipped) for result in results] == [
        ("a", "failed: the server is on fire"),
        ("b", None),
    ]
    assert "and more lines" in said[0]


def test_request_bodies_are_lines(tmp_path: Path) -> None:
    path = write_bodies(tmp_path / "bodies", [b"{}", b'{"a":1}'])
    assert path.read_bytes() == b'{}\n{"a":1}\n'
    with pytest.raises(ValueError, match="one line"):
        write_bodies(path, [b"{\n}"])


def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "load.c"
    source.write_text("int main(void) { return 0; }\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match=r"no C compiler found \(gcc, clang, cc\)"):
        build(source, tmp_path / "cache")
    with pytest.raises(ResourceError, match="runs in a checkout"):
        build(tmp_path / "missing.c", tmp_path)


def test_the_micro_loads_are_what_the_processes_send() -> None:
    keys = keys_of(64)
    token_batch(keys, 0, list(range(64))).check()
    batch = text_batch(keys, 3)
    batch.check()
    assert split_and_encode(batch, writer()) == 8
