"""An app over the numbers of a study: `marimo run notebooks/explore.py`, and for another one than studies/tiny
`marimo run notebooks/explore.py -- --study runs/`. `marimo edit` opens it as a notebook.

Curves here are means over all runs that are chosen; verdicts, which compare in pairs, come from `qerl-bench claims`.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Explore a study")


@app.cell
def _():
    from pathlib import Path

    import marimo as mo

    from qerl_core.checks import ConfigError
    from qerl_studies.design.looks import shown_runs
    from qerl_studies.figures.style import FORMAT_COLORS, OTHER_COLORS, label_axes, panels, paper_style
    from qerl_studies.runs.comparable import load_runs, tidy
    from qerl_studies.runs.settings import Study

    return (
        ConfigError,
        FORMAT_COLORS,
        OTHER_COLORS,
        Path,
        Study,
        label_axes,
        load_runs,
        mo,
        panels,
        paper_style,
        shown_runs,
        tidy,
    )


@app.cell
def _(Path, mo):
    tiny = Path(__file__).resolve().parents[1] / "studies" / "tiny"
    folder = mo.ui.text(str(mo.cli_args().get("study") or tiny), label="folder of runs or of a study", full_width=True)
    mo.vstack([mo.md("# Explore a study"), folder])
    return (folder,)


@app.cell
def _(ConfigError, Study, folder, load_runs, mo, shown_runs, tidy):
    # Only runs that differ in nothing but these keys, so that a line never mixes settings which no column tells apart.
    keys = ("quant.", "quantizer.", "aqn.", "algo.", "lora.rank", "optim.lr", "model.", "task.")
    try:
        loaded, refusal = load_runs(shown_runs([folder.value]), mixed_code=True), ""
        comparable = loaded if len(Study(loaded).settings) == 1 else Study(loaded).select(*keys).runs
    except ConfigError as error:
        loaded, comparable, refusal = [], [], str(error)
    mo.stop(not comparable, mo.callout(refusal, kind="warn"))
    table = tidy(comparable)
    steps = table[table["kind"] == "train"]
    runs = table.drop_duplicates("run")
    axes = ("model", "task", "quant", "quantizer", "aqn", "algo", "lora_rank", "lr", "seed")
    varied = [axis for axis in axes if runs[axis].nunique() > 1] or ["seed"]
    mo.md(f"{len(runs)} of {len(loaded)} runs: the largest set that differs in {', '.join(varied)} alone.")
    return runs, steps, table, varied


@app.cell
def _(mo, steps, varied):
    recorded = sorted(steps["metric"].unique().tolist())
    first = "reward/mean" if "reward/mean" in recorded else recorded[0]
    metric = mo.ui.dropdown(recorded, value=first, label="metric")
    split = mo.ui.dropdown(varied, value="quant" if "quant" in varied else varied[0], label="a line for each")
    window = mo.ui.slider(1, 31, step=2, value=11, label="mean over steps", show_value=True)
    mo.hstack([metric, split, window])
    return metric, split, window


@app.cell
def _(mo, runs, split, varied):
    # At first the commonest value of each other axis, so that the lines differ in one thing.
    def choices(axis):
        values = sorted(runs[axis].unique().tolist())
        alone = axis not in (split.value, "seed")
        start = [runs[axis].mode().iloc[0]] if alone else values
        return mo.ui.multiselect({str(value): value for value in values}, value=[str(one) for one in start], label=axis)

    chosen = mo.ui.dictionary({axis: choices(axis) for axis in varied})
    mo.hstack(list(chosen.elements.values()), wrap=True)
    return (chosen,)


@app.cell
def _(chosen, metric, mo, split, steps, window):
    rows = steps[steps["metric"] == metric.value]
    for axis, values in chosen.value.items():
        rows = rows[rows[axis].isin(values)]
    mo.stop(rows.empty, mo.callout("No run has all the chosen values: choose more of them.", kind="warn"))
    by_step = rows.pivot_table(index="step", columns=split.value, values="value", aggfunc="mean", observed=True)
    curves = by_step.rolling(window.value, center=True, min_periods=1).mean()
    return curves, rows


@app.cell
def _(FORMAT_COLORS, OTHER_COLORS, curves, label_axes, metric, mo, panels, paper_style, rows, split):
    with paper_style():
        figure, ((ax,),) = panels(1, 1, 3.0)
        for place, name in enumerate(curves.columns):
            shade = FORMAT_COLORS.get(name, OTHER_COLORS[place % len(OTHER_COLORS)])
            count = rows.loc[rows[split.value] == name, "run"].nunique()
            ax.plot(curves.index, curves[name], color=shade, label=f"{name} ({count} runs)")
        label_axes(ax, metric.value)
        ax.legend(title=split.value)
    mo.image(figure._repr_png_(), width=900)
    return


@app.cell
def _(chosen, mo, split, table):
    final = table[table["metric"].astype(str).str.fullmatch("eval/accuracy_(greedy|sampled)")]
    for name_of_axis, allowed in chosen.value.items():
        final = final[final[name_of_axis].isin(allowed)]
    final = final.sort_values("step").drop_duplicates(["run", "metric"], keep="last")
    by_line = final.groupby([split.value, "metric"], observed=True)["value"]
    accuracy = by_line.agg(["mean", "std", "count"]).round(4).reset_index()
    mo.vstack([mo.md("## Held-out accuracy at the end: mean, spread and number of runs"), mo.ui.table(accuracy)])
    return (accuracy,)


if __name__ == "__main__":
    app.run()
