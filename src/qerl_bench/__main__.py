"""`qerl-bench COMMAND ...`, or `python -m qerl_bench COMMAND ...`: every command of the package.

Options are key=value words behind the command, as Hydra reads them; `qerl-bench COMMAND --help` explains each command.
"""

from __future__ import annotations

from qerl_core.process.first_imports import ends_in_a_line

with ends_in_a_line():
    import difflib
    import sys
    from importlib import import_module
    from typing import NamedTuple

    from qerl_bench.parallel import is_rank0_output, refuse_ranks
    from qerl_bench.sweep.loaded_parent import is_loaded_parent
    from qerl_core import __version__
    from qerl_core.exits import exit_in_words, one_line_warnings
    from qerl_core.options import user_options
    from qerl_core.process.arguments import printable, wrapped
    from qerl_core.process.children import end_with_parent
    from qerl_core.process.terminal import lasting_output


class Command(NamedTuple):
    """What `qerl-bench NAME` does; `main` of commands/NAME.py takes the words behind it."""

    summary: str
    stopped: str = "stopped"  # what Ctrl-C prints
    composes: bool = False  # configs of options, or reads claims, and so takes the words of --config-dir
    shared: bool = False  # by the ranks that torchrun starts


COMMANDS = {
    "run": Command(
        "train one experiment, or with -m every point of a sweep",
        "stopped; the same command continues from the last checkpoint",
        composes=True,
        shared=True,
    ),
    "estimate": Command("say what a run or a sweep will take: GiB, hours, price, disk", composes=True),
    "status": Command("list runs with their state and steps, once or again and again"),
    "eval": Command(
        "evaluate a finished run under another protocol",
        "stopped; the same command starts this evaluation again",
        composes=True,
        shared=True,
    ),
    "score": Command("grade completions made elsewhere", "stopped; nothing was written", composes=True),
    "export": Command("write a packed model, or a trained one, for other programs", composes=True),
    "collect": Command("gather runs into a study that can be committed"),
    "probe": Command(
        "ask a model before any training, in every format and noise",
        "stopped; the same command goes on behind what is measured",
        composes=True,
    ),
    "gates": Command(
        "measure bases, and tell whether a study could show anything",
        "stopped; the same command continues",
        composes=True,
    ),
    "study": Command(
        "run a study of many bases within a time",
        "stopped; the same command continues",
        composes=True,
    ),
    "claims": Command("report what runs say about each claim of the paper", composes=True),
    "report": Command("make pages of a folder of runs: verdicts, effects, samples", composes=True),
    "figure": Command("draw a figure of runs by its name, or write a table"),
    "compare": Command("tell in which options and numbers two runs, or two arms, differ"),
    "publish": Command("make a run or a study ready for others, as a folder or at the hub"),
    "check": Command("check published studies, those in community/ for example"),
    "matrix": Command("put the verdicts of several studies side by side"),
    "verdicts": Command("write the verdicts of any number of studies as one file of data", composes=True),
    "import": Command("turn the logs of TRL, verl or a CSV file into a study, and judge its arms"),
    "conform": Command("tell whether runs in a format end where BF16 does: pass, fail, too few"),
    "register": Command("fix a claim before its data: hash, margin, units, looks and date", composes=True),
    "plan": Command("find out how many bases and seeds a claim needs", composes=True),
}
# They read runs and make none.
READERS = {
    *("report", "claims", "matrix", "verdicts", "compare", "figure", "plan", "collect", "check", "publish"),
    *("import", "conform", "register"),
}
# What others call our commands.
ELSEWHERE = {"train": "run", "evaluate": "eval", "merge": "export", "serve": "export", "resume": "run"}
# What one wants to do: every command once.
GROUPS = {
    "train": ("run", "estimate", "eval", "score", "export"),
    "look": ("status", "report", "figure", "compare"),
    "decide": ("register", "probe", "study", "gates", "plan", "claims", "conform", "matrix"),
    "share": ("collect", "import", "publish", "check", "verdicts"),
}
USAGE = "\n".join(
    [
        "usage: qerl-bench COMMAND [key=value ...]",
        *(
            "\n".join(["", f"{group}:", *(f"  {name:8} {COMMANDS[name].summary}" for name in names)])
            for group, names in GROUPS.items()
        ),
        "",
        "qerl-bench COMMAND --help explains a command, qerl-bench --version prints the version.",
        'eval "$(qerl-bench --completion)" lets bash or zsh complete commands, keys and options.',
    ]
)


def completion() -> str:
    from qerl_core.options.completion import script  # what no other command needs

    return script([*COMMANDS], [name for name, command in COMMANDS.items() if command.composes])


def main(words: list[str] | None = None) -> int:
    """Run one command; returns 2 if there is no such command, and else exits as `exit_in_words` does."""
    if is_loaded_parent():  # each of its runs comes here again
        serve = import_module("qerl_bench.sweep.fork_server").serve
        serve(lambda forked: main(None if words is None else [*words, *forked]))
    name, *rest = (sys.argv[1:] if words is None else words) or [""]
    if words is None:
        sys.argv[0] = f"qerl-bench {name}"  # in env.json, and in argparse's usage
    if name in ("-h", "--help", "--version", "--completion"):
        if is_rank0_output():
            with lasting_output():
                print(USAGE if name in ("-h", "--help") else __version__ if name == "--version" else completion())
        return 0
    if name not in COMMANDS:
        close = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, COMMANDS, n=1)
        if "=" in name:  # an option of a run
            close = [" ".join(["run", name, *rest])]
        hint = f"there is no command {name}.{f' Did you mean {close[0]}?' if close else ''}\n" if name else ""
        if is_rank0_output():
            print(printable(f"{hint}{USAGE}"), file=sys.stderr)
        return 2
    command = COMMANDS[name]
    with lasting_output(), exit_in_words(command.stopped):
        end_with_parent()
        if not command.shared:
            refuse_ranks(name)
        rest = user_options.with_search_path(rest)
        user_options.use(user_options.folders_in(rest))
        if not command.composes:
            _, rest = user_options.split_search_path(rest)
        package = "qerl_studies" if name in READERS else "qerl_bench"
        module = import_module(f"{package}.commands.{name}")
        if hasattr(module, "USAGE") and {"-h", "--help"} & {*rest}:  # the others are helped by Hydra or argparse
            if is_rank0_output():
                print(wrapped(module.USAGE), wrapped(module.__doc__ or ""), sep="\n\n")
        elif name == "run":
            module.main(rest)
        else:
            with one_line_warnings():
                module.main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
