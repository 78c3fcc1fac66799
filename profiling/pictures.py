"""Pictures of measurements and forecasts. matplotlib is imported when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"L1": "#1f6f8b", "L2": "#d1495b", "layer": "#444444"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files. Raises RuntimeError that names what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError(
            "pictures need matplotlib: pip install 'nvfp4-megamoe[profiling]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot().close(figure)


def roofline_picture(
    path: Path, gpu: str, title: str, work: dict[int, list[Any]], measured: list[dict[str, Any]]
) -> None:
    """Log-log roofs of ``gpu``: where the GEMMs of ``work`` (tokens -> stages) touch the datasheet
    roof (hollow, computed) and what ``measured`` rows of a bench reached (filled).
    """
    from profiling.roofline import PEAKS, REACHED

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 6))
    kind = "bf16" if PEAKS[gpu].fp4 is None else "fp4"
    for table, style in ((PEAKS, "-"), (REACHED, "--")):
        if gpu in table:
            peaks = table[gpu]
            knee = peaks.math(kind) / peaks.memory
            xs = [0.5, knee, 16384.0]
            ys = [min(x * peaks.memory, peaks.math(kind)) / 1e12 for x in xs]
            label = f"{peaks.memory / 1e12:g} TB/s, {peaks.math(kind) / 1e15:.3g} PFLOP/s {kind}"
            label += " (datasheet)" if style == "-" else " (reached by programs)"
            axes.plot(xs, ys, style, color="black", linewidth=1.2, label=label)
    peaks = PEAKS[gpu]
    for at, (tokens, stages) in enumerate(work.items()):
        for stage in stages:
            if stage.flop:
                y = stage.flop / stage.seconds(peaks) / 1e12
                axes.scatter(
                    stage.intensity, y, marker=MARKERS[at % len(MARKERS)], s=46,
                    facecolors="none", edgecolors=COLOURS[stage.name],
                    label=f"{stage.name}, {tokens} tokens: roof",
                )  # fmt: skip
    for row in measured:
        for stage in row.get("stages", []):
            if stage["flop"] and stage.get("us"):
                name = stage["name"]
                axes.scatter(
                    stage["flop"] / stage["bytes"], stage["flop"] / stage["us"] / 1e6, s=46,
                    color=COLOURS[name], zorder=3,
                    label=f"{name}, {row['tokens']} tokens, {row['backend']}: measured",
                )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte of device memory", ylabel="TFLOP/s",
        title=f"{PEAKS[gpu].name}: {title}",
    )  # fmt: skip
    axes.grid(which="both", linewidth=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    save(figure, path)


def bench_picture(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Time of a call over tokens, log-log, one line per backend, and the roof."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5))
    timed = [r for r in rows if "us" in r]
    for at, backend in enumerate(dict.fromkeys(r["backend"] for r in timed)):
        mine = sorted((r for r in timed if r["backend"] == backend), key=lambda r: r["tokens"])
        xs, ys = [r["tokens"] for r in mine], [r["us"] for r in mine]
        low = [r["us"] - r["us_p10"] for r in mine]
        high = [r["us_p90"] - r["us"] for r in mine]
        marker = MARKERS[at % len(MARKERS)]
        axes.errorbar(xs, ys, [low, high], marker=marker, capsize=3, label=f"{backend}: measured")
    roofs = {r["tokens"]: r["roof_us"] for r in timed if "roof_us" in r}
    if roofs:
        xs = sorted(roofs)
        axes.plot(xs, [roofs[x] for x in xs], "k--", label="roof: computed")
    axes.set(xscale="log", yscale="log", xlabel="tokens a rank", ylabel="us", title=title)
    axes.set_xscale("log", base=2)
    axes.grid(which="both", linewidth=0.3)
    axes.legend()
    save(figure, path)


SLICES = {  # name of a slice -> colour, words
    "run": ("#9aa5b1", "instructions"),
    "load": ("#1f6f8b", "TMA load"),
    "cp": ("#c9a227", "scale copy"),
    "mma": ("#2a9d5c", "MMA"),
    "commit": ("#87b38d", "commit"),
    "tmem load": ("#d98f4e", "tcgen05.ld"),
    "store": ("#8b5fbf", "TMA store"),
    "main loop": ("#2a9d5c", "main loop"),
    "issue rows": ("#1f6f8b", "copies of rows issued"),
    "finish": ("#8b5fbf", "accumulators to memory, next tile"),
    "find tile": ("#c9a227", "find tile"),
    "schedule": ("#9aa5b1", "schedule"),
}
WAIT = "#d9b3b3"


def timeline_picture(path: Path, timeline: Any) -> None:
    """Bars per row: filled what ran, hatched what waited, with the barrier's name where it fits."""
    from profiling.timeline import CLOCKS

    plt = pyplot()
    rows = timeline.rows()
    if not rows:
        raise ValueError("the timeline has nothing to draw between these points")
    size = (15, 0.34 * len(rows) + 1.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    start = min(s.start for s in timeline.slices)
    width = timeline.end - start
    for y, key in enumerate(rows):
        mine = [s for s in timeline.slices if (s.cta, s.row) == key]
        for s in mine:
            waits = s.kind == "wait"
            colour = "#ffffff" if waits else SLICES.get(s.name, SLICES["run"])[0]
            axes.barh(
                y, s.duration, left=s.start, height=0.5 if waits else 0.8, color=colour,
                edgecolor=WAIT if waits else colour, linewidth=0.4,
                hatch="////" if waits else None, alpha=0.3 if key[1] == "tma" else 1.0,
            )  # fmt: skip
            if waits and s.duration > 0.045 * width:
                axes.text(s.start + s.duration / 2, y, s.name, ha="center", va="center", fontsize=6)
    ctas = len({cta for cta, _ in rows})
    labels = [f"cta {cta} {row}" if ctas > 1 else row for cta, row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(start, timeline.end)
    axes.set_xlabel(CLOCKS[timeline.clock])
    axes.set_title(timeline.title, fontsize=9)
    box = {"xy": (0, 0), "width": 1, "height": 1}
    present = [n for n in SLICES if any(s.name == n and s.kind != "wait" for s in timeline.slices)]
    handles = [plt.Rectangle(**box, color=SLICES[n][0]) for n in present]
    handles.append(plt.Rectangle(**box, facecolor="#fff", edgecolor=WAIT, hatch="////"))
    names = [SLICES[n][1] for n in present] + ["wait"]
    figure.legend(handles, names, ncols=8, fontsize=7, loc="outside lower center")
    save(figure, path)
