"""Progress of a Spark job, on the terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_LOOK_SECONDS = 0.25


def slots_of(spark: Any) -> int | None:
    """Number of tasks that a session runs at a time; None where it does not say (Spark Connect)."""
    context = context_of(spark)
    return None if context is None else context.defaultParallelism


@contextmanager
def watched(spark: Any, label: str, *, show: bool) -> Iterator[None]:
    """Show the partitions that are done of the jobs that the block runs, on a terminal only."""
    console = Console(stderr=True)
    context = context_of(spark)
    if not show or not console.is_terminal or context is None:
        yield
        return
    group = f"celery-native-delay-{uuid4().hex}"
    before = {name: context.getLocalProperty(name) for name in _GROUP_PROPERTIES}
    context.setJobGroup(group, label)
    done = threading.Event()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("partitions"),
        TimeElapsedColumn(),
        console=console,
    )
    watcher = threading.Thread(target=_watch, args=(context, group, label, bar, done), daemon=True)
    try:
        with bar:
            watcher.start()
            try:
                yield
            finally:
                done.set()
                watcher.join()
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)


_GROUP_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


def _watch(context: Any, group: str, label: str, bar: Progress, done: threading.Event) -> None:
    shown = bar.add_task(label, total=None)
    ended = False
    while not ended:
        ended = done.wait(_LOOK_SECONDS)
        tracker = context.statusTracker()
        total = completed = 0
        for job_id in tracker.getJobIdsForGroup(group):
            job = tracker.getJobInfo(job_id)
            for stage in map(tracker.getStageInfo, job.stageIds if job else ()):
                if stage is not None:
                    total += stage.numTasks
                    completed += stage.numCompletedTasks
        bar.update(shown, total=total or None, completed=completed)


def context_of(spark: Any) -> Any:
    """The SparkContext of a session; None with Spark Connect."""
    try:
        return spark.sparkContext
    except Exception:  # each release says so differently
        return None
