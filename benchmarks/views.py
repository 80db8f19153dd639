"""One process that looks at files twice: one JSON object with the seconds of the second time.

Usage: views.py LIST WAY DECODED
WAY: ``read`` (``open(path, "rb").read()``), ``view`` (``fanstore.view``). DECODED: 0 a checksum of all bytes, 1
pictures, by PIL. Used by interception.py.
"""

import io
import json
import sys
import time
import zlib
from pathlib import Path

from PIL import Image

import fanstore


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main() -> int:
    paths = Path(sys.argv[1]).read_text().split("\0")[:-1]
    get, decoded = fanstore.view if sys.argv[2] == "view" else read, sys.argv[3] == "1"
    for _ in range(2):
        begin = time.perf_counter()
        for path in paths:
            content = get(path)
            if decoded:
                Image.open(io.BytesIO(content)).convert("RGB")
            else:
                zlib.adler32(content)
        seconds = time.perf_counter() - begin
    print(json.dumps({"files": len(paths), "seconds": [seconds]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
