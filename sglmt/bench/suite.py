"""`scripts/bench`: chooses scenarios, runs them one after the other, and writes what they found.

Each scenario starts servers of its own and stops them. A JSON line goes to standard output the moment a scenario
is done, its table and the progress to standard error; `--out` keeps everything as files, with plots.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from sglmt import __version__
from sglmt.bench.bench import Bench
from sglmt.bench.figures import Result
from sglmt.bench.load_client import build
from sglmt.bench.plots import plots
from sglmt.bench.report import json_line, table
from sglmt.bench.scenarios import life, micro, requests, streaming
from sglmt.errors import ExitCode, SglmtError
from sglmt.supervisor.resolve_model import cache_directory

REPEATS = 5
Measure = Callable[[Bench, str], Result]


def all_scenarios() -> dict[str, Measure]:
    """Every scenario by name, in the order they run."""
    return {**streaming.scenarios(), **requests.scenarios(), **life.scenarios(), **micro.scenarios()}


def chosen(names: Sequence[str], known: dict[str, Measure]) -> dict[str, Measure]:
    """The scenarios named, each by its name or the beginning of it; all without names. Raises SglmtError."""
    found: dict[str, Measure] = {}
    for name in names:
        matching = {known_name: known[known_name] for known_name in known if known_name.startswith(name)}
        if not matching:
            raise SglmtError(f"no scenario {name!r}; there are: {', '.join(known)}")
        found |= {name: known[name]} if name in known else matching
    return found or known


def run_all(bench: Bench, scenarios: dict[str, Measure], finished: Callable[[Result], None]) -> list[Result]:
    """Run them; one that fails is told as skipped with its reason, and the others go on."""
    results: list[Result] = []
    for name, measure in scenarios.items():
        try:
            result = measure(bench, name)
        except (SglmtError, subprocess.SubprocessError) as error:
            bench.say(f"{name}: {error}")
            result = Result(name, skipped=f"failed: {str(error).partition(chr(10))[0]}")
        results.append(result)
        finished(result)
    return results


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "version": __version__,
        "unix_s": round(time.time()),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "system": platform.release(),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def write_files(directory: Path, about: dict[str, object], results: Sequence[Result]) -> None:
    """`results.json`, `tables.txt` and the plots."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"about": about, "results": [result.as_json() for result in results]}
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    (directory / "tables.txt").write_text("\n".join(table(result) for result in results), encoding="utf-8")
    for name, svg in plots(results).items():
        (directory / name).write_text(svg, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when every scenario was measured or had a reason not to be."""
    args = _parser().parse_args(argv)
    known = all_scenarios()
    if args.list:
        print("\n".join(known))
        return ExitCode.OK
    try:
        scenarios = chosen(args.scenario, known)
        with tempfile.TemporaryDirectory(prefix="sglmt-bench-") as directory:
            bench = _bench(args, Path(directory))
            about = machine()
            results = run_all(bench, scenarios, _print_result)
    except SglmtError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return ExitCode.KILLED_NOW
    if args.out is not None:
        write_files(args.out, about, results)
    failed = any((result.skipped or "").startswith("failed") for result in results)
    return ExitCode.FAILURE if failed else ExitCode.OK


def _print_result(result: Result) -> None:
    print(json_line(result), flush=True)
    print(table(result), file=sys.stderr, flush=True)


def _bench(args: argparse.Namespace, work_dir: Path) -> Bench:
    repeats = args.repeats or (1 if args.quick else REPEATS)
    client = build(args.load_source, cache_directory(work_dir) / "bench")
    return Bench(client, work_dir, repeats, args.quick, lambda text: print(f"  {text}", file=sys.stderr, flush=True))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure this checkout with the simulator engine, next to a bare server that streams the same.",
    )
    parser.add_argument("scenario", nargs="*", help="names of scenarios, or what they begin with; default: all")
    parser.add_argument("--list", action="store_true", help="list the scenarios")
    parser.add_argument("--quick", action="store_true", help="small loads, once: does it work?")
    parser.add_argument("--repeats", type=_positive, metavar="N", help=f"repeats of each load (default: {REPEATS})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json, tables.txt and SVG plots there")
    checkout = Path(__file__).resolve().parents[2]
    parser.add_argument("--load-source", type=Path, default=checkout / "scripts" / "load.c", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
