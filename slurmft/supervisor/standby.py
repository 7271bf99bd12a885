"""The supervisor's side: it holds its lease, and has a standby on another node of the job.

All of it runs in a thread of its own, since the supervisor's event loop stands still between two attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

from slurmft.config.run import RunConfig
from slurmft.errors import SlurmError, SlurmftError, SlurmUnavailable
from slurmft.ipc.channel import BadMessage, Channel, accept, keep_alive
from slurmft.policy import stop as policy
from slurmft.policy.stop import LEASE_S, RENEW_S, YIELD_S
from slurmft.scheduler import own_jobs
from slurmft.scheduler.environment import with_batch_variables
from slurmft.storage.journal import EventName
from slurmft.storage.patience import FolderThread, PatientJournal
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor.agents import open_port
from slurmft.supervisor.cluster import Cluster, SlurmCluster, Start, agents_environment, for_srun, standby_argv
from slurmft.supervisor.lease import Lease, Terms
from slurmft.supervisor.owner import is_this_process
from slurmft.system.background import overslept_s
from slurmft.system.files import appending

START_DELAY_S = 2.0
"""The agents of an attempt come first."""

READY_S = 30.0
FIRST_RETRY_S, RETRY_S = 2.0, 60.0
"""After no node could have a standby; each time twice as long. Slurm may refuse a step for seconds after a loss."""

FOLDER_S = 5.0
END_S = 3.0
PROMISED_LOOK_S = 1.0
MARGIN_S = 1.0
"""For what is done at once after it was confirmed that the run is ours."""

LOOK_S = 0.1

log = logging.getLogger(__name__)


class StandbyKeeper:
    """A context manager; without ``fault_tolerance.standby_supervisor``, or Slurm, it does nothing."""

    def __init__(self, config: RunConfig, run: RunFolder, cluster: Cluster) -> None:
        self._config, self._run, self._cluster = config, run, cluster
        self.is_wanted = config.fault_tolerance.standby_supervisor and isinstance(cluster, SlurmCluster)
        self._lease: Lease | None = None
        self._journal: PatientJournal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._secret, self._token, self._port = secrets.token_hex(32), "", 0
        self._is_named = False
        """A standby may claim the run."""

        self._is_dismissed = False
        """None is named any more."""

        self._channel: Channel | None = None
        self._problem = ""
        self._sent: dict[int, float] = {}
        self._file_at_s = self._heard_at_s = self._promised_at_s = 0.0
        """The first two without the time in which this process was suspended."""

        self._yields_until_s = 0.0
        self._is_superseded = self._is_late = False

    # For the main thread

    @property
    def is_lost(self) -> bool:
        """Whether a standby may have taken the run over."""
        return self._is_superseded or self._is_late

    def confirm(self) -> bool:
        """Whether the run is this process's, now and for some seconds; blocks while that cannot be told."""
        is_ours = self._confirm()
        if is_ours and self._is_dismissed:
            self._end_process()
        return is_ours

    def _confirm(self) -> bool:
        confirm = self._take_back if self._is_dismissed else self._renew_as_owner
        while self._is_named and not self._is_superseded:
            if not self._is_dismissed and self._is_promised():
                with contextlib.suppress(SlurmftError, OSError):  # no promise counts the sleep of a virtual machine
                    self._looks.call(self._owns, timeout_s=PROMISED_LOOK_S)
                if self._is_superseded or self._is_promised():
                    break
            if time.monotonic() >= self._yields_until_s:
                with contextlib.suppress(SlurmftError, OSError):
                    return self._looks.call(confirm, timeout_s=FOLDER_S)
            time.sleep(LOOK_S)
        return not self._is_superseded

    def _is_promised(self) -> bool:
        """Whether the standby has promised to wait for some more time."""
        return time.monotonic() < self._promised_at_s + LEASE_S - MARGIN_S

    def see_to_it(self, start: Start) -> None:
        """Hold the lease from now on, and have a standby as soon as there is time for it."""
        if not self.is_wanted:
            return
        self._journal = start.journal
        if self._thread is not None:
            return
        self._lease = Lease(self._run, start.cluster.attempt)
        self._stop, self._is_late, self._is_dismissed = asyncio.Event(), False, False
        self._file_at_s = time.monotonic()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True, name="standby")
        self._thread.start()

    def dismiss(self) -> bool:
        """End the standby: nothing of it is left on its node, and none may claim the run. False where one has.

        Waits for a run folder that does not answer, as ``confirm`` does: the end of this process would be that of a
        standby which has claimed the run.
        """
        thread, self._thread = self._thread, None
        if thread is None or self._is_superseded:
            return not self._is_superseded  # it owns the run, and its step is its life
        self._is_dismissed = True
        with contextlib.suppress(SlurmftError, OSError):
            self._folder.call(self._take_back, timeout_s=FOLDER_S)
        if self._is_superseded:
            return False
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(END_S)
        return self.confirm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dismiss()

    @functools.cached_property
    def _folder(self) -> FolderThread:
        return FolderThread()

    @functools.cached_property
    def _looks(self) -> FolderThread:
        """The main thread's own: the other may be stuck."""
        return FolderThread()

    def _renew_as_owner(self) -> bool:
        """Renew the lease, unless another process owns the run by now; none can claim it meanwhile."""
        with self._run.lock():
            return self._owns() and self._touch()

    def _touch_and_look(self) -> bool:
        """The same without the lock, which would stay locked for minutes where its holder's node dies.

        A claim that has looked at the lease just before is noticed half a second later.
        """
        return self._touch() and self._owns()

    def _touch(self) -> bool:
        assert self._lease is not None
        before_s = time.monotonic()
        self._lease.renew()
        self._file_at_s, self._is_late = before_s, False
        return True

    def _owns(self) -> bool:
        owner = self._run.owner()
        if owner is not None and not is_this_process(owner):
            self._is_superseded = True
        return not self._is_superseded

    # In the thread

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = open_port(self._cluster.listen_host)
        self._port = int(listener.getsockname()[1])
        server = await asyncio.start_server(self._serve, sock=listener)
        tasks = [asyncio.create_task(work()) for work in (self._renew, self._watch_owner, self._have_a_standby)]
        for task in tasks:
            task.add_done_callback(_tell_error)
        await self._stop.wait()
        if self._channel is not None:
            self._channel.send({"kind": "end"})
            await self._channel.drain()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()

    async def _renew(self) -> None:
        """Renew the lease by the file; a run folder that stalls leaves that by the connection."""
        while not self._is_superseded:
            await asyncio.sleep(RENEW_S)
            if time.monotonic() < self._yields_until_s:
                continue
            with contextlib.suppress(SlurmftError, OSError):
                await asyncio.wrap_future(self._folder.submit(self._touch_and_look))

    async def _watch_owner(self) -> None:
        """Note when the lease has run out; the time in which this process was suspended does not count."""
        number = 0
        while True:
            asleep_s = await overslept_s(RENEW_S)
            self._file_at_s += asleep_s
            self._heard_at_s += asleep_s
            now_s = time.monotonic()
            valid = policy.is_valid(now_s=now_s, file_at_s=self._file_at_s, heard_at_s=self._heard_at_s)
            self._is_late = self._is_named and not valid
            if self._channel is not None and now_s >= self._yields_until_s:
                number += 1
                self._sent = {key: at_s for key, at_s in self._sent.items() if now_s - at_s < LEASE_S}
                self._sent[number] = now_s
                self._channel.send({"kind": "alive", "number": number})

    async def _have_a_standby(self) -> None:
        failed: set[str] = set()
        pause_s, told = FIRST_RETRY_S, ""
        await asyncio.sleep(START_DELAY_S)
        while not self._is_superseded and not self._is_dismissed:
            assert isinstance(self._cluster, SlurmCluster)
            node = policy.choose(self._cluster.present(), os.environ.get("SLURMD_NODENAME", ""), failed)
            if node is None:
                known = frozenset(self._cluster.present())
                reason = self._problem or "there is no other node"
                if reason != told:
                    self._note(EventName.STANDBY_UNAVAILABLE, reason=reason)
                    log.warning("there is no standby supervisor: %s", reason)
                failed.clear()
                until_s, pause_s, told = time.monotonic() + pause_s, min(2 * pause_s, RETRY_S), reason
                while time.monotonic() < until_s and known.issuperset(self._cluster.present()):
                    await asyncio.sleep(RENEW_S)  # a node that was cut off may come back
                continue
            reason = ""
            if await self._start_on(node):
                self._note(EventName.STANDBY_READY, node=node)
                pause_s, told = FIRST_RETRY_S, ""
                reason = await self._until_lost()
            await self._give_up(node, reason)
            failed.add(node)

    async def _give_up(self, node: str, reason: str) -> None:
        """End a standby that is of no use; one that has claimed the run meanwhile is not ended."""
        while self._is_named and not self._is_superseded:
            with contextlib.suppress(SlurmftError, OSError):
                await asyncio.wrap_future(self._folder.submit(self._take_back))
                break
            await asyncio.sleep(RENEW_S)
        if reason:
            self._note(EventName.STANDBY_LOST, node=node, reason=reason)
        await asyncio.to_thread(self._end_process)

    async def _start_on(self, node: str) -> bool:
        """Whether a standby on that node has reported."""
        # a name, which stands on srun's command line for all users to read; a claim needs the run folder
        self._token, self._channel, self._problem = secrets.token_hex(16), None, ""
        token = self._token
        try:
            await asyncio.wrap_future(self._folder.submit(lambda: self._name(token)))
            if not self._is_named:
                return False
            self._process = self._srun(node, token)
        except (SlurmftError, OSError) as error:
            self._problem = str(error)
            return False
        until_s = time.monotonic() + READY_S
        while self._channel is None and not self._problem:
            if self._process.poll() is not None or time.monotonic() > until_s:
                self._problem = f"the one on {node} did not report; see logs/standby-{node}.log"
            await asyncio.sleep(LOOK_S)
        return not self._problem

    def _name(self, token: str) -> None:
        assert self._lease is not None
        hosts = tuple(self._cluster.control_hosts())
        with self._run.lock():  # a standby that claims the run at this moment has it, or has not
            if not self._owns() or (token and self._is_dismissed):
                return
            self._lease.write(Terms(hosts=hosts, port=self._port, secret=self._secret, standby=token))
            self._is_named = bool(token)

    def _take_back(self) -> bool:
        """No standby may claim the run from now on; False where one has."""
        self._name("")
        return not self._is_superseded

    def _srun(self, node: str, token: str) -> subprocess.Popen[bytes]:
        argv = standby_argv(self._config, node, str(self._run.config), token)
        environment = with_batch_variables(for_srun(agents_environment(os.environ)), os.environ)
        with appending(self._run.logs / f"standby-{node}.log") as errors:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment,
                                    start_new_session=True)  # fmt: skip

    async def _until_lost(self) -> str:
        """Why the standby is none any more; of no meaning where it has taken the run over."""
        while not self._is_superseded:
            await asyncio.sleep(LOOK_S)
            if self._process is not None and self._process.poll() is not None:
                return f"its step has ended with {self._process.returncode}"
            silent_s = time.monotonic() - self._heard_at_s
            if silent_s > LEASE_S / 2 and not await self._reaches_slurm():
                await self._yield()
            if silent_s > LEASE_S:
                return f"nothing was heard of it for {silent_s:.1f} s"
        return ""

    async def _yield(self) -> None:
        """Leave the run to the standby for a while: it is this node that is cut off, as far as one can tell here."""
        if self._is_superseded:
            return
        self._yields_until_s = time.monotonic() + YIELD_S
        self._note(EventName.LEASE_LEFT, reason="neither Slurm nor the standby can be reached", seconds=YIELD_S)
        log.error("neither Slurm nor the standby can be reached; leaving the run to that one for %.0f s", YIELD_S)
        await asyncio.sleep(YIELD_S)

    async def _reaches_slurm(self) -> bool:
        assert isinstance(self._cluster, SlurmCluster)
        own = self._cluster.own
        try:
            await asyncio.to_thread(own_jobs.show, own, patience_s=1.0)
        except SlurmUnavailable:
            return False
        except SlurmError:
            return True
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel, hello = await accept(reader, writer, self._secret.encode())
            if hello.get("kind") != "standby" or hello.get("token") != self._token:
                return
            if problem := str(hello.get("problem") or ""):
                self._problem = problem[:500]
                return
            keep_alive(writer)
            self._heard_at_s = time.monotonic()
            self._channel = channel
            while (message := await channel.receive()) is not None:
                sent_s = self._sent.get(message.get("number", 0))
                if sent_s is not None and self._channel is channel:
                    self._promised_at_s = sent_s
                    self._heard_at_s = max(self._heard_at_s, sent_s)
        except (BadMessage, TimeoutError, OSError, TypeError) as error:
            log.debug("a connection that is no standby's: %s", error)
        except asyncio.CancelledError:  # asyncio's streams would log it
            return
        finally:
            writer.close()

    def _end_process(self) -> None:
        """End the standby's step, unless it may have claimed the run; a srun whose node is gone is only killed."""
        if self._is_named or self._is_superseded:
            return
        process, self._process = self._process, None
        if process is None:
            return
        for end in (process.terminate, process.kill):
            if process.poll() is None:
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)

    def _note(self, event: EventName, **details: object) -> None:
        if self._journal is not None and not self._is_superseded:
            self._journal.append(event, **details)


def _tell_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("internal error: %r", error, exc_info=error)
