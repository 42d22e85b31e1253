"""The report for eyes: plots, each for light and dark pages, and the page that holds them. All from report.json alone.

matplotlib is an optional extra; only `need` and `files` import it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).with_name("report.html")
METHODS = ("raw", "sts", "platt")
LABELS = {"raw": "raw", "sts": "STS", "platt": "Platt", "fixed": "fixed length"}
MARKERS = {"raw": "o", "sts": "s", "platt": "^", "fixed": "D"}  # not by colour alone
WIDTHS = {"raw": 3.4, "sts": 1.9, "platt": 0.9}  # of lines that lie on each other
FEW = 20  # rounds or drafts: the share of fewer that was accepted says little
DPI = 110
PANEL, GAP, HEAD = (3.1, 3.0), (0.75, 0.6), 0.35  # inches: a panel, the space before it, and above all


@dataclass(frozen=True)
class Theme:
    """Colours, those of the methods from Okabe and Ito: told apart with any kind of colour blindness."""

    paper: str
    ink: str
    faint: str
    colours: Mapping[str, str]


THEMES = {
    "light": Theme(
        "#ffffff", "#1c1c1c", "#c8c8c8", {"raw": "#d55e00", "sts": "#0072b2", "platt": "#009e73", "fixed": "#6e6e6e"}
    ),
    "dark": Theme(
        "#16181c", "#e6e6e6", "#44484f", {"raw": "#e69f00", "sts": "#56b4e9", "platt": "#2bc79a", "fixed": "#a0a0a0"}
    ),
}


def need() -> None:
    """Raises ModuleNotFoundError if matplotlib is not installed."""
    import_module("matplotlib.figure")


def files(report: Mapping[str, Any]) -> dict[str, bytes]:
    """report.html, and reliability.png, thresholds.png and step_cost.png as far as the report holds what they show.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    plots = {"reliability": _reliability, "thresholds": _thresholds} if report["regimes"] else {}
    if report["step_cost"]:
        plots["step_cost"] = _step_cost
    images = {name: {key: _png(plot(report, theme)) for key, theme in THEMES.items()} for name, plot in plots.items()}
    return {f"{name}.png": both["light"] for name, both in images.items()} | {"report.html": _page(report, images)}


def _png(figure: Figure) -> bytes:
    """With a palette: a third of the size, and the page holds every plot twice."""
    from PIL import Image

    file, small = io.BytesIO(), io.BytesIO()
    figure.savefig(file, dpi=DPI, format="png", facecolor=figure.get_facecolor())
    with Image.open(file) as image:
        image.convert("RGB").quantize(96).save(small, format="png", optimize=True)
    return small.getvalue()


def _grid(rows: int, columns: int, theme: Theme, *, lower: bool = False) -> tuple[Figure, list[tuple[Axes, ...]]]:
    """Panels row by row, each of one axes, or of two with `lower`: a low one under the main one."""
    from matplotlib.figure import Figure

    width, height = columns * (PANEL[0] + GAP[0]) + 0.2, rows * (PANEL[1] + GAP[1]) + HEAD
    figure = Figure(figsize=(width, height), facecolor=theme.paper)
    panels = []
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        left, bottom = GAP[0] + column * (PANEL[0] + GAP[0]), height - HEAD - (row + 1) * (PANEL[1] + GAP[1]) + GAP[1]
        cut = 0.22 * PANEL[1] if lower else 0.0
        boxes = [(bottom + cut, PANEL[1] - cut - 0.25)] + [(bottom, cut - 0.08)] * lower
        panel = [figure.add_axes((left / width, y / height, PANEL[0] / width, h / height)) for y, h in boxes]
        panels.append(tuple(panel))
    return figure, panels


def _dress(axes: Axes, theme: Theme, title: str = "", x: str = "", y: str = "") -> None:
    axes.set_facecolor(theme.paper)
    axes.set_title(title, color=theme.ink, fontsize=11)
    axes.set_xlabel(x, color=theme.ink)
    axes.set_ylabel(y, color=theme.ink)
    axes.tick_params(which="both", colors=theme.ink, labelsize=9)
    axes.grid(color=theme.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(theme.faint)


def _legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    """Above all panels."""
    handles, names = axes.get_legend_handles_labels()
    columns = min(len(names), max(int(figure.get_figwidth() / 1.9), 1))
    figure.legend(
        handles, names, loc="upper center", ncols=columns, labelcolor=theme.ink, frameon=False, columnspacing=1.2
    )


def _diagonal(axes: Axes, theme: Theme, label: str, room: float = 0.0) -> None:
    axes.plot((0, 1), (0, 1), color=theme.ink, linewidth=0.9, linestyle=":", label=label)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02 + room), yticks=(0, 0.2, 0.4, 0.6, 0.8, 1))


def _reliability(report: Mapping[str, Any], theme: Theme) -> Figure:
    """A row a position and a column a regime; of a single regime, three positions a row."""
    regimes, length = report["regimes"], report["draft_len"]
    wanted = [(name, k) for k in range(length) for name in regimes]
    columns = len(regimes) if len(regimes) > 1 else min(3, length)
    figure, panels = _grid(-(-len(wanted) // columns), columns, theme, lower=True)
    for (name, k), (top, low) in zip(wanted, panels, strict=False):
        _reliability_panel(top, low, regimes[name], k, theme)
        top.set_title(f"{name}, position {k + 1}", color=theme.ink, fontsize=11)
    for spare in panels[len(wanted) :]:
        for axes in spare:
            axes.remove()
    _legend(figure, panels[0][0], theme)
    return figure


def _reliability_panel(top: Axes, low: Axes, part: Mapping[str, Any], k: int, theme: Theme) -> None:
    _dress(top, theme, y="observed survival")
    _dress(low, theme, x="predicted survival", y="rounds")
    _diagonal(top, theme, "perfect", room=0.26)  # for the text
    shown = ("raw", "sts")
    rows = {method: part["slices"][0]["positions"][method][k] for method in shown}
    for shift, method in zip((-0.007, 0.007), shown, strict=True):
        points = part["reliability"][method][k]
        x, y, counts = ([point[key] for point in points] for key in ("predicted", "observed", "count"))
        style: dict[str, Any] = {"color": theme.colours[method], "marker": MARKERS[method]}
        many = [i for i, count in enumerate(counts) if count >= FEW]
        top.plot([x[i] for i in many], [y[i] for i in many], markersize=5, linewidth=1.3, label=LABELS[method], **style)
        few = [i for i, count in enumerate(counts) if count < FEW]
        top.plot([x[i] for i in few], [y[i] for i in few], markersize=3.5, linestyle="", alpha=0.45, **style)
        low.bar([place + shift for place in x], counts, width=0.014, color=theme.colours[method])
    low.set_yscale("log")
    low.set(xlim=(-0.02, 1.02), ylim=(0.7, None))
    top.tick_params(labelbottom=False)
    errors = [percent(rows[m]["ece"]) for m in shown]
    counts_text = f"{rows['raw']['num_accepted']} survived, {rows['raw']['num_rejected']} did not"
    box = {"facecolor": theme.paper, "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
    text = f"ECE {errors[0]} → {errors[1]}\n{counts_text}"
    top.text(0.03, 0.97, text, transform=top.transAxes, va="top", fontsize=9, color=theme.ink, bbox=box)


def _thresholds(report: Mapping[str, Any], theme: Theme) -> Figure:
    """A column a regime: what is accepted of what is verified, and the share of it by threshold."""
    regimes = report["regimes"]
    figure, panels = _grid(2, len(regimes), theme)
    for column, (name, part) in enumerate(regimes.items()):
        (gain,), (share,) = panels[column], panels[column + len(regimes)]
        _dress(gain, theme, name, "verified drafts per round", "accepted drafts per round")
        _dress(share, theme, "", "threshold on survival", "accepted / verified")
        _diagonal(share, theme, "")
        for method in METHODS:
            _sweep_lines(gain, share, part, method, report["thresholds"], theme)
        fixed = part["fixed_lengths"]
        style: dict[str, Any] = {"color": theme.colours["fixed"], "linestyle": "--", "linewidth": 1.2, "markersize": 4}
        gain.plot(fixed["verified"], fixed["accepted"], marker=MARKERS["fixed"], label=LABELS["fixed"], **style)
        gain.set(xlim=(0, None), ylim=(0, None))
    _legend(figure, panels[0][0], theme)
    return figure


def _sweep_lines(
    gain: Axes, share: Axes, part: Mapping[str, Any], method: str, thresholds: Sequence[float], theme: Theme
) -> None:
    found, rounds = part["sweep"][method], part["rounds"]["judged"]
    style: dict[str, Any] = {"color": theme.colours[method], "linewidth": WIDTHS[method], "marker": MARKERS[method]}
    style |= {"markersize": 5, "markevery": 10}
    gain.plot(found["verified"], found["accepted"], label=LABELS[method], **style)
    enough = [i for i, verified in enumerate(found["verified"]) if verified * rounds >= FEW]
    share.plot([thresholds[i] for i in enough], [found["efficiency"][i] for i in enough], **style)


def _step_cost(report: Mapping[str, Any], theme: Theme) -> Figure:
    """Seconds of the target's pass by the tokens in it, and of drafting by its requests."""
    from matplotlib.ticker import LogLocator, NullLocator

    steps = report["step_cost"]["steps"]
    figure, panels = _grid(1, 2, theme)
    for kind, (axes,), title in zip(("verify", "draft"), panels, ("target's pass", "drafting"), strict=True):
        of_kind = [step for step in steps if step["kind"] == kind]
        _dress(axes, theme, title, "batch tokens" if kind == "verify" else "requests", "milliseconds")
        lines = sorted({(step["context"], step["each"] if kind == "draft" else 0) for step in of_kind})
        for number, (context, each) in enumerate(lines):
            chosen = [s for s in of_kind if s["context"] == context and each in (0, s["each"])]
            label = f"context {context}" + (f", {each} slot{'s'[: each > 1]}" if each else "")
            _cost_line(axes, chosen, label, number, theme)
        if lines:
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(2))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
            axes.legend(labelcolor=theme.ink, frameon=False, fontsize=9)
    return figure


def _cost_line(axes: Axes, steps: Sequence[Mapping[str, Any]], label: str, number: int, theme: Theme) -> None:
    rows = {s["requests"] * (s["each"] if s["kind"] == "verify" else 1): s for s in steps}
    x = sorted(rows)
    y = [1e3 * rows[place]["seconds"] for place in x]
    error = [1e3 * rows[place]["seconds"] * rows[place]["spread"] / 2 for place in x]
    method = list(MARKERS)[number % len(MARKERS)]
    colour, marker = theme.colours[method], MARKERS[method]
    axes.errorbar(x, y, error, color=colour, marker=marker, markersize=5, linewidth=1.3, capsize=2, label=label)


def percent(value: float | None) -> str:
    """With one digit; a dash for nothing."""
    return "–" if value is None else f"{100 * value:.1f} %"


def points(difference: float) -> str:
    """Of two percentages."""
    return f"{100 * difference:.1f} points"


def _page(report: Mapping[str, Any], images: Mapping[str, Mapping[str, bytes]]) -> bytes:
    """The page; `images` are PNGs by name and theme."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "points": points}
    inline = {
        name: {theme: "data:image/png;base64," + base64.b64encode(png).decode() for theme, png in both.items()}
        for name, both in images.items()
    }
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(report=report, images=inline, labels=LABELS).encode()
