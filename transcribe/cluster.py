"""Recordings through the workers of a Ray cluster, one a GPU or a CPU socket.

Ray starts the workers and carries what goes between. The driver plans and writes as without it, and imports no torch.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .console import explain
from .errors import AudioError, ModelError, TranscribeError, UsageError
from .options import LoadOptions, Request

if TYPE_CHECKING:
    from .pipeline import Progresses, Result, Transcriber

GROUP = 32  # recordings that go to a worker together: windows enough to decode in lockstep, few to do again
DEATHS = 3  # of workers, after which the recording they had in hand is given up

Group = dict[int, str]  # index of the source -> its path


class Cluster:
    """What a `Transcriber` does, done by workers, for one run: `check`, then `transcribe_all`, with which they end.

    `address` is that of a cluster, "auto" for the one this machine belongs to, or "local" for one that is started here
    and ends with the run. `model` is a path, the same on all nodes. Raises `UsageError` where Ray is not installed, or
    no such cluster can be used.
    """

    def __init__(self, address: str, model: str | os.PathLike[str], options: LoadOptions) -> None:
        self.ray = _connect(address)
        self.model = os.path.abspath(model)
        try:
            self.workers = [_Worker(start, start()) for start in self._places(options)]
        except self.ray.exceptions.RayError as error:
            reason = f"{address}: its nodes cannot run transcribe, is it installed on all? {_first_line(error)}"
            raise UsageError(f"--ray {reason}") from error
        if not self.workers:
            raise UsageError(f"--ray {address}: this cluster has neither GPUs nor CPUs")
        self.notes: list[str] = []
        """How the model was loaded, once `check` has been called."""

    def _places(self, options: LoadOptions) -> list[Callable[[], Any]]:
        """Where workers go, each as a call that starts one there: its node, its GPU, its share of the node's CPUs."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        gpus = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1 and options.device != "cpu"]
        nodes = gpus or [node for node in nodes if node["Resources"].get("CPU", 0) >= 1]
        on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        count = self.ray.remote(count_sockets)
        sockets = self.ray.get([count.options(num_cpus=0, scheduling_strategy=node).remote() for node in on])
        actor = self.ray.remote(Actor)
        places: list[Callable[[], Any]] = []
        for node, strategy, has_sockets in zip(nodes, on, sockets, strict=True):
            cpus = int(node["Resources"].get("CPU", 0))
            workers = int(node["Resources"]["GPU"]) if gpus else min(has_sockets, cpus)
            share = cpus // workers
            its = actor.options(num_cpus=share, num_gpus=1 if gpus else 0, scheduling_strategy=strategy)
            own = replace(options, threads=options.threads or max(share, 1))
            places += [partial(its.remote, self.model, own)] * workers
        return places

    def check(self, request: Request) -> Request:
        """The request with its language as a code, from the first worker whose model is loaded.

        Raises `UsageError` for what this model cannot do, `ModelError` if a worker cannot load it.
        """
        loading = [worker.actor.check.remote(request) for worker in self.workers]
        reason = ""
        while loading:
            (first,), loading = self.ray.wait(loading)
            try:
                checked, notes = _value(self.ray.get(first))
                self.notes = [f"workers: {len(self.workers)}", *notes]
                return checked
            except self.ray.exceptions.RayError as error:
                reason = _first_line(error)
        raise ModelError(f"{self.model}: every worker died while loading it: {reason}")

    def transcribe_all(
        self, sources: Iterable[str | Path | BinaryIO], request: Request, progress: Progresses | None = None
    ) -> Generator[Result]:
        """Index of a source, its transcript or what went wrong, in the order in which recordings end.

        Workers get groups once their model is loaded. What a worker that died had in hand is handed out again, and
        another takes its place. `progress` is called at the end of each recording. Raises `ModelError` if a worker
        cannot load the model, `TranscribeError` when none is left.
        """
        try:
            yield from self._results(Handout(map(_path, sources), len(self.workers)), request, progress)
        finally:
            self.ray.shutdown()

    def _results(self, handout: Handout, request: Request, progress: Progresses | None) -> Iterator[Result]:
        lost = self.ray.exceptions.RayError
        # What each worker does: a result to come (its model is being loaded) or a stream of them (a group).
        loading = {worker.actor.check.remote(request): worker for worker in self.workers}
        streams: dict[Any, tuple[_Worker, Group]] = {}
        idle: list[_Worker] = []
        while True:
            while idle and (group := handout.take()):
                worker = idle.pop()
                streams[worker.actor.transcribe.remote(group, request)] = worker, group
            if not handout and not any(group for _, group in streams.values()):
                return
            if not loading and not streams:
                raise TranscribeError("no worker of the cluster is left: start again to go on")
            (event,), _ = self.ray.wait([*streams, *loading])
            if event in loading:
                worker = loading.pop(event)
                try:
                    _value(self.ray.get(event))
                except lost:
                    continue  # it died before it was of use: its place stays empty
                idle.append(worker)
                continue
            worker, group = streams[event]
            try:
                index, result = self.ray.get(next(event))
            except StopIteration:
                del streams[event]
                idle.append(worker)
            except self.ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except lost:
                del streams[event]
                self.ray.kill(worker.actor)  # it may be out of reach only
                worker.actor = worker.start()
                loading[worker.actor.check.remote(request)] = worker
                for index, path in handout.lost(group).items():
                    yield index, TranscribeError(f"{path}: {DEATHS} workers died with this recording in hand")
            else:
                del group[index]
                if progress is not None and not isinstance(result, Exception):
                    progress(index, result.decoded_seconds, result.decoded_seconds)
                yield index, result


@dataclass
class _Worker:
    """A place on the cluster, by the call that starts an actor there, and who is there now."""

    start: Callable[[], Any]
    actor: Any


class Handout:
    """What goes out next, and what comes back undone. True while there is something to hand out."""

    def __init__(self, sources: Iterable[str], workers: int) -> None:
        self._coming = enumerate(sources)
        self._next: deque[tuple[int, str]] = deque()
        self._alone: deque[tuple[int, str]] = deque()
        self._deaths: Counter[int] = Counter()
        self._share = 2 * workers

    def take(self) -> Group:
        """The next group: up to `GROUP`, smaller near the end, so that the workers end together. Empty if none is left.

        What a worker has died with goes alone, so that others are not in hand when it does so again.
        """
        if self._alone:
            return dict([self._alone.popleft()])
        count = -(-self._look_ahead() // self._share)
        return dict(self._next.popleft() for _ in range(count))

    def lost(self, group: Group) -> Group:
        """Take back what a dead worker has not done. Returns what is given up, for the deaths it has seen."""
        self._deaths.update(group.keys())
        given_up = {index: path for index, path in group.items() if self._deaths[index] >= DEATHS}
        self._alone.extend((index, path) for index, path in group.items() if index not in given_up)
        return given_up

    def __bool__(self) -> bool:
        return bool(self._alone or self._look_ahead())

    def _look_ahead(self) -> int:
        self._next.extend(islice(self._coming, GROUP * self._share - len(self._next)))
        return len(self._next)


class Actor:
    """What runs in a worker's process: a `Transcriber`, loaded once. Errors are returned, not raised."""

    def __init__(self, model: str, options: LoadOptions) -> None:
        self.model, self.options = model, options
        self.transcriber: Transcriber | None = None

    def check(self, request: Request) -> tuple[Request, list[str]] | TranscribeError:
        """`Transcriber.check` and the model's notes, once it is loaded."""
        try:
            if self.transcriber is None:
                if not os.path.exists(self.model):
                    raise ModelError(_not_here(self.model))
                from .pipeline import Transcriber

                self.transcriber = Transcriber.load(self.model, self.options)
            return self.transcriber.check(request), self.transcriber.model.notes
        except TranscribeError as error:
            return error
        except Exception as error:
            return ModelError(explain(error, f"{self.model}: "))

    def transcribe(self, group: Group, request: Request) -> Iterator[Result]:
        """`Transcriber.transcribe_all`, by the group's indices."""
        here = [index for index, path in group.items() if os.path.exists(path)]
        yield from ((index, AudioError(_not_here(group[index]))) for index in group.keys() - here)
        assert self.transcriber is not None  # `check` came first
        for at, result in self.transcriber.transcribe_all([group[index] for index in here], request):
            yield here[at], _portable(result) if isinstance(result, Exception) else result


def count_sockets() -> int:
    """CPU sockets of this machine; 1 where it does not say."""
    files = Path("/sys/devices/system/cpu").glob("cpu*/topology/physical_package_id")
    return len({file.read_text() for file in files}) or 1


def _connect(address: str) -> Any:
    """The module `ray`, connected to the cluster, and silent."""
    host, _, port = address.rpartition(":")
    if address not in ("local", "auto") and not (port.isdecimal() and host and "/" not in host):
        raise UsageError(f"--ray {address}: write host:port, auto for the cluster of this machine, or local")
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs a package that is not installed: pip install 'transcribe[ray]'") from error
    # Without this, what happens to workers is printed to stdout, whatever `log_to_driver` says.
    ray._private.worker._worker_logs_enabled = False
    try:
        if host:  # Ray takes minutes to find out that nobody is there
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # of many classes
        raise UsageError(f"--ray {address}: no cluster that can be used: {_first_line(error)}") from error
    return ray


def _path(source: str | Path | BinaryIO) -> str:
    """Absolute, as workers have another working folder."""
    assert isinstance(source, (str, Path))  # the command line refuses standard input
    return os.path.abspath(source)


def _not_here(path: str) -> str:
    return f"{path}: not on node {socket.gethostname()}: with --ray, paths must be visible on all nodes"


def _portable(error: Exception) -> Exception:
    """`error` if it can be pickled, or else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _value(answer: Any) -> Any:
    """What a worker returned; raised if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
