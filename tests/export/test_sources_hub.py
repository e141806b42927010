"""Hub ids. The hub is not asked: the one function that asks it is replaced."""

from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub import errors

from specedge.export.sources import resolve
from specedge.runtime.errors import DownloadError
from specedge.tests.tiny import write_tiny_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that lays out the tiny model; `calls` has what it was asked."""
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append({"repo_id": repo_id, **options})
        return str(write_tiny_checkpoint(tmp_path / "snapshots" / COMMIT))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id_is_fetched_at_its_revision(hub):
    checkpoint = resolve("org/Tiny-1B", revision="v1.0")
    assert (checkpoint.name, checkpoint.source) == ("Tiny-1B", f"hub:org/Tiny-1B@{COMMIT}")
    assert checkpoint.path.name == COMMIT
    assert hub[0]["repo_id"] == "org/Tiny-1B" and hub[0]["revision"] == "v1.0" and hub[0]["local_files_only"] is False
    resolve("org/Tiny-1B", offline=True)
    assert hub[1]["local_files_only"] is True and hub[1]["revision"] is None


def test_only_what_is_read_is_fetched(hub):
    from huggingface_hub.utils import filter_repo_objects

    resolve("org/tiny")
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}
    others = {"pytorch_model.bin", "onnx/model.onnx", "onnx/config.json", "original/consolidated.safetensors"}
    others |= {"consolidated.safetensors", "modeling_x.py", "m.gguf", "tf_model.h5"}
    patterns = {key: hub[0][key] for key in ("allow_patterns", "ignore_patterns")}
    assert set(filter_repo_objects(wanted | others, **patterns)) == wanted


class Response:
    """As much of an HTTP response as the hub's errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 404
    request = None
    url = ""
    text = ""


def failure(name):
    kind = getattr(errors, name)
    try:
        return kind("first line\nsecond line", response=Response())
    except TypeError:
        return kind("first line\nsecond line")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failure("RepositoryNotFoundError"), "not on the hub, or private"),
        (failure("GatedRepoError"), "gated: accept its terms"),
        (failure("RevisionNotFoundError"), "no revision v9"),
        (failure("LocalEntryNotFoundError"), "hub's cache"),
        (failure("HfHubHTTPError"), "cannot be fetched from the hub: first line"),
        (ConnectionError("reset\nby peer"), "cannot be fetched from the hub: reset"),
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("of some transport"), "of some transport"),
    ],
)
def test_failures_of_the_hub_are_one_line(monkeypatch, error, message):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(DownloadError, match=message) as raised:
        resolve("org/name", revision="v9")
    assert "\n" not in str(raised.value) and "org/name" in str(raised.value)


def test_offline_never_touches_the_network(monkeypatch, tmp_path):
    import socket

    def forbidden(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="offline was asked for; run once with a network"):
        resolve("org/name", offline=True)
