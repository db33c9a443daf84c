"""The four plots of a run, as SVG that follows the light or dark colours of the page it stands in.

In: records that other stages wrote. Out: SVG text without times or random names: equal records give equal bytes.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
# Colours that stand in the drawing and become CSS variables; the second one of a pair is for dark pages.
INK, GRID = "#1f2329", "#d9dce1"
SERIES = (("#2f6fde", "#79a8ff"), ("#d9711c", "#f5a45d"), ("#2b9a66", "#5fcf9b"), ("#8b5cd6", "#b898f2"))
BLUE, ORANGE, GREEN, VIOLET = (light for light, _ in SERIES)
WIDTH_IN, HEIGHT_IN = 7.6, 3.1
# A curve of more steps is averaged over neighbours.
MOST_POINTS = 200

STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.size": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle3-flow",
}


def training(records: Sequence[Record], steps: Sequence[Record] = ()) -> str:
    """Loss and accuracy by optimiser step: every step where `steps` (the metrics' JSON lines) has them, else segments.

    `records` are the checkpoints' records; their validation figures are drawn as points.
    """

    def draw(axes: Sequence["Axes"]) -> None:
        train = [line for line in steps if line.get("kind") == "train"]
        train = train or [{"step": record["step"], **record["metrics"]["train"]} for record in records]
        validation = [{"step": record["step"], **record["metrics"]["validation"]} for record in records]
        loss, accuracy = axes
        x = [line["step"] for line in train]
        loss.plot(*_thin(x, [line["loss"] for line in train]), color=BLUE, label="training")
        loss.plot(
            [line["step"] for line in validation],
            [line["loss"] for line in validation],
            "o-",
            color=ORANGE,
            label="validation",
        )
        loss.set(title="Loss, all TTT steps together", xlabel="optimiser step", ylim=(0, None))
        for step, color in zip(range(len(validation[0]["accuracy"])), (BLUE, ORANGE, GREEN, VIOLET), strict=False):
            accuracy.plot(*_thin(x, [line["accuracy"][step] for line in train]), color=color, alpha=0.55)
            points = [line["accuracy"][step] for line in validation]
            accuracy.plot([line["step"] for line in validation], points, "o", color=color, label=f"TTT step {step}")
        accuracy.set(title="Accuracy: training (line), validation (points)", xlabel="optimiser step", ylim=(0, None))
        loss.legend()
        accuracy.legend()

    return _figure(draw, panels=2)


def acceptance_by_position(served: Mapping[str, Record], simulated: Mapping[str, Record]) -> str:
    """Served and simulated acceptance at each drafted position, one panel for each suite."""
    suites = list(served)

    def draw(axes: Sequence["Axes"]) -> None:
        for panel, suite in zip(axes, suites, strict=True):
            pairs = ((served[suite], "served", BLUE, -0.2), (simulated[suite], "simulated", ORANGE, 0.2))
            for record, label, color, shift in pairs:
                rates = record["acceptance_by_position"]
                bars = panel.bar([position + shift for position in range(len(rates))], rates, 0.38, color=color, label=label)
                panel.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
            positions = len(served[suite]["acceptance_by_position"])
            panel.set(title=suite, xlabel="drafted position", xticks=range(positions))
            panel.margins(y=0.15)
        axes[0].set_ylabel("accepted, of all drafts")
        axes[0].legend()

    return _figure(draw, panels=len(suites))


def coverage(record: Record) -> str:
    """Share of the target's tokens that a draft vocabulary of each size holds, with the chosen size."""

    def draw(axes: Sequence["Axes"]) -> None:
        (panel,) = axes
        sizes = [line["size"] for line in record["by_size"]]
        for split, label, color in (("train", "training answers", BLUE), ("val", "validation answers", ORANGE)):
            panel.plot(sizes, [line[split] for line in record["by_size"]], "o-", color=color, label=label)
        chosen = record["draft_vocab_size"]
        panel.axvline(chosen, color=GREEN, linewidth=1.2, linestyle="--", label=f"chosen: {chosen:,}")
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
        panel.minorticks_off()
        panel.set(xlabel="tokens in the draft vocabulary", ylabel="share of tokens covered", ylim=(None, 1.01))
        panel.legend(loc="lower right")

    return _figure(draw)


def segments(selected: Record) -> str:
    """Simulated acceptance length on validation rows after each training segment, with the chosen checkpoint."""

    def draw(axes: Sequence["Axes"]) -> None:
        (panel,) = axes
        measured = [candidate for candidate in selected["candidates"] if "simulated" in candidate]
        x = [candidate["segment"] for candidate in measured]
        y = [candidate["simulated"]["acceptance_length"] for candidate in measured]
        panel.plot(x, y, "o-", color=BLUE)
        chosen = selected["selected"]
        best = chosen["simulated"]["acceptance_length"]
        panel.plot([chosen["segment"]], [best], "o", color=GREEN, markersize=10, label=f"chosen: segment {chosen['segment']}")
        panel.annotate(f"{best:.3f}", (chosen["segment"], best), xytext=(0, 9), textcoords="offset points", ha="center")
        panel.set(xlabel="training segment", ylabel="tokens per verification", xticks=x)
        panel.margins(y=0.25)
        panel.legend(loc="lower right")

    return _figure(draw)


def _thin(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means of neighbours, so that at most MOST_POINTS points are left."""
    width = -(-len(x) // MOST_POINTS) or 1
    groups = range(0, len(x), width)
    means = ([sum(values[start : start + width]) / len(values[start : start + width]) for start in groups] for values in (x, y))
    return tuple(means)  # type: ignore[return-value]


def _figure(draw: Callable[[Sequence["Axes"]], None], panels: int = 1) -> str:
    """Draws `panels` axes side by side (three to a row) and returns the SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        columns = min(panels, 3)
        rows = -(-panels // columns)
        figure, grid = pyplot.subplots(rows, columns, figsize=(WIDTH_IN, HEIGHT_IN * rows), squeeze=False, layout="constrained")
        axes = list(grid.flat)
        for unused in axes[panels:]:
            unused.set_axis_off()
        draw(axes[:panels])
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        pyplot.close(figure)
    return _follow_the_page(text.getvalue())


def _follow_the_page(svg: str) -> str:
    """Turns fixed colours into CSS variables, fixed fonts into the page's, and drops what only an XML file needs."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(figure|axes|patch|line2d|text|legend|xtick|ytick|matplotlib\.axis|PolyCollection)_\d+"', "", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    variables = {INK: "currentColor", GRID: f"var(--plot-grid, {GRID})"}
    variables |= {light: f"var(--plot-{number}, {light})" for number, (light, _) in enumerate(SERIES)}
    for color, variable in variables.items():
        svg = svg.replace(color, variable)
    dark = "".join(f"--plot-{number}: {dark};" for number, (_, dark) in enumerate(SERIES))
    css = f".plot{{color:{INK}}} @media (prefers-color-scheme: dark){{.plot{{color:#e4e7ec;--plot-grid:#3a404a;{dark}}}}}"
    svg = svg.replace("<svg", '<svg class="plot"', 1)
    # matplotlib's own sheet would style every line and bar of a page that holds the drawing
    return re.sub(
        r"<style type=\"text/css\">.*?</style>",
        f"<style>{css} .plot *{{stroke-linejoin:round}}</style>",
        svg,
        count=1,
        flags=re.DOTALL,
    )
