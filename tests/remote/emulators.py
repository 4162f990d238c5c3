"""Stores of other kinds than S3, on loopback: emulators by their makers, behind the proxy that counts requests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.real_data import CACHE
from tests.remote.object_store import BUCKET, FaultProxy, free_port, moto_server, running_server

AZURITE = "azurite@3.35.0"
AZURITE_HOME = CACHE / "azurite"
_AZURITE_PROGRAM = AZURITE_HOME / "node_modules" / ".bin" / "azurite-blob"
# The account of every Azurite, as its documentation gives it.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
MSC_HOME = CACHE / "msc"
# multi-storage-client wants an older tzdata than constraints.txt pins, so it is kept apart, and without dependencies.
MSC_PACKAGES = ("multi-storage-client==1.3.1", "lark==1.3.1", "prettytable==3.18.0", "pyroute2==0.9.7",
                "wcmatch==10.2.1", "bracex==3.2.2", "wcwidth==0.9.4", "xattr==1.3.0")  # fmt: skip
MSC_SECRET = "a-secret-of-a-profile"


@contextlib.contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[FaultProxy]:
    """Run a server until the block ends; yields a proxy to its port."""
    with running_server(command, port, log):
        proxy = FaultProxy(port)
        yield proxy
        proxy.close()


# More waiting connections than the five of the standard library, which would cost a second each.
_GOOGLE = """
import http.server, sys
http.server.HTTPServer.request_queue_size = 128
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), True, sys.argv[2]).run()
"""


@contextlib.contextmanager
def google(home: Path) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """The emulator of PyPI's gcp-storage-emulator, with a bucket."""
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    port = free_port()
    with serving([sys.executable, "-W", "ignore", "-c", _GOOGLE, str(port), BUCKET], port, home / "log") as proxy:
        yield proxy, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{proxy.port}"}


def azure_settings(port: int, key: str = AZURE_KEY) -> str:
    """The value of AZURE_STORAGE_CONNECTION_STRING."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={key};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
    )


@contextlib.contextmanager
def azure(home: Path) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """Microsoft's Azurite, fetched by `make test-real`."""
    pytest.importorskip("adlfs")
    if not _AZURITE_PROGRAM.exists() or not shutil.which("node"):
        pytest.skip(f"no Azurite; run: npm install --prefix {AZURITE_HOME} {AZURITE}")
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    command = [str(_AZURITE_PROGRAM), "--silent", "--inMemoryPersistence", "--skipApiVersionCheck",
               "--disableTelemetry", "--blobHost", "127.0.0.1", "--blobPort", str(port)]  # fmt: skip
    with serving(command, port, home / "log") as proxy:
        with BlobServiceClient.from_connection_string(azure_settings(port)) as client:
            client.create_container(BUCKET)
        yield proxy, {"AZURE_STORAGE_CONNECTION_STRING": azure_settings(proxy.port)}


_PROFILE = """
profiles:
  lake:
    storage_provider:
      type: s3
      options: {{base_path: {bucket}, region_name: us-east-1, endpoint_url: "http://127.0.0.1:{port}"}}
    credentials_provider:
      type: S3Credentials
      options: {{access_key: somebody-we-know, secret_key: "${{MSC_LAKE_SECRET}}"}}
"""


@contextlib.contextmanager
def multi_storage(home: Path) -> Iterator[tuple[FaultProxy, dict[str, str]]]:
    """NVIDIA's multi-storage-client with a profile for moto's S3 server."""
    if not (MSC_HOME / "multistorageclient").exists():
        packages = " ".join(MSC_PACKAGES)
        pytest.skip(f"no multi-storage-client; run: pip install --no-deps --target {MSC_HOME} {packages}")
    import boto3

    with moto_server(home / "log") as port:
        proxy = FaultProxy(port)
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket=BUCKET)
        profile = home / "msc.yaml"
        profile.write_text(_PROFILE.format(bucket=BUCKET, port=proxy.port))
        yield proxy, {"MSC_CONFIG": str(profile), "MSC_LAKE_SECRET": MSC_SECRET}
        proxy.close()


def fetch() -> None:
    """Fetch what is on no list of requirements, for `make test-real`."""
    subprocess.run(["npm", "install", "--silent", "--prefix", str(AZURITE_HOME), AZURITE], check=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(MSC_HOME)]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*command, *MSC_PACKAGES], check=True, env=environment)


if __name__ == "__main__":
    fetch()
