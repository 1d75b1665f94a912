"""sandbox: runs programs for gym servers on other machines. `POST /run {"program", "limits"}` returns a Result."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from ngym import ServiceContext, ServiceOptions
from ngym.sandbox import Limits, Program, Sandbox, SandboxOptions, choose_sandbox
from ngym.sandbox.providers import LocalOptions
from ngym.services.base.app import JsonResponse, add_route, context_of, service_app
from ngym.services.base.request_bodies import json_body, valid_body


class Options(ServiceOptions):
    sandbox: SandboxOptions = Field(default=LocalOptions(), description="Where programs run.")
    most: Limits = Field(
        default=Limits(cpu_s=60, memory_mib=4096, disk_mib=256), description="Upper bounds of what callers ask for."
    )


class RunRequest(BaseModel):
    program: Program
    limits: Limits = Field(default_factory=Limits)


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    sandbox: Sandbox = choose_sandbox(context.options.sandbox)
    async with sandbox.lifespan():
        app.state.sandbox = sandbox
        yield


async def run(request: Request) -> Response:
    body: RunRequest = await valid_body(request, RunRequest, await json_body(request), "a run")
    limits = body.limits.at_most(context_of(request).options.most)
    return JsonResponse(await app.state.sandbox.execute(body.program, limits))


app = service_app("gym_server", options=Options, lifespan=lifespan)
add_route(app, "POST", "/run", run, summary="Run a program", body=RunRequest.model_json_schema())
