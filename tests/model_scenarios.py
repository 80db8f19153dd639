"""Small scenarios for the tests of fanstore.model: seconds of a job with a few hundred samples."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from fanstore.model import SCENARIOS, Scenario, System


def small(
    samples: int = 300,
    nodes: int = 4,
    batch: int = 5,
    epochs: int = 3,
    mean_mb: float = 1.0,
    sigma_mb: float = 0.2,
    room_mb: Sequence[float] = (30.0, 40.0, 60.0),
    system: System = SCENARIOS["S2"].system,
) -> Scenario:
    """A scenario on the system of the thesis, with other room in its three storage classes."""
    classes = tuple(replace(storage, capacity_mb=mb) for storage, mb in zip(system.classes, room_mb, strict=True))
    return Scenario(
        name="small",
        summary="",
        system=replace(system, nodes=nodes, classes=classes),
        samples=samples,
        mean_mb=mean_mb,
        sigma_mb=sigma_mb,
        epochs=epochs,
        batch=batch,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    nodes = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 6))
    mean_mb = draw(st.sampled_from([0.03, 1.0, 3.0]))
    samples = draw(st.integers(nodes * batch, 120))
    dataset_mb = samples * mean_mb
    room_mb = draw(st.tuples(st.floats(0.01, 0.5), st.floats(0.0, 1.5), st.floats(0.0, 1.5)))
    return small(
        samples=samples,
        nodes=nodes,
        batch=batch,
        epochs=draw(st.integers(1, 4)),
        mean_mb=mean_mb,
        sigma_mb=mean_mb * draw(st.sampled_from([0.0, 0.1, 1.0])),
        room_mb=[share * dataset_mb for share in room_mb],
        system=SCENARIOS[draw(st.sampled_from(["S2", "imagenet-1k"]))].system,
    )
