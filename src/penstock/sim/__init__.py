"""A discrete-event cluster on SimPy that drives the production code of ``penstock.control``. No wall time, no
threads; the same seed gives the same run. Needs the extra ``sim``."""

from penstock.errors import EnvironmentFault

try:
    import simpy  # noqa: F401
except ImportError:
    raise EnvironmentFault(
        "simulator",
        "SimPy keeps its time",
        "but the package simpy is not installed",
        'Install it with: pip install "penstock[sim]".',
    ) from None
