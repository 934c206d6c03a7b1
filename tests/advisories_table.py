"""The packaged table of security advisories, written from a clone of github.com/NVIDIA/product-security."""

import json
import sys
import time
from pathlib import Path

from gpuprov.cli.advisories import documents, parse_csaf
from gpuprov.protocol.advisories import Advisory, merged, rows_of, table_of

TABLE = Path(__file__).resolve().parents[1] / "gpuprov/protocol/advisories.json"


def table_from(folder: str, known: tuple[Advisory, ...], day: str) -> str:
    """Return the table that the documents below a folder and the known rows give; documents win."""
    found = [row for name, content in documents(folder, "") for row in parse_csaf(content, name)]
    return json.dumps(table_of(merged(known, found), day), indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table_from(sys.argv[1], rows_of(json.loads(TABLE.read_text())), time.strftime("%Y-%m-%d")))
