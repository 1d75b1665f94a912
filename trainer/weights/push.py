"""Pushes new weights into all running policy servers or none, and proves that the served weights are the trained ones.

    pusher = Pusher(urls, token)                            # on rank 0
    version = pusher.prepare() + 1                          # the servers' highest version; waits until they are ready
    pusher.push(version, engine.weights(), LogprobProof(token_ids, logprobs))
    pusher.finish()

begin on every replica -> every file to every replica -> commit on every replica -> compare logprobs with the trainer's
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ngym.config.import_path import import_class
from ngym.errors import NgymError, UsageError

from ..recipe.extensions import CallReplicas, File, Mode, PolicyServer, PushFailed, PushTransport, TransientPushError
from .push_files import WeightDeltas, check_finite, checkpoint, safetensors_files
from .replica import AdapterShape, LogprobProof, Replica

if TYPE_CHECKING:
    from .transfer import Transfer


Json = dict[str, Any]
Result = TypeVar("Result")
Server = TypeVar("Server")
PAUSE_S = 1.0
SAY_AFTER_S = 5.0
UNANSWERED_S = 30.0  # of a request, until the pusher says that it waits for the answer
JOIN_S = 60.0  # of each call to a replica that joins: the run waits for it
MAX_AT_ONCE = 64
REMEDIES = {
    "filesystem": "; set weights_root: FOLDER in the policy's stanza",
    "lora": "; set lora_rank in the policy's stanza",
    **dict.fromkeys(("nccl", "ipc"), "; set engine.weight_transfer_config in the policy's stanza"),
}
"""What to do about servers that do not offer a transport."""
NO_PUSH = "; models/vllm, models/transformers and models/sglang take weights (rollouts.policy_app)"
# Mean difference of logprobs from arithmetic alone, by the less precise side: float32 1e-6 measured, float16
# 4e-4, bfloat16 0.011.
TOLERANCES = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}


class HttpTransport(PushTransport):
    """Sends the bytes to each server."""

    def send(self, file: File, replicas: Sequence[PolicyServer], on_all: CallReplicas) -> None:
        on_all(replicas, lambda replica: replica.send(file.content, file.sha256))


class DeltaTransport(HttpTransport):
    """The same with only the values that changed, if the server kept the files of the push before."""

    server_transport = "delta"


class LoraTransport(HttpTransport):
    """The same with the files of an adapter, which the servers load next to their checkpoint."""

    server_transport = "lora"


class FilesystemTransport(PushTransport):
    """Writes into `folder`, the servers' weights_root; a file exists until every server has copied it.

    Nothing is synced or renamed: the server gets the name after the file is closed, and copies and checks it at once.
    """

    server_transport = "filesystem"

    def send(self, file: File, replicas: Sequence[PolicyServer], on_all: CallReplicas) -> None:
        assert self.folder is not None
        path = self.folder / f"{secrets.token_hex(8)}.safetensors"
        try:
            path.write_bytes(file.content)
            on_all(replicas, lambda replica: replica.name(path.name, file.sha256))
        finally:
            path.unlink(missing_ok=True)


IN_FILES: dict[str, type[PushTransport]] = {
    "http": HttpTransport,
    "delta": DeltaTransport,
    "filesystem": FilesystemTransport,
    "lora": LoraTransport,
}


class PushResult(NamedTuple):
    """Statistics of a push, from the first byte to the proof.

    bytes: of the tensors; with the transport `delta`, of the files of the replica that got the most. difference: mean
    |logprob - engine's| of the worst replica.
    """

    version: int
    bytes: int
    seconds: float
    difference: float


class Pusher:
    """The policy's servers, for the duration of a run.

    Args:
        urls: of all replicas; or a function that looks them up, before each push and after each failed attempt, because
            replicas join, leave and move. It is also called while a request waits; an error of it ends the push.
        token: their admin token, from `.ngym/head.json` of ng_run.
        transport: `http` sends the bytes of a checkpoint, `delta` those that changed, `lora` those of an adapter; `filesystem` writes a checkpoint
            into `folder`, which is the servers' weights_root; `nccl` and `ipc` move it from GPU to GPU. Or the import
            path of a PushTransport.
        folder: for the transport `filesystem` or one of your own.
        adapter: the shape of what is pushed with `lora`.
        mode: for generations in flight: keep (they continue with the new weights), wait, abort.
        patience_s: how long a server may be unreachable, restarting, or busy with another push.
        say: called with what a push waits for: when a call has been repeated for a while, or has no answer for long.
    """

    def __init__(
        self,
        urls: Sequence[str] | Callable[[], Sequence[str]],
        token: str,
        *,
        transport: str = "http",
        folder: Path | None = None,
        adapter: AdapterShape | None = None,
        mode: Mode = "keep",
        patience_s: float = 300.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        is_custom = ":" in transport
        if not is_custom and (transport == "filesystem") != (folder is not None):
            raise ValueError("a folder is only for the transport filesystem")
        if transport == "filesystem" and folder is not None and not folder.is_dir():
            remedy = "name the folder that the policy's stanza calls weights_root"
            raise UsageError(f"rollouts.push_folder: there is no folder {folder}; {remedy}")
        if (transport == "lora") != (adapter is not None):
            raise ValueError("an adapter's shape is only for the transport lora")
        self._urls = urls if callable(urls) else lambda: urls
        self._token = token
        self._patience_s = patience_s
        self._say = say
        self._replicas: list[Replica] = []
        self._follow()
        in_files: type[PushTransport] | None = (
            import_class(transport, PushTransport) if is_custom else IN_FILES.get(transport)
        )
        self._files = in_files(folder) if in_files else None
        self._deltas = WeightDeltas() if transport == "delta" else None
        self._delta_push_bytes = 0
        self._server_transport = in_files.server_transport if in_files else transport
        self._adapter = adapter
        self._mode: Mode = mode
        self._threads = ThreadPoolExecutor(max(MAX_AT_ONCE, len(self._replicas)) + 1, "push")
        self._transfer = None if self._files else self._new_transfer(transport)

    def _follow(self) -> None:
        """Keep the replicas that are still there, and add the new ones."""
        replicas_by_url = {replica.url: replica for replica in self._replicas}
        urls = [url.rstrip("/") for url in self._urls()]
        self._replicas = [replicas_by_url.get(url) or Replica(url, self._token, self._patience_s) for url in urls]
        for url in replicas_by_url.keys() - set(urls):
            replicas_by_url[url].close()

    def prepare(self) -> int:
        """Wait until every server is ready for a push; returns the highest policy version that is served."""
        return max(self.versions())

    def versions(self) -> list[int]:
        """Wait until every server is ready for a push; returns the policy version of each.

        Raises:
            PushFailed: a server refuses this token or transport, or is unreachable for longer than the patience.
        """
        self._follow()
        weights_of_replicas = self._with_retries(lambda: self._call_all(self._replicas, Replica.weights))
        for replica, weights in zip(self._replicas, weights_of_replicas, strict=True):
            if self._server_transport not in weights["transport"]:
                transports = ", ".join(weights["transport"]) or "no push at all"
                remedy = REMEDIES.get(self._server_transport, "") if weights["transport"] else NO_PUSH
                raise PushFailed(
                    f"{replica.url}: no transport {self._server_transport!r} there; it offers {transports}{remedy}"
                )
        return [int(weights["policy_version"]) for weights in weights_of_replicas]

    def sleep(self) -> None:
        """Stop all generation and free the servers' GPU memory. Raises PushFailed if a server does not."""
        self._with_retries(lambda: self._call_all(self._replicas, Replica.sleep))

    def wake(self, *parts: str) -> None:
        """Restore these parts of the servers' memory: `weights`, `kv_cache`; with both they generate again."""
        self._with_retries(lambda: self._call_all(self._replicas, lambda replica: replica.wake(*parts)))

    def push(
        self,
        version: int,
        weights: Mapping[str, Tensor],
        proof: LogprobProof,
        before_proof: Callable[[], None] | None = None,
    ) -> PushResult:
        """Make every server serve these weights under this version, which is higher than all previous ones.

        Args:
            weights: every tensor of the checkpoint by its Hugging Face name, or of the adapter by PEFT's; of tensors
                that share their memory (a tied head) the first is sent.
            before_proof: called once, when all servers have committed, and before the proof, for which they must generate.
                With it, a server that dies between its commit and its proof ends the push.

        Raises:
            PushFailed: a server refused, was unreachable for longer than the patience, or serves other weights now.
            Before the first commit, all servers keep their previous weights.
        """
        began = time.monotonic()
        tensors = checkpoint(weights)
        committed: set[Replica] = set()

        def pushed() -> float:
            self._stage_and_commit(self._replicas, version, tensors, committed)
            return self.prove(proof, version)

        if before_proof is None:
            difference = self._with_retries(pushed)
        else:
            self._with_retries(lambda: self._stage_and_commit(self._replicas, version, tensors, committed))
            before_proof()
            try:
                difference = self.prove(proof, version)
            except TransientPushError as error:
                raise PushFailed(str(error)) from error
        tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
        pushed_bytes = tensor_bytes if self._deltas is None else self._delta_push_bytes
        return PushResult(version, pushed_bytes, time.monotonic() - began, difference)

    @property
    def urls(self) -> list[str]:
        """The replicas of the last push."""
        return [replica.url for replica in self._replicas]

    def joining(self, urls: Sequence[str]) -> dict[str, int]:
        """The policy version of each of these servers; 0 where `admit` will say what is wrong."""
        versions = dict.fromkeys(urls, 0)
        for url in urls:
            with self._joining_replica(url) as replica, contextlib.suppress(NgymError):
                versions[url] = int(replica.weights()["policy_version"])
        return versions

    def admit(
        self, urls: Sequence[str], version: int, weights: Mapping[str, Tensor], proof: LogprobProof
    ) -> dict[str, str]:
        """Push to these servers only, which no caller knows yet; the others keep what they serve.

        Returns the reason for each one that does not serve these weights now.
        """
        tensors = checkpoint(weights)
        problems = {}
        for url in urls:
            with self._joining_replica(url) as replica:
                try:
                    if replica.weights()["policy_version"] != version:
                        self._stage_and_commit([replica], version, tensors, set())
                    _check({replica: replica.prove(proof)}, proof, version)
                except NgymError as error:
                    problems[url] = str(error)
        return problems

    @contextlib.contextmanager
    def _joining_replica(self, url: str) -> Iterator[Replica]:
        replica = Replica(url, self._token, min(JOIN_S, self._patience_s))
        try:
            yield replica
        finally:
            replica.close()

    def prove(self, proof: LogprobProof, version: int | None = None) -> float:
        """The mean difference between the servers' and the trainer's logprobs, of the worst server.

        Raises:
            PushFailed: it is larger than arithmetic explains, or a later version is served. TransientPushError: an earlier version
                is served.
        """
        answers = self._with_retries(lambda: self._call_all(self._replicas, lambda replica: replica.prove(proof)))
        return _check(dict(zip(self._replicas, answers, strict=True)), proof, version)

    def finish(self) -> None:
        """End pushing. A push that was interrupted, as by Ctrl-C, does not wait for servers."""
        if self._transfer is not None:
            self._transfer.close()
        if self._files is not None:
            self._files.close()
        for replica in self._replicas:
            replica.close()
        self._threads.shutdown(cancel_futures=True)

    def _stage_and_commit(
        self, replicas: Sequence[Replica], version: int, tensors: Mapping[str, Tensor], committed: set[Replica]
    ) -> None:
        """One attempt. committed: the replicas that got the commit request, in this attempt or an earlier one.

        A replica that has committed is skipped: its answer may have been lost, or another replica has failed meanwhile.
        """
        if self._transfer is not None:
            check_finite(tensors)  # with the other transports the servers check
        waiting = [
            server for server in replicas if server not in committed or server.weights()["policy_version"] != version
        ]
        try:
            if self._deltas is not None:
                self._begin_and_send_delta(waiting, version, tensors, self._deltas)
            else:
                transfer = self._transfer is not None
                self._call_all(waiting, lambda replica: replica.begin(version, tensors, self._adapter, transfer))
                if self._transfer is not None:
                    self._transfer.connect(waiting)
                else:
                    self._send(safetensors_files(tensors), waiting)
        except NgymError as error:
            self._call_all(waiting, Replica.give_up)
            if any(server in committed and server.weights()["policy_version"] == version for server in waiting):
                raise TransientPushError("the push that it should commit has just been committed") from error
            raise
        committed.update(waiting)
        if self._transfer is not None:
            self._transfer.push(tensors)
        else:
            self._call_all(waiting, lambda replica: replica.commit(self._mode))
        if self._deltas is not None:
            self._deltas.keep(version, tensors)

    def _begin_and_send_delta(
        self, replicas: Sequence[Replica], version: int, tensors: Mapping[str, Tensor], deltas: WeightDeltas
    ) -> None:
        """Send what has changed to the replicas that kept the push before, and the checkpoint to the others."""
        changes = deltas.files(tensors)

        def begin(replica: Replica) -> None:
            delta = replica.delta_of(deltas.version, changes) if changes is not None else None
            replica.begin(version, tensors, None, keep=True, delta=delta)

        self._call_all(replicas, begin)
        taking = [replica for replica in replicas if replica.takes_delta]
        others = [replica for replica in replicas if not replica.takes_delta]
        sent = self._send(iter(changes or ()), taking) if taking else 0
        self._delta_push_bytes = max(sent, self._send(safetensors_files(tensors), others) if others else 0)

    def _send(self, files: Iterator[File], replicas: Sequence[Replica]) -> int:
        """Send each file to each replica. Returns the bytes of the files."""
        assert self._files is not None
        sent = 0
        for file in self._prefetch(files):
            self._files.send(file, replicas, self._call_all)
            sent += len(file.content)
        return sent

    def _new_transfer(self, backend: str) -> Transfer:
        check_transport(backend)
        from .transfer import Transfer

        return Transfer(backend, self._call_all, self._mode, self._patience_s)

    def _prefetch(self, files: Iterator[File]) -> Iterator[File]:
        """Yield the files; each is written while the previous one is sent."""
        upcoming = self._threads.submit(next, files, None)
        while (file := upcoming.result()) is not None:
            upcoming = self._threads.submit(next, files, None)
            yield file

    def _call_all(self, replicas: Sequence[Server], call: Callable[[Server], Result]) -> list[Result]:
        """Call each replica concurrently; raises an error only after all have answered."""
        futures = [self._threads.submit(call, replica) for replica in replicas]
        while wait(futures, SAY_AFTER_S).not_done:
            self._urls()  # the run's sockets accept requests even if its services have ended, which this raises
            for request in filter(None, (replica.unanswered(UNANSWERED_S) for replica in self._replicas)):
                self._say(
                    f"{request}: no answer for {UNANSWERED_S:.0f} s; waiting up to {self._patience_s:.0f} s for it"
                )
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # Errors that a retry cannot fix go first.
            raise min(errors, key=lambda error: isinstance(error, TransientPushError))
        return [future.result() for future in futures]

    def _with_retries(self, act: Callable[[], Result]) -> Result:
        began, failing_since, said = time.monotonic(), math.inf, False
        while True:
            try:
                return act()
            except TransientPushError as error:
                now = time.monotonic()
                failing_since = min(failing_since, now)  # a push may have taken longer than the patience before
                if now - failing_since + PAUSE_S > self._patience_s:
                    raise PushFailed(f"{error} (tried for {self._patience_s:.0f} s)") from error
                if now - began > SAY_AFTER_S and not said:
                    said = True
                    self._say(f"{error}; trying again for up to {self._patience_s:.0f} s")
            time.sleep(PAUSE_S)
            self._follow()


def _check(answers: Mapping[Replica, Json], proof: LogprobProof, version: int | None) -> float:
    """The largest mean difference of these proofs. Raises as `Pusher.prove`."""
    differences = []
    for replica, answer in answers.items():
        served_version, precisions = answer["policy_version"], (answer["dtype"], proof.dtype)
        tolerance = max(TOLERANCES[precision] for precision in precisions)
        if version is not None and served_version != version:
            # an older version: the replica ended after its commit and restarted
            kind = TransientPushError if served_version < version else PushFailed
            raise kind(f"{replica.url}: serves version {served_version} after a push of {version}; push again")
        pairs = zip(answer["logprobs"], proof.logprobs, strict=True)
        difference = fmean(abs(engine - trainer) for engine, trainer in pairs)
        if not difference <= tolerance:
            raise PushFailed(
                f"{replica.url}: serves version {served_version}, whose logprobs differ from the trainer's by "
                f"{difference:.2g} on average ({answer['dtype']} there and {proof.dtype} here explain {tolerance}): "
                "these are not the weights that were trained"
            )
        differences.append(difference)
    return max(differences)


def check_transport(transport: str) -> None:
    """Raise UsageError if this transport cannot be used here."""
    if transport != "nccl":
        return
    if not torch.cuda.is_available():
        raise UsageError("transport nccl: moves weights between GPUs, and torch finds none here; use http")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("transport nccl: needs vLLM in the trainer's environment too; install it, or use http")
