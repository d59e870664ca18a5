"""Makes the sample database: ``.venv/bin/python examples/sql_analyst/make_database.py [path]``.

The default path is the one that the tool ``sales`` of sluice.toml reads.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

path = Path(sys.argv[1] if len(sys.argv) > 1 else ".sluice/examples/sales.db")
path.parent.mkdir(parents=True, exist_ok=True)
fresh = path.with_suffix(".new")
fresh.unlink(missing_ok=True)
with closing(sqlite3.connect(fresh)) as database:
    database.executescript(Path(__file__).with_name("sales.sql").read_text())
fresh.replace(path)
print(f"{path}: made from sales.sql")
