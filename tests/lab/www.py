"""The lab's file server: serves one folder over HTTP on the bridge, with Range, until it is killed.

python -m tests.lab.www FOLDER ADDRESS PORT
"""

import http.server
import re
import sys
from functools import partial
from pathlib import Path


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files, whole or from a byte on (RFC 9110, section 14): what a resumed download asks for."""

    def do_GET(self) -> None:
        """Serve a file from the byte that `Range: bytes=N-` names; everything else as the base class does."""
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if found is None or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        start = int(found[1])
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start:])


def main() -> None:
    """Serve for ever."""
    folder, address, port = sys.argv[1:]
    handler = partial(Handler, directory=folder)
    http.server.ThreadingHTTPServer((address, int(port)), handler).serve_forever()


if __name__ == "__main__":
    main()
