"""Runs untrusted programs within limits: `result = await LocalSandbox().run(code, stdin=...)`."""

from ngym.sandbox.base import Limits, Program, Result, Sandbox, Verdict
from ngym.sandbox.docker import DockerSandbox
from ngym.sandbox.local import LocalSandbox
from ngym.sandbox.providers import SandboxOptions, choose_sandbox
from ngym.sandbox.remote import RemoteSandbox

__all__ = [
    "DockerSandbox", "Limits", "LocalSandbox", "Program", "RemoteSandbox", "Result", "Sandbox", "SandboxOptions",
    "Verdict", "choose_sandbox",
]  # fmt: skip
