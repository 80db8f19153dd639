"""fanstore-mount with another number of native threads: mount_with_workers.py THREADS [options of fanstore-mount].

Only for growth.py, which measures what the number costs: a user has no reason to choose it, so there is no option.
"""

import sys

from fanstore.cli.mount import main
from fanstore.fuse import native

if __name__ == "__main__":
    native.WORKERS_LEAST = native.WORKERS_MOST = int(sys.argv.pop(1))
    main()
