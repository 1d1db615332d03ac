"""`qerl-bench figure accuracy`, as a script."""

from qerl_studies.commands.figure import as_script

main = as_script(__name__, "accuracy")
