"""A model's name that leads nowhere is an error within seconds, not after minutes of attempts."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest

from colograd.data.loading import _load_stored
from colograd.runtime import hub

COMMON = "neither a folder with a model nor a Hub model that can be loaded"


def answering(monkeypatch: pytest.MonkeyPatch, answer: Exception | None) -> list[str]:
    """Fake a Hub with an empty cache that raises ``answer``, and return the list of requested addresses."""
    asked: list[str] = []

    def get(url: str, **kwargs: object) -> None:
        assert kwargs["timeout"] == hub.SECONDS
        asked.append(url)
        if answer is not None:
            raise answer

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", get)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(hub.time, "sleep", lambda seconds: None)
    return asked


def not_found(kind: type[Exception]) -> Exception:
    return kind("404", response=httpx.Response(404, request=httpx.Request("HEAD", "https://hub")))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/model", "models/of/mine", "a name"])
def test_what_can_only_be_a_folder_is_never_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, None)
    with pytest.raises(ValueError, match=f"{COMMON}: there is no such folder"):
        hub.check_model_name(name)
    assert not asked


def test_without_a_connection_two_short_attempts_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, httpx.ConnectError("Name or service not known"))
    with pytest.raises(
        ValueError, match=f"'owner/name' is {COMMON}.*can't be reached: Name or service.* Name a folder"
    ):
        hub.check_model_name("owner/name", revision="v2")
    assert len(asked) == hub.ATTEMPTS == 2 and all(url.endswith("owner/name/resolve/v2/config.json") for url in asked)


def test_what_the_hub_says_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, not_found(huggingface_hub.errors.RepositoryNotFoundError))
    with pytest.raises(ValueError, match=f"{COMMON}: .* no such model on the Hub, or a private one"):
        hub.check_model_name("owner/name")
    answering(monkeypatch, not_found(huggingface_hub.errors.GatedRepoError))
    with pytest.raises(ValueError, match="is on the Hub, but only for users with access: request access"):
        hub.check_model_name("owner/name")
    assert len(asked) == 1


def test_whatever_may_be_there_is_left_to_loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answering(monkeypatch, RuntimeError("busy"))
    hub.check_model_name("owner/name")
    hub.check_model_name(str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **kwargs: "/cache/config.json")
    hub.check_model_name("owner/cached")
    assert len(asked) == 1


def test_an_offline_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"{COMMON}.* HF_HUB_OFFLINE is set"):
        hub.check_model_name("owner/name")
    assert not asked


def test_a_dataset_without_a_connection_is_an_error_after_two_short_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(monkeypatch, httpx.ConnectError("Name or service not known"))
    with pytest.raises(
        ValueError, match="'owner/data' can't be loaded: the dataset isn't in the cache, and the Hub can't be"
    ):
        _load_stored("owner/data", None, {})
    assert len(asked) == hub.ATTEMPTS and all("datasets/owner/data" in url for url in asked)
    answering(monkeypatch, not_found(huggingface_hub.errors.RepositoryNotFoundError))
    hub.check_dataset_name("owner/data")  # which `datasets` will tell


def test_what_needs_no_hub_is_loaded_without_a_connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither local files with a builder's name nor a cached dataset (in a lower-case folder) need the Hub."""
    asked = answering(monkeypatch, httpx.ConnectError("Name or service not known"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    given = {"data_files": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache")}
    assert _load_stored("json", None, given)["train"]["prompt"] == ["a"]
    (tmp_path / "cache" / "Owner___deep_math-103_k").mkdir()
    hub.check_dataset_name("Owner/DeepMath-103K", str(tmp_path / "cache"))
    assert not asked
