"""The queries of docs/how-to/sql.md print what is below them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "sql.md").read_text()
QUERIES = re.findall(r"^```sql\n(.*?)```\n\n((?:\|[^\n]*\n)+)", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_every_query_has_an_answer() -> None:
    assert len(QUERIES) == PAGE.count("```sql") == 5


@pytest.mark.parametrize(("query", "shown"), QUERIES, ids=range(1, len(QUERIES) + 1))
def test_a_query_answers_as_shown(monkeypatch: pytest.MonkeyPatch, query: str, shown: str) -> None:
    duckdb = pytest.importorskip("duckdb", reason="the queries of docs/how-to/sql.md need DuckDB: pip install duckdb")
    monkeypatch.chdir(ROOT)
    found = duckdb.sql(query)
    rows = [found.columns, ["---"] * len(found.columns), *found.fetchall()]
    assert "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows) == shown
