"""The performance model: how long a job will take, and what it will read from where. Pure: numpy, no I/O, no threads.

From below: what there is (``curve``, ``system``, ``job``; ready-made in ``scenario``, from a file in ``settings``),
what is decided (``plan``, ``policy``, ``policies``; ``copies`` follow), and what comes of it (``simulation``, in one of
two modes). ``published`` is the simulation of the thesis "Clairvoyant Prefetching for Machine Learning I/O"
(Boehringer, ETH Zurich, 2020) with its ``equations`` and ``pfsclients``, and ``thesis`` has its figures; ``corrected``
shares what is shared (``contention``, ``loads``, ``ahead``). docs/model.md explains all of it.

Beside it, for real jobs, from sums instead of samples: ``machine`` (what was measured), ``forecast`` (how long each way
to get at the data takes, with ``caching`` in memory) and ``advice`` (what that means); ``scale`` for very many nodes,
``hardware`` and ``flow`` for what feeds GPUs.

Used by ``fanstore-plan``. What a daemon fetches ahead, and what the simulation does for FanStore, is said by the same
object, ``fanstore.order.window`` (``ahead``).
"""

from fanstore.model.curve import Curve
from fanstore.model.job import Job
from fanstore.model.outcome import Outcome
from fanstore.model.policies import POLICIES
from fanstore.model.policy import Policy, RefusedError
from fanstore.model.scenario import SCENARIOS, THESIS, Scenario
from fanstore.model.settings import scenario_of
from fanstore.model.simulation import MODES, Mode, run
from fanstore.model.system import StorageClass, System

__all__ = [
    "MODES",
    "POLICIES",
    "SCENARIOS",
    "THESIS",
    "Curve",
    "Job",
    "Mode",
    "Outcome",
    "Policy",
    "RefusedError",
    "Scenario",
    "StorageClass",
    "System",
    "run",
    "scenario_of",
]
