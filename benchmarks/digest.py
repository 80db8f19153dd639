"""Prints the xxh3-128 of every file of a list (absolute paths, each ended by a NUL byte), one a line.

A program of its own, run by harness/reading.py with a time limit: a mount that hangs must not hang the benchmark.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash


def digest(path: bytes) -> str:
    with open(path, "rb") as file:
        return xxhash.xxh3_128_hexdigest(file.read())


def main() -> int:
    paths = Path(sys.argv[1]).read_bytes().split(b"\0")[:-1]
    with ThreadPoolExecutor(2) as pool:
        try:
            for line in pool.map(digest, paths):
                print(line)
        except OSError as error:
            print(f"digest: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
