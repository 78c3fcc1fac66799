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
