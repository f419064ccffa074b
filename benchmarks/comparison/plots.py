"""A comparison as pictures: throughput, latency percentiles, the cost of adapters.

Needs matplotlib, which the bench extra brings.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comparison.findings import Finding, is_ours, throughput_over
from loraplex.bench.statistics import Percentiles, RunStatistics

_HEIGHT_INCHES = 4.2
_WIDTH_INCHES = 9.0
_OUR_COLORS = {
    (32, True): "#0b3d91",
    (16, True): "#2f7ed8",
    (8, True): "#8cc5f0",
    (32, False): "#0b6e6e",
    (16, False): "#17a2a2",
    (8, False): "#86d5d0",
}
"""Colours by weight bits, and whether requests come over HTTP."""
_PEER_COLORS = (
    "#b5651d",
    "#d98b4a",
    "#8a8a8a",
    "#5a7d3a",
    "#9bbf72",
    "#7a4a8a",
    "#b08ac0",
    "#c9b037",
)
_TAX_CASES = {"W2-32": 0, "tax-1": 1, "tax-2": 2, "tax-4": 4, "tax-8": 8, "tax-16": 16, "W3-32": 32}


def write_plots(findings: Sequence[Finding], stem: Path) -> list[Path]:
    """Write STEM-throughput.svg and so on, those that there are figures for; gives their paths."""
    standard = [f for f in findings if f.stage == "standard" and f.median is not None]
    drawings: dict[str, Callable[[Axes], bool]] = {
        "throughput": lambda axes: _throughput(axes, standard),
        "ttft": lambda axes: _latency(
            axes, standard, "time to first token, ms", lambda run: run.time_to_first_token
        ),
        "itl": lambda axes: _latency(
            axes, standard, "between tokens, ms", lambda run: run.inter_token_latency
        ),
        "lora-tax": lambda axes: _lora_tax(axes, standard),
    }
    paths = []
    # The same findings shall give the same bytes; text stays text.
    with mpl.rc_context({"svg.hashsalt": "loraplex", "svg.fonttype": "none"}):
        for name, draw in drawings.items():
            figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
            axes = figure.add_subplot()
            if draw(axes):
                path = stem.with_name(f"{stem.name}-{name}.svg")
                figure.savefig(path, metadata={"Date": None})
                paths.append(path)
    return paths


def _throughput(axes: Axes, findings: Sequence[Finding]) -> bool:
    """Bars by workload, with whiskers from the lowest to the highest round."""
    cases = [case for case in dict.fromkeys(f.case for f in findings) if "tax" not in case]
    systems = _systems(findings)
    width = 0.8 / max(1, len(systems))
    for position, (name, color) in enumerate(systems.items()):
        for place, case in enumerate(cases):
            for finding in findings:
                if (finding.case, finding.subject.name) == (case, name) and finding.throughput:
                    rate = finding.throughput
                    axes.bar(
                        place + (position - (len(systems) - 1) / 2) * width,
                        rate.median,
                        width,
                        color=color,
                        yerr=[[rate.median - rate.low], [rate.high - rate.median]],
                        error_kw={"elinewidth": 0.8},
                        label=name if name not in _labels(axes) else None,
                    )
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("output tokens per second")
    axes.set_title("Throughput (higher is better)")
    return _finish(axes, has_any=bool(cases))


def _latency(
    axes: Axes,
    findings: Sequence[Finding],
    label: str,
    latency: Callable[[RunStatistics], Percentiles | None],
) -> bool:
    """Plot for each workload and system the 50th, 90th and 99th percentile as a line with a dot."""
    cases = [case for case in dict.fromkeys(f.case for f in findings) if "tax" not in case]
    systems = _systems(findings)
    step = 0.8 / max(1, len(systems))
    for position, (name, color) in enumerate(systems.items()):
        for finding in findings:
            found = finding.median and latency(finding.median)
            if finding.subject.name == name and finding.case in cases and found:
                place = cases.index(finding.case) + (position - (len(systems) - 1) / 2) * step
                values = [value * 1e3 for value in (found.p50, found.p90, found.p99)]
                axes.plot([place] * 3, values, color=color, linewidth=1.2)
                axes.plot(
                    [place] * 3,
                    values,
                    linestyle="none",
                    marker="_",
                    color=color,
                    label=name if name not in _labels(axes) else None,
                )
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(label)
    axes.set_title("50th, 90th and 99th percentile (lower is better)")
    return _finish(axes, has_any=bool(cases))


def _lora_tax(axes: Axes, findings: Sequence[Finding]) -> bool:
    """Throughput of 32 requests at once over that of the base, by how many adapters they name."""
    has_any = False
    for name, color in _systems(findings).items():
        by_case = {f.case: f for f in findings if f.subject.name == name}
        base = by_case.get("W2-32")
        if base is None:
            continue
        points = [
            (count, ratio.median)
            for case, count in _TAX_CASES.items()
            if case in by_case and (ratio := throughput_over(by_case[case], base)) is not None
        ]
        if len(points) > 1:
            has_any = True
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=name)
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xticks(list(_TAX_CASES.values()), [str(count) for count in _TAX_CASES.values()])
    axes.set_xlabel("different adapters among 32 requests at once")
    axes.set_ylabel("throughput over that of the base")
    axes.set_ylim(bottom=0)
    axes.set_title("What adapters cost")
    return _finish(axes, has_any=has_any)


def _systems(findings: Sequence[Finding]) -> dict[str, str]:
    """Colours by name: ours in blue over HTTP, in teal as a library."""
    colors: dict[str, str] = {}
    peers = 0
    for subject in dict.fromkeys(finding.subject for finding in findings):
        if is_ours(subject):
            colors[subject.name] = _OUR_COLORS.get(
                (subject.weight_bits, subject.is_http), _OUR_COLORS[32, True]
            )
        else:
            colors[subject.name] = _PEER_COLORS[peers % len(_PEER_COLORS)]
            peers += 1
    return colors


def _labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def _finish(axes: Axes, *, has_any: bool) -> bool:
    if has_any and _labels(axes):
        axes.legend(fontsize="small")
        axes.grid(axis="y", linewidth=0.4)
    return has_any
