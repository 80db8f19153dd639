"""Policies, a module for each kind, and their table. A new one is a module and a row here."""

from fanstore.model.policies.deepio import DeepIOOpportunistic, DeepIOOrdered
from fanstore.model.policies.fanstore import FanStore
from fanstore.model.policies.hdmlp import Hdmlp
from fanstore.model.policies.lbann import LbannDynamic, LbannPreload
from fanstore.model.policies.localityaware import LocalityAware
from fanstore.model.policies.lowerbound import LowerBound
from fanstore.model.policies.naive import Naive
from fanstore.model.policies.parallelstaging import ParallelStaging
from fanstore.model.policies.stagingpool import StagingPool
from fanstore.model.policy import Policy

#: All policies by name, as tables show them.
POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        LowerBound(),
        Naive(),
        StagingPool(),
        Hdmlp(),
        DeepIOOrdered(),
        DeepIOOpportunistic(),
        ParallelStaging(),
        LbannDynamic(),
        LbannPreload(),
        LocalityAware(),
        FanStore(),
    )
}
