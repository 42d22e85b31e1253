"""Plots of a load curve, after the paper's figures 7 and 8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STYLES = {
    "plain": ("#6e6e6e", "o", "plain"),
    "full": ("#d55e00", "v", "whole blocks"),
    "best fixed": ("#e69f00", "s", "best fixed length"),
    "threshold": ("#009e73", "^", "static threshold 0.5"),
    "ours": ("#0072b2", "D", "dspark (auto)"),
}


def plot(folder: Path, result: dict[str, Any]) -> None:
    """Write `load_curve_<draft>_<weights>_t<temperature>.png`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    loads = {int(load): rows for load, rows in result["results"].items()}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    speed, budget = figure.subplots(1, 2)
    for way, (colour, marker, label) in STYLES.items():
        rows = [_row(rows, way) for rows in loads.values()]
        users, total = [row["per_user"] for row in rows], [row["tokens_per_s"] for row in rows]
        speed.plot(users, total, color=colour, marker=marker, label=label, linewidth=2.4 if way == "ours" else 1.2)
        if way != "plain":
            sizes = [row["verify_budget"] / load for row, load in zip(rows, loads, strict=True)]
            budget.plot(list(loads), sizes, color=colour, marker=marker, label=label)
    for load, rows in loads.items():
        place = (rows["ours"]["per_user"], rows["ours"]["tokens_per_s"])
        speed.annotate(f"{load}", place, textcoords="offset points", xytext=(6, 5), fontsize=8)
    speed.set(xlabel="tokens/s of one request", ylabel="tokens/s of all", xscale="log", yscale="log")
    speed.set_title("throughput against speed (number: requests at once)", fontsize=10)
    budget.set(xlabel="requests at once", ylabel="draft tokens verified per request and round", xscale="log")
    budget.set_xticks(list(loads), [str(load) for load in loads])
    budget.set_title("what is verified", fontsize=10)
    for axes in (speed, budget):
        axes.grid(alpha=0.3, which="both")
    speed.legend(fontsize=9)
    name = f"{result['draft']} draft, temperature {result['temperature']:g}, {result['cpu_weights']} weights"
    figure.suptitle(f"{name} ({result['conditions']['cpu']}, {result['conditions']['cores']} cores)", fontsize=11)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"load_curve_{name_of(result)}.png", dpi=110)


def name_of(result: dict[str, Any]) -> str:
    """Short, for files."""
    return f"{result['draft']}_{result['cpu_weights']}_t{result['temperature']:g}"


def _row(rows: dict[str, dict[str, float]], way: str) -> dict[str, float]:
    if way != "best fixed":
        return rows[way]
    return max((row for name, row in rows.items() if name.startswith("fixed")), key=lambda row: row["tokens_per_s"])
