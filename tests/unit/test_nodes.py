"""Which of Spark's executors count as nodes. Spark's scheduler is a stand-in that answers as Spark 4.3 does."""

from types import SimpleNamespace

from penstock.spark.nodes import Nodes


class Cpus:
    """Spark's ``Option[BigDecimal]``."""

    def __init__(self, free):
        self._free = free

    def iterator(self):
        return SimpleNamespace(mkString=lambda: "" if self._free is None else f"{self._free:.9f}")


class Scheduler:
    """Executors by id: ⟨active, free cores, busy⟩."""

    def __init__(self, executors):
        self.executors = executors

    def getExecutorIds(self):  # noqa: N802
        ids = list(self.executors)
        return SimpleNamespace(apply=lambda index: ids[index], size=lambda: len(ids))

    def isExecutorActive(self, executor):  # noqa: N802
        return self.executors[executor][0]

    def getExecutorAvailableCpus(self, executor):  # noqa: N802
        return Cpus(self.executors[executor][1])

    def isExecutorBusy(self, executor):  # noqa: N802
        return self.executors[executor][2]


def nodes(executors):
    scheduler = Scheduler(executors)
    context = SimpleNamespace(schedulerBackend=lambda: scheduler, taskScheduler=lambda: scheduler)
    spark = SimpleNamespace(
        sparkContext=SimpleNamespace(master="spark://x", _jsc=SimpleNamespace(sc=lambda: context))
    )
    return Nodes(spark)


def test_an_executor_that_has_registered_but_is_not_launched_takes_no_tasks_yet():
    found = nodes({"0": (True, 3.0, True), "1": (True, 0.0, False), "2": (True, None, False)})
    assert found.names() == ["0"]


def test_a_full_executor_is_a_node():
    assert nodes({"0": (True, 0.0, True)}).present() == 1


def test_an_executor_that_is_being_left_takes_no_tasks():
    assert nodes({"0": (False, 3.0, True), "1": (True, 0.05, False)}).names() == ["1"]
