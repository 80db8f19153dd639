"""The equations of the thesis (section 3.1) for one MB: every time is proportional to the size of a sample.

Owns the published reading of them. It differs from the text of the thesis: the throughput of a storage class is not
divided by the threads that read from it, and the share of the PFS that a node has is given to each of its threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.model.system import STAGING, System


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds for one MB.

    Attributes:
        compute: 1/c, of equation 3.2.
        write: preprocess it and put it into the staging buffer, of equation 3.4.
        fetch_pfs: equation 3.5, by the number of clients gamma; element 0 means nothing.
        fetch_remote: equation 3.6, by the storage class of the other node; infinite for the staging buffer, from which
            nothing is fetched.
        fetch_local: equation 3.7, by storage class.
    """

    compute: float
    write: float
    fetch_pfs: npt.NDArray[np.float64]
    fetch_remote: npt.NDArray[np.float64]
    fetch_local: npt.NDArray[np.float64]

    @classmethod
    def of(cls, system: System) -> Times:
        clients = np.arange(1, system.nodes + 1)
        fetch_pfs = 1 / np.minimum(system.pfs_network_mb_per_s, system.pfs.each(clients))
        fetch_local = np.array([1 / storage.read.at(storage.threads) for storage in system.classes])
        fetch_local[STAGING] = np.inf
        return cls(
            compute=1 / system.compute_mb_per_s,
            write=max(1 / system.preprocess_mb_per_s, 1 / float(system.staging.write.each(system.staging.threads))),
            fetch_pfs=np.concatenate([[np.inf], fetch_pfs]),
            fetch_remote=np.maximum(1 / system.network_mb_per_s, fetch_local),
            fetch_local=fetch_local,
        )
