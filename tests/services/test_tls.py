"""TLS: a run uses https from end to end and refuses unknown certificates."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import itertools
import os
import ssl
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import httpx2
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from waiting import PATIENCE_S

from ngym.config.service_config import Config, load_config
from ngym.errors import ConfigError, Unreachable, UsageError
from ngym.net.connection_limits import HEAD_S
from ngym.net.tls import CA, client_context, trust_in_all_clients
from ngym.peers import Peers
from ngym.supervise.supervisor import Supervisor

SERVICES = {
    "policy": {"kind": "model", "app": "models/scripted"},
    "counter": {"kind": "gym_server", "app": "gym_servers/counter"},
    "counter_agent": {"kind": "agent", "app": "agents/simple", "gym": "counter", "model": "policy"},
}
TLS = {"certificate": "server.pem", "key": "server.key", "ca": "ca.pem"}
DAY = datetime.timedelta(days=1)
USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def certify(folder: Path, name: str, signer: str | None, address: str = "127.0.0.1", age: int = 1) -> None:
    """NAME.pem and NAME.key; signed by SIGNER's key, or an authority of its own. Valid for two days; age: since when.

    With all that RFC 5280 asks for, as clients on Python 3.13 and newer do.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    begins = now - age * DAY
    builder = (
        builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(begins + 2 * DAY)
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    usage = dict.fromkeys(USAGES, False) | {"digital_signature": True, "key_cert_sign": signer is None}
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), False)
    issuer, issuers_key = subject, key
    if signer is not None:
        issuer = x509.load_pem_x509_certificate((folder / f"{signer}.pem").read_bytes()).subject
        loaded = serialization.load_pem_private_key((folder / f"{signer}.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        issuers_key = loaded
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key.public_key()), False)
    signed = builder.issuer_name(issuer).sign(issuers_key, hashes.SHA256())
    (folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    none = serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With an authority and a server's certificate of it; what the test came to believe is forgotten afterwards."""
    monkeypatch.setenv(CA, "")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))  # of the services
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    certify(tmp_path, "ca", None)
    certify(tmp_path, "server", "ca")
    return tmp_path


def config_in(folder: Path, **tls: str) -> Config:
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**SERVICES, "ngym": {"head": {"port": 0}, "tls": {**TLS, **tls}}}))
    return load_config([file])


async def test_every_address_of_the_run_speaks_https_and_nothing_else(folder: Path) -> None:
    row = {"responses_create_params": {"input": "Count to 7.", "tools": []}, "target": 0}
    async with Supervisor(config_in(folder)) as stack:
        urls = [*(url for found in stack.urls.values() for url in found), stack.head_url]
        assert all(url.startswith("https://") for url in urls)
        peers = Peers(stack.urls, stack.head_url)
        try:
            assert (await peers["counter_agent"].post("/run", row))["reward"] == 1.0
        finally:
            await peers.close()
        strangers = ssl.create_default_context()
        async with httpx.AsyncClient(verify=strangers, timeout=PATIENCE_S) as client:
            for url in urls:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(f"{url}/health")
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(url.replace("https", "http") + "/health")


async def test_agents_on_sdks_reach_the_model_of_a_run_with_its_own_authority(folder: Path) -> None:
    for module in ("openai", "agents", "langgraph", "langchain_openai"):
        pytest.importorskip(module)
    config_in(folder)
    file = folder / "global_config.yaml"
    content = yaml.safe_load(file.read_text())
    content["policy"]["replies"] = [{"turn": 1, "tool_calls": [{"name": "add", "arguments": {"amount": 7}}]}]
    apps = ("openai_sdk", "openai_agents", "langgraph")
    content |= {app: SERVICES["counter_agent"] | {"app": f"agents/{app}"} for app in apps}
    file.write_text(yaml.safe_dump(content))
    row = {"responses_create_params": {"input": "Count to 7."}, "target": 7}
    async with Supervisor(load_config([file])) as stack:
        peers = Peers(stack.urls, stack.head_url)
        try:
            assert [(await peers[app].post("/run", row))["reward"] for app in apps] == [1.0, 1.0, 1.0]
        finally:
            await peers.close()


@pytest.mark.parametrize("set_before", [True, False])
async def test_clients_of_other_libraries_trust_the_authority_and_those_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, set_before: bool
) -> None:
    certify(folder, "machine", None)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "machine.pem") if set_before else "")
    async with Supervisor(config_in(folder)) as stack:
        url = f"{stack.urls['counter'][0]}/health"
        machines = {*httpx.create_ssl_context().get_ca_certs(binary_form=True)}
        trust_in_all_clients(folder / "ca.pem")
        for library in (httpx, httpx2):  # httpx2: the MCP SDK
            async with library.AsyncClient(timeout=PATIENCE_S) as client:
                assert (await client.get(url)).status_code == 200
    authorities = {*httpx.create_ssl_context().get_ca_certs(binary_form=True)}
    ours = ssl.PEM_cert_to_DER_cert((folder / "ca.pem").read_text())
    assert authorities == {ours} | machines if set_before else authorities > {ours} | machines


def test_services_share_a_file_of_authorities_that_only_this_user_can_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = os.environ.get("SSL_CERT_FILE", "")

    def written() -> Path:
        monkeypatch.setenv("SSL_CERT_FILE", machines)
        trust_in_all_clients(folder / "ca.pem")
        return Path(os.environ["SSL_CERT_FILE"])

    file = written()
    content, at = file.read_bytes(), file.stat().st_ino
    assert [*(folder / "temporary").iterdir()] == [file] and file.stat().st_mode & 0o777 == 0o600
    assert written() == file and file.stat().st_ino == at, "it is used again"
    file.chmod(0o666)
    assert written() == file and file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"another authority")
    assert written() == file and file.read_bytes() == content
    file.unlink()
    file.symlink_to(folder / "server.pem")
    assert written() == file and not file.is_symlink() and file.read_bytes() == content
    with pytest.raises(UsageError, match=r"ngym.tls.ca: a file with .*missing.pem and the machine's .*No such file"):
        trust_in_all_clients(folder / "missing.pem")


async def test_a_client_without_a_whole_handshake_is_disconnected(folder: Path) -> None:
    half_a_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    async with (
        Supervisor(config_in(folder)) as stack,
        httpx.AsyncClient(verify=client_context(), timeout=PATIENCE_S) as client,
    ):
        urls = [stack.urls["counter"][0], stack.head_url]
        held = []
        for url, first_bytes in itertools.product(urls, [b"", half_a_hello]):
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
            writer.write(first_bytes)
            held.append((reader, writer))
        for url in urls:
            assert (await client.get(f"{url}/health")).status_code == 200, "others are served"
        async with asyncio.timeout(5 * HEAD_S):
            for reader, writer in held:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()


async def test_a_second_terminal_finds_the_run_and_believes_its_authority(folder: Path) -> None:
    async with Supervisor(config_in(folder)):
        ask = [sys.executable, "-m", "ngym", "status", "--config", str(folder / "global_config.yaml")]
        status = await asyncio.create_subprocess_exec(*ask, stdout=asyncio.subprocess.PIPE)
        output, _ = await status.communicate()
    assert status.returncode == 0 and b"3 of 3 services ready; https://" in output


async def test_a_run_whose_certificate_is_for_another_address_ends_at_once(folder: Path) -> None:
    certify(folder, "server", "ca", address="127.0.0.2")
    problem = (
        "ngym.tls.certificate: service '.*': its certificate is not accepted: .*not valid for '127.0.0.1'; it must be "
    )
    with pytest.raises(ConfigError, match=problem):
        async with Supervisor(config_in(folder)):
            pass


async def test_a_certificate_for_another_address_is_not_believed(folder: Path) -> None:
    config = config_in(folder)
    async with Supervisor(config) as stack:
        peers = Peers({"counter": [stack.urls["counter"][0].replace("127.0.0.1", "127.0.0.2")]})
        try:
            with pytest.raises(Unreachable):
                await peers["counter"].get("/health")
        finally:
            await peers.close()


@pytest.mark.parametrize(
    ("tls", "problem"),
    [
        ({"key": "ca.key"}, "server.pem and .*ca.key are not a PEM certificate and its unencrypted key"),
        ({"certificate": "missing.pem"}, "missing.pem and .*server.key are not a PEM certificate .*No such file"),
        ({"ca": "server.key"}, "server.key is not a file of PEM certificates"),
        ({"cert": "server.pem"}, "unknown key 'tls.cert'"),
        (
            {"ca": "other.pem"},
            "clients would not trust .*server.pem: unable to get local issuer certificate; `ca` names ",
        ),
        ({"certificate": "old.pem", "key": "old.key"}, "clients would not trust .*old.pem: certificate has expired; "),
    ],
)
def test_unusable_files_are_named_before_anything_starts(folder: Path, tls: dict[str, str], problem: str) -> None:
    certify(folder, "other", None)
    certify(folder, "old", "ca", age=3)
    with pytest.raises(ConfigError, match=rf"global_config.yaml:\d+: .*{problem}"):
        config_in(folder, **tls)
