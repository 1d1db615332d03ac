"""Everything that a study in sessions shows: verdicts, gates, figures and a table of its bases.

python analysis/study_report.py studies/worlds-2026
"""

from qerl_core.exits import guarded
from qerl_studies.report.sessions import main

if __name__ == "__main__":
    guarded(main)
